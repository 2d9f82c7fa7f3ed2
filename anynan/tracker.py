"""What ``track`` returns: readings in, events and actions out."""

import functools
import math
import threading
import types
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

from anynan.adapter import Adapter
from anynan.causes import Situation, explain
from anynan.diagnosis import Case, diagnose, operation
from anynan.errors import AnomalyError, AnynanWarning, NonFiniteError
from anynan.events import NON_FINITE, Event, Kind
from anynan.lineage import Replay, trace
from anynan.monitor import History, Monitor, Reading, Rows
from anynan.options import Options, environment
from anynan.reporting import render, render_line

MAX_EVENTS = 10_000
MAX_REPLAYS = 3


class Tracker:
    """Watch a model or a function, and act when a reading breaks the policy.

    Made by an adapter's ``track``. A context manager that removes the hooks at exit; for a
    tracked function it is also callable in the function's place.
    """

    def __init__(self, target: Any, options: Options, name: str) -> None:
        self._target = target
        self.options = options
        self.name = name
        self.monitor = Monitor(options.policy, options.history)
        self.adapter: Adapter | None = None
        self.paused = False
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._counts: Counter[str] = Counter()
        self._said: dict[str, None] = {}
        self._lock = threading.RLock()
        self._local = threading.local()
        self._replays: Counter[tuple[Any, ...]] = Counter()
        self._streak = 0
        self._scaled_streak = 0
        self._clean: int | None = None
        self._updates: list[int] = []

    # Called in the function's place.

    @property
    def fn(self) -> Any:
        """Give back what was tracked, unchanged; None for a model that is gone."""
        # A model is held weakly: it owns the hooks, the hooks own the tracker.
        return self._target() if isinstance(self._target, weakref.ref) else self._target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the tracked function (one step) or module."""
        adapter = self.adapter
        if adapter is None or self.paused:
            return self.fn(*args, **kwargs)
        return adapter.call(self.fn, args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind like a function, so that methods can be tracked."""
        return self if instance is None else types.MethodType(self, instance)

    # Life.

    def start(self, adapter: Adapter) -> Self:
        """Install an adapter's hooks; adapters call this at the end of ``track``."""
        if hasattr(self._target, "__name__"):
            functools.update_wrapper(self, self._target)
        if environment() == "off":
            return self
        self.adapter = adapter
        try:
            adapter.attach()
        except BaseException:
            adapter.detach()
            self.adapter = None
            raise
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self.remove(raising=kind is None)

    def remove(self, *, raising: bool = False) -> None:
        """Take every hook away; unread rows are read first, and warned about if bad.

        Args:
            raising: Apply the tracker's own action to what is found unread, as at the end
                of a ``with`` block, instead of only warning.
        """
        adapter, self.adapter = self.adapter, None
        if adapter is None:
            return
        try:
            with self._softly(not raising):
                adapter.read()
        finally:
            adapter.detach()

    def pause(self) -> None:
        """Stop watching until ``resume``, at no cost meanwhile."""
        if self.adapter is not None and not self.paused:
            self.adapter.set_paused(True)
        self.paused = True

    def resume(self) -> None:
        """Watch again after ``pause``."""
        if self.adapter is not None and self.paused:
            self.adapter.set_paused(False)
        self.paused = False

    def check(self) -> None:
        """Read and judge now what has not been read yet, whatever the read point.

        Raises:
            AnomalyError: As the tracker's action says.
        """
        if self.adapter is not None:
            self.adapter.read()

    # What was seen.

    @property
    def events(self) -> tuple[Event, ...]:
        """Return the recorded events, oldest first."""
        with self._lock:
            return tuple(self._events)

    @property
    def history(self) -> History:
        """Return the ring of past readings."""
        return self.monitor.history

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what could not be watched, each said once."""
        return tuple(self._said)

    def dump(self, path_contains: str = "", phase: str | None = None) -> list[Reading]:
        """Return past readings whose layer path contains a string, in one phase or all."""
        return [
            reading
            for reading in self.history
            if path_contains in (reading.layer or "") and phase in (None, reading.phase)
        ]

    def clear(self) -> None:
        """Forget events and readings; the hooks stay."""
        with self._lock:
            self._events.clear()
            self._counts.clear()
            self.history.clear()

    def metrics(self) -> dict[str, float]:
        """Return the last step's numbers as a flat dict, for any logger."""
        from anynan.overview import metrics

        return metrics(self)

    def report(self) -> str:
        """Return the state as text: steps, tightest headroom, events, what was allowed."""
        from anynan.overview import overview

        return overview(self)

    def count(self, word: str) -> int:
        """Count events by severity (``bad``, ``suspect``) or ``expected``."""
        return self._counts[word]

    # What adapters call.

    def rows(self) -> Rows:
        """Return this thread's open rows."""
        rows: Rows | None = getattr(self._local, "rows", None)
        if rows is None:
            rows = self._local.rows = Rows(getattr(self._local, "next", 0))
        return rows

    def close_step(self) -> Rows | None:
        """End this thread's step and count on; ``settle`` the rows when they are read."""
        rows: Rows | None = getattr(self._local, "rows", None)
        if rows is not None:
            self._local.rows = None
            self._local.next = rows.step + 1
        return rows

    def settle(self, rows: Rows) -> None:
        """Judge what is left of an ended step, and keep its readings.

        Raises:
            AnomalyError: As the tracker's action says.
        """
        try:
            self.judge(rows)
            self._settle_scale(rows)
        finally:
            self.history.append(rows)
            if rows.failed is None:
                self._streak = 0

    @property
    def step(self) -> int:
        """Give this thread's step, from 0."""
        rows: Rows | None = getattr(self._local, "rows", None)
        return rows.step if rows is not None else getattr(self._local, "next", 0)

    def judge(self, rows: Rows) -> None:
        """Judge every row that was not judged yet, in execution order."""
        flagged = self.monitor.flagged(rows)
        for position, order in enumerate(flagged):
            self.flag(rows, order, later=len(flagged) - position - 1)

    def flag(
        self,
        rows: Rows,
        order: int,
        value: Any = None,
        *,
        later: int = 0,
        replayed: Replay | None = None,
    ) -> None:
        """Judge one row that left its slot's limits, and act.

        Args:
            rows: The open rows.
            order: Which of them.
            value: The framework's array, when it is at hand.
            later: How many later readings are bad too.
            replayed: What an operation watcher saw already, instead of a replay.

        Raises:
            AnomalyError: As the tracker's action says.
        """
        rows.judged = max(rows.judged, order + 1)
        reading = rows.reading(order)
        site = reading.site
        judged = self.options.policy.judge(
            site.phase, reading.lo, reading.hi, layer=site.layer, dtype_max=site.dtype_max
        )
        if judged is None:
            return
        kind, severity = judged
        if rows.failed is not None:
            rows.spread += 1
            return
        key = (site.layer, site.phase, kind)
        reason = self._excuse(rows, order, kind, reading)
        if reason is not None:
            self._note_once(reading, kind, value, expected=reason)
            return
        if severity == "suspect" or key in self.monitor.downgraded:
            self._note_once(reading, kind, value)
            return
        if site.phase == "backward" and kind in NON_FINITE and rows.pending is None:
            scale = self._adapter.loss_scale()
            if scale is not None:
                rows.pending = reading
                return
        elif rows.pending is not None and site.phase == "backward":
            return
        self.fail(rows, reading, kind, value, later=later, replayed=replayed)

    def fail(
        self,
        rows: Rows,
        reading: Reading,
        kind: Kind,
        value: Any = None,
        *,
        later: int = 0,
        replayed: Replay | None = None,
    ) -> None:
        """Diagnose a bad reading and act on the event.

        Raises:
            AnomalyError: As the tracker's action says.
        """
        key = (reading.layer, reading.phase, kind)
        self._replays[key] += 1
        wanted = self.options.replay and self._replays[key] <= MAX_REPLAYS
        case = Case(
            reading, kind, rows, value, later,
            replay=wanted, clean=self._clean, updates=list(self._updates), replayed=replayed,
        )  # fmt: skip
        if self.options.replay and not wanted:
            case.notes.append(f"not replayed again: the first {MAX_REPLAYS} like this were")
        event = diagnose(case, self.monitor, self._adapter)
        if event is None:
            self.monitor.downgraded[key] = "only placed values (a mask)"
            self._note_once(reading, kind, value)
            return
        if event.expected is not None:
            self.monitor.downgraded[key] = event.expected
            self._record(replace(event, severity="suspect"))
            return
        rows.failed = event
        self._act(event, rows)

    def operations(self, rows: Rows, seen: Replay) -> None:
        """Judge what an operation-level watcher saw of a whole step.

        Raises:
            AnomalyError: As the tracker's action says.
        """
        verdict = trace(seen.records, seen.sinks)
        for record in verdict.contained:
            if record.output is None or record.output.kind is None:
                continue
            event = Event(
                backend=self._adapter.backend,
                layer=record.layer,
                phase=record.phase,
                kind=record.output.kind,
                severity="suspect",
                step=rows.step,
                call=record.call,
                order=len(rows.lo),
                summary=record.output,
                operation=operation(record),
                cause=explain(
                    Situation(
                        phase=record.phase, kind=record.output.kind, layer=record.layer,
                        tensor="output", summary=record.output, record=record,
                    )
                ),
                expected=record.expected,
                rank=self._adapter.rank(),
                notes=("contained: its bad values reached no layer output, loss or gradient",),
            )  # fmt: skip
            self._record(event)
        sink = verdict.sink
        if sink is None or rows.failed is not None:
            return
        site = self.monitor.site(sink.layer, sink.phase, sink.label, "", None)
        value = {"nan": math.nan, "posinf": math.inf}.get(sink.kind, -math.inf)
        rows.sites.append(site)
        rows.calls.append(0)
        rows.lo.append(value)
        rows.hi.append(value)
        self.flag(rows, len(rows.lo) - 1, replayed=seen)

    def refuse(self, event: Event, rows: Rows) -> None:
        """Act on an event that an adapter's own read made (a spike, a bad weight at attach)."""
        if event.severity == "bad":
            rows.failed = event
            self._act(event, rows)
        else:
            self._record(event)
            warnings.warn(render_line(event), AnynanWarning, stacklevel=2)

    def guard(self, rows: Rows, norm: float) -> None:
        """Judge the total gradient norm of a step: a jump, or next to nothing.

        Args:
            rows: The open rows.
            norm: L2 norm over all weights; a norm that is not finite is judged elsewhere.

        Raises:
            AnomalyError: If the policy makes a spike or a vanishing gradient bad.
        """
        policy = self.options.policy
        kind: Kind | None = None
        median = self.monitor.median_norm(norm)
        if policy.spike is not None and median is not None and norm > policy.spike * median:
            kind = "spike"
        elif policy.vanishing is not None and norm < policy.vanishing:
            kind = "vanishing"
        if kind is None or rows.failed is not None:
            return
        level = "bad" if kind in policy.bad else "suspect"
        growth = self.monitor.norms()
        event = Event(
            backend=self._adapter.backend,
            layer="",
            phase="backward",
            kind=kind,
            severity="bad" if level == "bad" else "suspect",
            step=rows.step,
            order=len(rows.lo),
            tensor="gradient norm",
            cause=explain(
                Situation(
                    phase="backward", kind=kind, layer="", tensor="gradient norm", growth=growth
                )
            ),
            rank=self._adapter.rank(),
        )
        self.refuse(event, rows)

    def updated(self, step: int) -> None:
        """Note an optimizer update from finite gradients."""
        self._updates.append(step)
        del self._updates[:-2]

    def known_clean(self, step: int) -> None:
        """Note that every weight and buffer was finite at the start of this step."""
        self._clean = step
        self._updates.clear()

    def say(self, note: str) -> None:
        """Warn once of something that is not watched, and list it in the report."""
        with self._lock:
            if note in self._said:
                return
            self._said[note] = None
        warnings.warn(f"anynan: {note}", AnynanWarning, stacklevel=3)

    # Inside.

    @property
    def _adapter(self) -> Adapter:
        if self.adapter is None:
            msg = "this tracker was removed: track the model again to watch it"
            raise RuntimeError(msg)
        return self.adapter

    def _excuse(self, rows: Rows, order: int, kind: Kind, reading: Reading) -> str | None:
        expected = rows.expected.get(order)
        if expected is not None and kind in expected:
            return expected[kind]
        return self.options.policy.allowed(kind, reading.phase, reading.layer)

    def _note_once(
        self, reading: Reading, kind: Kind, value: Any, *, expected: str | None = None
    ) -> None:
        """Record a suspect or an expected reading the first time, count it every time."""
        self._counts["expected" if expected else "suspect"] += 1
        key = ("noted", reading.layer, reading.phase, kind, reading.site.tensor)
        self._replays[key] += 1
        if self._replays[key] > 1:
            return
        event = Event(
            backend=self._adapter.backend,
            layer=reading.layer,
            phase=reading.phase,
            kind=kind,
            severity="suspect",
            step=reading.step,
            call=reading.call,
            order=reading.order,
            tensor=reading.site.tensor,
            parameter=reading.site.parameter,
            summary=None if value is None else self._adapter.measure(value),
            expected=expected,
            rank=self._adapter.rank(),
        )
        with self._lock:
            self._events.append(event)
        if kind not in NON_FINITE and expected is None:
            warnings.warn(render_line(event), AnynanWarning, stacklevel=2)

    def _settle_scale(self, rows: Rows) -> None:
        """Judge a step whose scaled gradients overflowed, once its end is known."""
        reading, rows.pending = rows.pending, None
        if reading is None or rows.failed is not None or self.adapter is None:
            if reading is None:
                self._scaled_streak = 0
            return
        kind = reading.kind or "nan"
        self._scaled_streak += 1
        scale = self._adapter.loss_scale()
        policy = self.options.policy
        floor = scale is not None and scale <= policy.floor
        if self._scaled_streak >= policy.streak or floor:
            self.fail(rows, reading, kind)
            return
        self._counts["expected"] += 1
        event = Event(
            backend=self._adapter.backend,
            layer=reading.layer,
            phase="backward",
            kind=kind,
            severity="suspect",
            step=reading.step,
            call=reading.call,
            order=reading.order,
            tensor=reading.site.tensor,
            parameter=reading.site.parameter,
            expected="the loss scale is being found: the scaler skips this update"
            + ("" if scale is None else f" (scale now {scale:g})"),
            rank=self._adapter.rank(),
        )
        with self._lock:
            self._events.append(event)

    def _record(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)
            self._counts["expected" if event.expected else event.severity] += 1

    def _act(self, event: Event, rows: Rows) -> None:
        self._record(event)
        self._streak += 1
        action: Any = getattr(self._local, "softly", None) or environment() or self.options.action
        if action == "off":
            return
        if self._streak <= self.options.patience and action in ("raise", "warn", "skip"):
            rows.skip = True
            warnings.warn(
                f"{render(event)}\n\n  skipped {self._streak} of {self.options.patience} bad "
                "steps in a row that patience= allows",
                AnynanWarning,
                stacklevel=2,
            )
        elif action == "raise":
            kind = NonFiniteError if event.kind in NON_FINITE else AnomalyError
            raise kind(render(event), event, self)
        elif action == "warn":
            warnings.warn(render(event), AnynanWarning, stacklevel=2)
        elif action == "skip":
            rows.skip = True
            if self._streak == 1:
                text = f"{render(event)}\n\n  the update of this step is dropped"
                warnings.warn(text, AnynanWarning, stacklevel=2)
        elif isinstance(action, Callable):  # type: ignore[arg-type]
            action(event)

    def _softly(self, on: bool) -> "_Softly":
        return _Softly(self._local, on)

    def __repr__(self) -> str:
        state = "removed" if self.adapter is None else "paused" if self.paused else "watching"
        return f"<anynan.Tracker {state} {self.name}: {len(self._events)} events>"


class _Softly:
    """Warn instead of raising, for rows that are read when nobody can catch."""

    def __init__(self, local: threading.local, on: bool) -> None:
        self._local, self._on = local, on

    def __enter__(self) -> None:
        if self._on:
            self._local.softly = "warn"

    def __exit__(self, *details: object) -> None:
        self._local.softly = None
