"""Judge readings and act: everything an adapter calls while its tracker watches."""

import math
import os
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from anynan._base.escaping import prose
from anynan._base.folders import free, refuse_full
from anynan._base.notices import warn
from anynan._base.summary import Summary
from anynan._bundle.collector import LIMIT, Collector
from anynan._diagnosis.agreement import divergence, same_end
from anynan._diagnosis.causes import Situation, explain
from anynan._diagnosis.diagnosis import bare, diagnose, norm_event
from anynan._diagnosis.evidence import BadParameter, Evidence, ReplayError
from anynan._diagnosis.investigation import BadInput, Investigation
from anynan._diagnosis.kinds.operations import contained
from anynan._diagnosis.lineage import PLACING, OpRecord, Replay, Sink, trace
from anynan._diagnosis.messages import CONTAINED
from anynan._diagnosis.rules.evidence import magnitude
from anynan._diagnosis.trials import tried
from anynan._readings.history import Cleared
from anynan._readings.monitor import Monitor
from anynan._readings.norms import FEWEST, Guard
from anynan._readings.policy import may_mask
from anynan._readings.readings import Reading, Site, layer_norms
from anynan._readings.step import DeferredFailure, DeferredInput, Step
from anynan._steps import made, messages
from anynan._steps.actions import Actor, names_bad, takes_along
from anynan.errors import reason
from anynan.events import NON_FINITE, STATE, Event, Kind
from anynan.options import Options, environment

if TYPE_CHECKING:
    from anynan._steps.tracked import Tracked

MAX_REPLAYS = 3
# Among the makers of what came in: of whatever of it, where its adapter knows that.
ANYTHING = ""
MAX_INPUTS = 100
_VALUES = {"posinf": math.inf, "neginf": -math.inf}
_RISING = ("forward", "loss", "backward")
_SKIPPED = "the loss scale is being found: the scaler skips this update"
_STOPPED = "the scaled gradient overflowed and reached no weight: the scaler makes this update"


class Judge(Actor):
    """Hold one tracker's steps, findings and actions; ``Tracked.judge`` is one."""

    def __init__(self, options: Options, tracker: "Tracked") -> None:
        super().__init__(options, tracker)
        self.monitor = Monitor(options.policy, options.history)
        self._guard = Guard(options.policy)
        self._guarded, self._unguarded = False, 0
        self._said: dict[str, None] = {}
        self._remarks: dict[str, None] = {}
        self._seen: Counter[tuple[Any, ...]] = Counter()
        # Layers that hand on what came in, and whether a replay has shown it.
        self._carriers: dict[tuple[Any, ...], bool] = {}
        # Buffers that hold NaN or Inf by design, for all that is known, and since which step.
        self._meant: dict[str, int] = {}
        self._scaled_streak = 0
        # Steps still to be watched operation by operation, since which, and how often that began.
        self._risen = self._rose = self._rises = 0
        self._rising: Any = None
        # What failed last, for a bundle, and whether the one that was asked for is saved.
        self._last: tuple[Reading, Event] | None = None
        self._saved = False
        self._clean: int | None = None
        self._updates: list[int] = []
        self._trained = False
        self._spoiled: int | None = None
        # The last failed step after which the program went on, and the one since which weights
        # are bad: its update was made all the same, or it found them so.
        self._went_on: Step | None = None
        self._through: Step | None = None
        # What was seen to come of bad weights; None where all may.
        self._follows: set[tuple[Any, ...]] | None = None
        self._cleared = False  # whether a clean step came after them
        # The one of these weights by which a later step sees that they still are bad.
        self._witness: BadParameter | None = None
        # The last step that was bad, and the one whose event stands for it.
        self._bad: tuple[int, Step | None] = -1, None
        self._since = made.count()
        self._comes = False  # whether it was said that what comes in is told elsewhere
        # Steps that failed by what came in, by a key that knows the same bad values again.
        self.inputs: dict[Any, Step] = {}

    # What adapters call.

    def rows(self) -> Step:
        """Return this thread's open rows."""
        rows: Step | None = getattr(self._local, "rows", None)
        if rows is None:
            rows = self._local.rows = Step(getattr(self._local, "next", 0))
            rows.evaluated = self.evaluated
        return rows

    def open_rows(self) -> Step | None:
        """Return this thread's open rows if they failed."""
        rows: Step | None = getattr(self._local, "rows", None)
        return None if rows is None or rows.failed is None else rows

    def close_step(self, *, evaluation: bool = False) -> Step | None:
        """End this thread's step and count on; ``settle`` the rows when they are read.

        Args:
            evaluation: It was a call without gradients: no iteration of a training.
        """
        rows: Step | None = getattr(self._local, "rows", None)
        if rows is not None:
            self._local.rows = None
            self._local.next = rows.number + 1
            self._local.since = made.count()
            self._local.evaluated = self.evaluated + evaluation
        return rows

    @property
    def evaluated(self) -> int:
        """Count this thread's steps that took no gradients."""
        count: int = getattr(self._local, "evaluated", 0)
        return count

    def settle(self, rows: Step) -> None:
        """Judge what is left of an ended step, and keep its readings.

        Raises:
            AnomalyError: As the tracker's action says.
        """
        if self._is_plain(rows):
            self.monitor.history.append(rows)
            self._streak = self._scaled_streak = 0
            return
        try:
            self.review(rows)
            self._settle_carried(rows)
            self._settle_scale(rows)
            self._settle_left(rows)
            self.guard(rows)
        finally:
            self._settle_inputs(rows)
            self._fall(rows)
            self.monitor.history.append(rows)
            if rows.failed is None:
                self._streak = 0
            else:
                self._spread(rows)
                if self._goes_on(rows):
                    self._went_on, self._bad = rows, (rows.number, rows)
            self._look_for_repair(rows)
            for follower in self.followers:
                follower.step(rows, self.notes, self.remarks)

    def _is_plain(self, rows: Step) -> bool:
        """Tell whether an ended step is over as it is: all of it was judged, and nothing waits."""
        waits = (
            rows.carrying or rows.left or rows.pending_inputs or self.followers or self._guard.on
        )
        open_ = self._risen or rows.pending is not None or rows.held is not None
        known = rows.failed is None and self._through is None
        return known and not (waits or open_) and rows.judged == len(rows.lo)

    def passed(self, sites: list[Site], squares: list[float]) -> bool:
        """Take a step of which everything read was clean, at little cost.

        Args:
            sites: What was read; a list that is the same object for the same slots.
            squares: The sum of squares of each.

        Returns:
            False if it is to be judged as any other.
        """
        local = self._local.__dict__  # asked once: it is another for each thread
        if self.followers or self._risen or self._through or local.get("rows") is not None:
            return False
        step: int = local.get("next", 0)
        local["next"], local["since"] = step + 1, made.count()
        self._streak = 0
        self.monitor.history.add(Cleared(step, sites, squares))
        return True

    @property
    def since(self) -> int:
        """Give the number of what was made bad first after this thread's last step."""
        return int(getattr(self._local, "since", self._since))

    def since_the_start(self) -> None:
        """Count the program before it was watched as its own: it is watched from its first call."""
        self._since = 0

    @property
    def step(self) -> int:
        """Give this thread's step, from 0."""
        rows: Step | None = getattr(self._local, "rows", None)
        return rows.number if rows is not None else getattr(self._local, "next", 0)

    def review(self, rows: Step) -> None:
        """Judge every row that was not judged yet, in execution order."""
        if rows.judged == len(rows.lo):
            return
        if rows.follows:
            rows.judged = len(rows.lo)
            return
        flagged = self.monitor.flagged(rows)
        # What follows from weights that are bad is not counted one by one.
        spoilt = bool(flagged) and self.is_spoilt(rows)
        bad = [not spoilt and self._is_bad(rows, order) for order in flagged]
        later = sum(bad)
        for order, counts in zip(flagged, bad, strict=True):
            later -= counts
            self.flag(rows, order, later=later)

    def flag(
        self,
        rows: Step,
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
        if self.adapter is None:  # removed by the user's own callback, mid-step
            return
        if rows.follows:
            if rows.sites[order].phase in ("forward", "loss"):  # another model may be given it
                self._look_around(rows, rows.reading(order), value)
            return
        reading = rows.reading(order)
        site = reading.site
        judged = self.options.policy.judge(
            site.phase, rows.lo[order], rows.hi[order], layer=site.layer, dtype_max=site.dtype_max
        )
        if judged is None:
            return
        kind, severity = judged
        if kind in NON_FINITE:
            self._look_around(rows, reading, value)
        if rows.failed is not None or rows.held is not None:
            rows.spread += self._is_bad(rows, order)
            return
        key = (site.layer, site.phase, kind)
        reason = self._excuse(rows, order, kind, reading)
        if reason is not None:
            self._note_once(reading, kind, value, expected=reason)
            return
        if site.phase == "input" and severity == "bad" and kind in NON_FINITE:
            known = self._seen[_noted(reading, kind)] > 0
            rows.pending_inputs.append(
                DeferredInput(reading, kind, _lookup(rows, order, value, weak=known))
            )
            return
        if site.buffer and site.phase == "parameter" and kind in NON_FINITE:
            self._note_state(reading, kind, value)
            return
        mask = site.parameter is None and key in self.monitor.downgraded
        meant = mask or order in rows.suspect
        if severity == "suspect" or meant:
            if site.phase == "input" and site.tensor in rows.makers:  # noted where it was made
                return
            if value is None and site.tensor == STATE:
                value = _live(rows, order)
            if not meant and self._may_be_left(rows, reading, kind):
                left = DeferredInput(reading, kind, _lookup(rows, order, value, weak=False))
                rows.left.append((left, replayed))
                return
            self._note_once(reading, kind, value)
            return
        inside = site.phase == "forward" and bool(site.layer) and replayed is None
        if rows.pending_inputs and inside and kind in NON_FINITE:
            # It may be dealt with before anything leaves the model: one look tells of all layers.
            rows.carried = rows.carried or self._carriers.get(key, False)
            rows.carrying.append(reading)
            rows.spread += 1
            return
        if site.phase == "backward" and kind in NON_FINITE and rows.pending is None:
            scale = self._adapter.loss_scale()
            if scale is not None:
                rows.pending = reading
                return
        elif rows.pending is not None and site.phase == "backward":
            return
        self.fail(rows, reading, kind, value, later=later, replayed=replayed)

    def _look_around(self, rows: Step, reading: Reading, value: Any) -> None:
        """Remember what left the model bad, and find whether what came in left another so."""
        phase, order = reading.phase, reading.order
        if phase not in ("input", "forward", "loss"):
            return
        if value is None:
            value = _live(rows, order)
        memory = None if value is None else self._adapter.memory(value)
        if phase == "input":
            found = made.maker(self, value, self.since)
            if found is not None:
                rows.makers[reading.site.tensor] = found
            elif memory is not None:
                rows.brought.append(memory)
        elif not any(is_of(value) for is_of in rows.brought):
            tracker = self._tracker()
            name = "" if tracker is None else tracker.name
            made.note(self, name, rows.number, memory, own=not rows.pending_inputs)

    def fail(
        self,
        rows: Step,
        reading: Reading,
        kind: Kind,
        value: Any = None,
        *,
        later: int = 0,
        replayed: Replay | None = None,
    ) -> None:
        """Diagnose a bad reading and act on the event; hold it where all ranks act together.

        Raises:
            AnomalyError: As the tracker's action says.
        """
        if self._is_consequence(rows, reading, kind, later) or self._was_told(rows, reading, kind):
            return
        if rows.holding:
            rows.held = rows.held or DeferredFailure(reading, kind, value, replayed)
            return
        event = self.diagnose(rows, reading, kind, value, later=later, replayed=replayed)
        key = (reading.layer, reading.phase, kind)
        if event is not None and not self._came_of(rows, event, key):
            self.accept(rows, event)

    def accept(self, rows: Step, event: Event) -> None:
        """Act on the event that a step failed by; what comes of bad weights is none of its own.

        Raises:
            AnomalyError: As the tracker's action says.
        """
        found = event.phase in ("parameter", "optimizer") and event.kind in NON_FINITE
        goes_on = not self._stops(rows) or (environment() or self.options.action) == "skip"
        if found and goes_on and not self._is_buffer(event):
            self._through, self._follows, self._cleared = rows, set(), False
            if event.order < len(rows.lo) and event.rank == self._adapter.rank():
                reading = rows.reading(event.order)
                self._follows.add((reading.layer, reading.phase, reading.kind))
        super().accept(rows, event)

    def unscaled(self, rows: Step) -> None:
        """Judge the gradients that waited for a loss scaler: none has a part in this step.

        Raises:
            AnomalyError: As the tracker's action says.
        """
        reading, rows.pending = rows.pending, None
        if reading is not None:
            self.fail(rows, reading, reading.kind or "nan")

    def release(self, rows: Step) -> Event | None:
        """Diagnose what is held; if that is None it was no failure, and the rest is judged."""
        held, rows.held = rows.held, None
        if held is None or held.reading is None:
            return None if held is None else held.event
        event = self.diagnose(
            rows, held.reading, held.kind, held.value, later=rows.spread, replayed=held.replayed
        )
        if event is None:
            rows.judged, rows.spread = held.reading.order + 1, 0
            self.review(rows)
        return event

    def diagnose(
        self,
        rows: Step,
        reading: Reading,
        kind: Kind,
        value: Any = None,
        *,
        later: int = 0,
        replayed: Replay | None = None,
    ) -> Event | None:
        """Find what a bad reading came from; None if it is a mask or was expected."""
        key = (reading.layer, reading.phase, kind)
        self._seen[key] += 1
        event, case = self._investigate(rows, reading, kind, value, later, replayed)
        tracker = self._tracker()
        if event is None:
            self.monitor.downgraded[key] = "only placed values (a mask)"
            self._note_once(reading, kind, value)
            return None
        if (
            event.phase == "input"
            and reading.phase == "forward"
            and reading.layer
            and rows.pending_inputs
        ):
            shown = case.replayed is not None
            self._carriers.update(dict.fromkeys([key, *map(_carrier, rows.carrying)], shown))
            rows.carried = rows.carried or shown
            rows.spread += 1
            return None
        spoils = reading.site.parameter is not None or reading.phase in ("loss", "optimizer")
        if event.expected is not None and spoils:
            note = messages.EXPECTED_HARM(why=event.expected)
            event = replace(event, expected=None, notes=(*event.notes, note))
        if event.expected is not None:
            self.monitor.downgraded[key] = event.expected
            self._record(replace(event, severity="suspect"))
            return None
        if reading.phase == "backward" and isinstance(self.options.read, int):
            self._spoiled = rows.number
        event = self._tried(event, case)
        if case.unshown and event.operation is None and event.phase in _RISING:
            event = replace(event, notes=(*event.notes, *self._rise(rows)))
        elif self._risen and event.operation is not None and rows.number > self._rose:
            self._risen = 0
            note = f"found because {self._rising.found.format(step=self._rose + 1)}"
            event = replace(event, notes=(*event.notes, note))
        if tracker is not None and tracker.where:
            event = replace(event, notes=(*event.notes, tracker.where))
        self._last = reading, event
        if self.options.save is not None and not self._saved:
            self._saved = True
            event = replace(event, notes=(*event.notes, self._save_first(reading, event)))
        return event

    def _investigate(
        self, rows: Step, reading: Reading, kind: Kind, value: Any, later: int,
        replayed: Replay | None,
    ) -> tuple[Event | None, Investigation]:  # fmt: skip
        """Put together what is known of a bad reading, with a second run where one is wanted."""
        key = (reading.layer, reading.phase, kind)
        wanted = self.wants_replay(reading, kind, now=True)
        if value is None:
            value = _live(rows, reading.order)
        together = replayed is not None  # all ranks ran it again
        if replayed is None and rows.seen is not None:
            replayed = rows.seen(reading, value)
        tracker = self._tracker()
        case = Investigation(
            reading, kind, rows, self._adapter.evidence(reading, value), self.monitor, later,
            clean=self._clean, updates=list(self._updates), replayed=replayed,
            seen=replayed is not None, together=together, unread=self._unread(),
            watched=rows.seen is not None or self.options.level == "operation",
            ends=self.options.level == "step", came_in=self._came_in(rows, kind),
            of_model=tracker is None or tracker.of_model,
            in_order=self._adapter.in_order,
            evidence_of=lambda other: self._adapter.evidence(other, _live(rows, other.order)),
            meant=self._meant,
            trained=self._trained or not (self.options.backward and self._adapter.sees_training),
        )  # fmt: skip
        if replayed is None and wanted:
            self._run_again(case, key)
        elif replayed is None and self.options.replay:
            case.notes.append(messages.NOT_REPLAYED_AGAIN(n=MAX_REPLAYS))
        try:
            return diagnose(case), case
        except Exception as error:  # noqa: BLE001  the user's program is not to fail by ours
            return bare(case, error), case

    def _may_be_left(self, rows: Step, reading: Reading, kind: Kind) -> bool:
        """Tell whether -Inf that the whole model or function gives is to be looked into."""
        site = reading.site
        end = kind == "neginf" and site.phase == "forward" and not site.layer
        known = self._seen["left", site.layer, site.tensor]
        return end and self.options.replay and not (known or rows.holding)

    def _settle_left(self, rows: Step) -> None:
        """Tell of -Inf that was given, unless the step failed by it: that is told already."""
        for left, replayed in rows.left:
            reading, kind = left.reading, left.kind
            if self.adapter is None:  # removed by the user's own callback, mid-step
                return
            alone = rows.failed is None and self._may_be_left(rows, reading, kind)
            if not (alone and self._tell_left(rows, reading, kind, left.value(), replayed)):
                self._note_once(reading, kind, left.value())

    def _tell_left(
        self, rows: Step, reading: Reading, kind: Kind, value: Any, replayed: Replay | None
    ) -> bool:
        """Warn, once, of -Inf that the whole model or function gives and that arithmetic made.

        Returns:
            False where it may be a mask: nothing shows that an operation computed it.
        """
        site = reading.site
        looks = "left", site.layer
        if self._seen[looks] >= MAX_REPLAYS:
            return False
        self._seen[looks] += 1
        event, _ = self._investigate(rows, reading, kind, value, 0, replayed)
        if event is None or event.expected is not None:
            return False
        if event.operation is None and event.phase != "input":
            return False
        self._seen["left", site.layer, site.tensor] += 1
        self._seen[_noted(reading, kind)] += 1
        self._tell_suspect(event)
        return True

    def tell_record(self, rows: Step, record: OpRecord, note: str) -> None:
        """Warn, once, of an operation that made a bad value of which no more is known.

        Args:
            rows: The open rows.
            record: The operation.
            note: What is known.
        """
        self._tell_suspect(contained(record, rows, self._known(), note))

    def told_input(self, key: Any, rows: Step) -> None:
        """Remember a step that failed by what came in, if the program goes on.

        Args:
            key: By which the same bad values are known again.
            rows: The step.
        """
        failed: Event | None = rows.failed
        if failed is not None and failed.phase == "input" and self._goes_on(rows):
            self.inputs[key] = rows
            if len(self.inputs) > MAX_INPUTS:
                del self.inputs[next(iter(self.inputs))]

    def follows(self, first: Step) -> None:
        """Count a step that was given what failed an earlier one; it is not looked into.

        Args:
            first: The earlier step.
        """
        rows = self.rows()
        said = f"the same bad values came in as in step {first.failed.step}, which was reported"
        self._add(rows, first, 1, said)
        self.close_step()
        self.monitor.history.append(rows)
        for follower in self.followers:
            follower.step(rows, self.notes, self.remarks)

    def _tell_suspect(self, event: Event) -> None:
        """Record a suspect with its operation, and warn of it; one seen before is only counted."""
        event = self._signed(replace(event, severity="suspect"))
        self._seen["told", event.operation] += 1
        if self._seen["told", event.operation] > 1:
            self._counts["suspect"] += 1
            return
        self._record(event)
        if (environment() or self.options.action) not in ("record", "off"):
            warn(self._text(event))

    # Bundles.

    def save(self, folder: str, limit: int) -> None:
        """Write the last failing call as a bundle; see ``Tracker.save``."""
        refuse_full(folder)
        if self._last is None:
            msg = "save(): nothing was bad yet, so there is nothing to save"
            raise ValueError(msg)
        reading, event = self._last
        found = Collector(event, limit)
        try:
            self._adapter.capture(reading, found)
        except ReplayError as error:
            msg = (
                f"save(): {error}. Give track() save=folder, or call save() from an action, "
                "where the call is not over yet"
            )
            raise ValueError(msg) from None
        self._write(folder, event, found)

    def _save_first(self, reading: Reading, event: Event) -> str:
        """Write the bundle that ``save=`` asked for; say where, or why not."""
        assert self.options.save is not None
        rank = self._adapter.rank()
        folder = free(os.fspath(self.options.save) + (f".rank{rank}" if rank else ""))
        found = Collector(event, LIMIT)
        try:
            try:
                self._adapter.capture(reading, found)
            except ReplayError as error:
                found.notes.append(str(error))
            self._write(folder, event, found)
        except Exception as error:  # noqa: BLE001  the event is the news
            return messages.BUNDLE_UNSAVED(error=reason(error))
        return f"saved in {folder}: anynan replay {folder}"

    def _write(self, folder: str, event: Event, found: Collector) -> None:
        from anynan._bundle.bundle import save

        if event.operation is not None and found.call is None:
            found.notes.append("a second run did not come to the operation that the event names")
        save(folder, self._signed(event), found, self._adapter.dialect)

    def _tried(self, event: Event, case: Investigation) -> Event:
        """Add what came of the fix, where a second run may be made for it."""
        again = self.options.replay and self.options.level != "operation"
        seen = case.replayed
        if not again or seen is None or seen.notes or seen.inner:
            return event
        reading = case.reading
        try:
            return tried(
                event, case, lambda repairs: self._adapter.attempt(reading, repairs), self._excused
            )
        except Exception:  # noqa: BLE001  nothing is claimed of what could not be tried
            return event

    def _excused(self, sink: Sink) -> bool:
        """Tell whether bad values may be there by policy, or by what was said where they arose."""
        value = _VALUES.get(sink.kind, math.nan)
        judged = self.options.policy.judge(
            sink.phase, value, value, layer=sink.layer, dtype_max=None
        )
        if judged is None or judged[1] != "bad":
            return True
        key = (sink.layer, sink.phase, judged[0])
        allowed = self.options.policy.allowed(judged[0], sink.phase, sink.layer)
        return allowed is not None or key in self.monitor.downgraded

    def _came_in(self, rows: Step, kind: Kind) -> list[BadInput]:
        """Say what is known of the bad values that came in."""
        if kind not in NON_FINITE:
            return []
        return [
            BadInput(
                doubt.reading,
                doubt.kind,
                self._adapter.evidence(doubt.reading, doubt.value()),
                harmless=self._seen[_noted(doubt.reading, doubt.kind)] > 0,
            )
            for doubt in rows.pending_inputs
        ]

    def _known(self) -> Evidence:
        """Say where an event is seen that concerns no single reading."""
        return Evidence(self._adapter.backend, self._adapter.rank())

    def _run_again(self, case: Investigation, key: tuple[Any, ...]) -> None:
        """Have the step replayed, where that can tell more."""
        if case.reading.phase in ("parameter", "input") or case.kind not in NON_FINITE:
            return
        notes: list[str] = []
        for again in (self._adapter.replay, self._adapter.replay_call):
            try:
                replayed = again(case.reading)
                verdict = None if replayed is None else case.weigh(replayed)
            except ReplayError as error:
                if again == self._adapter.replay:
                    self._seen[key] -= 1  # it may be possible the next time
                notes.append(str(error))
            except Exception as error:  # noqa: BLE001  what was found must not be lost
                notes.append(messages.REPLAY_FAILED(error=reason(error)))
            else:
                shown = verdict is not None and verdict.shown
                if shown and case.replayed is not None:
                    notes += case.replayed.notes
                if shown or case.replayed is None:
                    case.replayed, case.verdict = replayed, verdict
                if shown:
                    break
        else:
            case.unshown = True
        case.notes += notes

    @property
    def level(self) -> str:
        """Give the level of the step that begins: it rises where a fault was not reproduced.

        What follows from weights that are known to be bad is not looked into.
        """
        given = self.options.level
        level = "operation" if self._risen else given
        if level == "operation" and self._is_spoilt():
            return "layer" if given == "operation" else given
        return level

    def _rise(self, rows: Step) -> list[str]:
        """Watch every operation of the next steps, until what is not explained comes back."""
        action = environment() or self.options.action
        goes_on = action not in ("raise", "off") and getattr(self._local, "softly", None) is None
        tracker = self._tracker()
        over = tracker is None or tracker.fn is None  # the model is gone
        done = self.level == "operation" or over or self._rises >= MAX_REPLAYS
        rise = self._adapter.rise() if goes_on and not done else None
        if rise is None:
            return []
        self._rises += 1
        self._rising, self._risen, self._rose = rise, rise.steps, rows.number
        return [messages.WATCHED_CLOSELY(what=rise.begins.format(steps=rise.steps))]

    def _fall(self, rows: Step) -> None:
        """Count a step that was watched operation by operation."""
        if not self._risen or rows.number <= self._rose:
            return
        self._risen -= 1
        if not self._risen:
            note = (
                f"what was not reproduced in step {self._rose} did not come back in "
                f"{self._rising.steps} steps: {self._rising.over}"
            )
            (self.say if self.options.action == "warn" else self.remark)(note)

    def wants_replay(self, reading: Reading, kind: Kind, *, now: bool = False) -> bool:
        """Tell whether a bad reading is worth a replay, or ``now`` that it has been counted."""
        seen = self._seen[(reading.layer, reading.phase, kind)]
        return self.options.replay and seen < MAX_REPLAYS + now

    def operations(self, rows: Step, seen: Replay) -> None:
        """Judge what an operation-level watcher saw of a whole step.

        Raises:
            AnomalyError: As the tracker's action says.
        """
        try:
            verdict = trace(seen.records, seen.sinks)
        except Exception as error:  # noqa: BLE001  the user's program is not to fail by ours
            why = f"the operations of step {rows.number} could not be judged: {reason(error)}"
            self.say(messages.STEPS_UNSEEN(why=why))
            return
        for record in () if self._risen else verdict.contained:
            if record.output is None or record.output.kind is None:
                continue
            self._counts["expected" if record.expected else "suspect"] += 1
            key = ("contained", record.layer, record.name, record.source)
            self._seen[key] += 1
            if self._seen[key] > 1:  # listed once, counted every time
                continue
            self._keep(self._signed(contained(record, rows, self._known(), CONTAINED())))
        if verdict.sink is not None and rows.failed is None and rows.held is None:
            self._surface(rows, verdict.sink, seen)

    def raised(
        self, rows: Step, error: BaseException, look: Callable[[], Replay | None],
        heard: tuple[OpRecord, str] | None = None,
    ) -> None:  # fmt: skip
        """Judge what the program raised an exception over, if that was bad.

        Args:
            rows: The open rows, read so far.
            error: The exception.
            look: Gives what a watcher saw up to it, in this run or in another; its last sink is
                what the program took last, if that was bad.
            heard: The one operation that the library itself noted, and what to say of it.
        """
        self.review(rows)
        if not takes_along(error):
            return
        self._seen["raised", type(error)] += 1
        many = self._seen["raised", type(error)] > MAX_REPLAYS
        if rows.failed is not None or rows.held is not None:
            return
        if self.options.replay and not many and self._shown(rows, error, look):
            return
        if not names_bad(error):
            return
        if rows.pending_inputs:
            doubt = rows.pending_inputs[0]
            self.fail(rows, doubt.reading, doubt.kind, doubt.value())
        elif heard is not None:
            event = contained(heard[0], rows, self._known(), heard[1])
            self.accept(rows, replace(event, severity="bad"))

    def _shown(self, rows: Step, error: BaseException, look: Callable[[], Replay | None]) -> bool:
        """Tell of what a watcher saw the program raise an exception over."""
        try:
            seen = look()
        except Exception:  # noqa: BLE001  the program's own exception is the news
            return False
        if seen is None or not seen.sinks or not same_end(error, seen.raised):
            return False
        last = rows.reading(len(rows.lo) - 1) if rows.lo else None
        ends = self.options.level == "step"
        if last is not None and divergence(rows, last, seen.passed, ends=ends) is not None:
            return False
        if may_mask(seen.sinks[-1].kind, seen.sinks[-1].phase) and names_bad(error):
            seen.sinks = [replace(seen.sinks[-1], phase="value")]  # no mask to the program
        verdict = trace(seen.records, seen.sinks[-1:])
        origin = verdict.origin
        if origin is None or verdict.sink is None:
            return False
        if origin.name in PLACING and verdict.sink.kind != "nan":
            return False  # a mask may be looked at by anybody
        label = f"the {type(error).__name__} that the program raised"
        self._surface(rows, replace(verdict.sink, label=label), seen)
        return rows.failed is not None

    def _surface(self, rows: Step, sink: Sink, seen: Replay) -> None:
        """Judge a place of harm that only a watcher of operations saw."""
        site = self.monitor.site(sink.layer, sink.phase, sink.label, "", None)
        value = _VALUES.get(sink.kind, math.nan)
        rows.sites.append(site)
        rows.calls.append(0)
        rows.lo.append(value)
        rows.hi.append(value)
        self.flag(rows, len(rows.lo) - 1, replayed=seen)

    def refuse(self, event: Event, rows: Step) -> None:
        """Act on an event that an adapter's own read made (a spike, a bad weight at attach)."""
        event = self._signed(event)
        if event.severity == "bad":
            if rows.holding:
                rows.held = rows.held or DeferredFailure(event=event)
            else:
                self.accept(rows, event)
        else:
            self._record(event)
            if event.expected is None:
                self._warn_of(event)

    @property
    def guards(self) -> bool:
        """Tell whether a policy asks for the gradients' norms to be judged."""
        return bool(self._guard.on)

    def guard(self, rows: Step, norm: float | None = None) -> None:
        """Judge the gradient norms read since the last time: a jump, or next to nothing.

        Args:
            rows: The open rows.
            norm: L2 norm over all weights, where the rows do not hold one for each; a norm
                that is not finite is judged elsewhere.

        Raises:
            AnomalyError: If the policy makes a spike or a vanishing gradient bad.
        """
        start, rows.guarded = rows.guarded, len(rows.lo)
        judged = rows.failed is not None or rows.held is not None
        if not self._guard.on or judged or self.adapter is None:
            return
        if norm is not None:
            norms, group, self._guarded = {"": norm}, "", True
        else:
            readings = [rows.reading(order) for order in range(start, rows.guarded)]
            norms = layer_norms(readings)
            group = next((r.site.parameter or "" for r in readings if r.norm is not None), "")
            self._say_unguarded(rows, seen=bool(norms))
        for finding in self._guard.judge(rows.number, norms, group):
            mine = self.options.policy.at(finding.layer)
            reason = self.options.policy.allowed(finding.kind, "backward", finding.layer)
            bad = finding.kind in mine.bad and reason is None
            if not bad and not finding.news:  # said when it began
                self._counts["expected" if reason else "suspect"] += 1
                continue
            event = norm_event(finding, rows, self._known(), expected=reason, bad=bad)
            if rows.failed is None:
                self.refuse(event, rows)

    def _say_unguarded(self, rows: Step, *, seen: bool) -> None:
        if seen or self._guarded:
            self._guarded = True
        elif any(site.phase == "backward" for site in rows.sites):
            self._unguarded += 1
            if self._unguarded == FEWEST:
                option, why = "Policy(spike=..., vanishing=...)", "no optimizer has updated weights"
                self.say(messages.NO_UPDATES(option=option, why=why))

    def updated(self, step: int) -> None:
        """Note an optimizer update; one from gradients that were reported as bad is no news."""
        rows: Step | None = getattr(self._local, "rows", None)
        if rows is not None and rows.failed is not None:
            self.went_through(rows)
            return
        self._trained = True
        self._updates.append(step)
        del self._updates[:-2]

    def went_through(self, rows: Step) -> None:
        """Note that a failed step's update was made all the same: what is bad later may be its."""
        if self._goes_on(rows):
            self._through, self._follows, self._cleared = rows, None, False

    def begin_again(self, rows: Step) -> None:
        """Let what failed as weights were looked at before a step not fail the step."""
        if self._through is rows:
            self._through = Step(rows.number)
            self._through.failed = rows.failed
        rows.failed = None

    def not_meant(self, bad: list[BadParameter]) -> list[BadParameter]:
        """Note what of the bad weights and buffers may be meant so, and give the rest.

        Args:
            bad: What tracking finds as it begins.
        """
        for item in bad:
            if item.buffer:
                local, dtype = item.name.rpartition(".")[2], item.summary.dtype
                site = self.monitor.site(
                    item.layer, "parameter", local, dtype, None, parameter=item.name, buffer=True
                )
                reading = Reading(self.step, 0, 0, site, math.nan, math.nan)
                self._note_state(reading, item.summary.kind or "nan", item.summary)
        return [item for item in bad if not item.buffer]

    def known_clean(self, step: int) -> None:
        """Note that every weight and buffer was finite at the start of this step."""
        self._clean = step
        self._spoiled = None
        self._updates.clear()

    def remark(self, note: str) -> None:
        """List what watching changes in the report; nothing goes unwatched, so no warning."""
        with self._lock:
            if not self._ignores(note):
                self._remarks[note] = None

    def say(self, note: str) -> None:
        """Warn once of something that is not watched, and list it in the report.

        A program that was only found is not warned: it did not ask.
        """
        with self._lock:
            if note in self._said or self._ignores(note):
                return
            self._said[note] = None
        if not self.found:
            warn(f"anynan: {prose(note)}")

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what could not be watched, each said once."""
        return tuple(self._said)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Return what watching changes, such as a fused path that it turns off."""
        return tuple(self._remarks)

    def clear(self) -> None:
        """Forget events, readings and gradient norms."""
        with self._lock:
            self._events.clear()
            self._turns.clear()
            self._counts.clear()
            self._seen.clear()
            self._carriers.clear()
            self._first.clear()
            self.monitor.history.clear()
            self._guard.clear()
            self.inputs.clear()

    # Inside.

    def _is_consequence(self, rows: Step, reading: Reading, kind: Kind, later: int) -> bool:
        """Tell whether a reading is bad because of an update that an action let through.

        It is no event of its own then: it counts as spread of the event that was let through.
        """
        if kind not in NON_FINITE or reading.phase == "input":
            return False
        if self._handed_back(rows, later):
            return True
        through = self._through
        if through is None or through is rows or reading.step < through.number:
            return False
        key = (reading.layer, reading.phase, kind)
        if self._follows is not None and (self._cleared or key not in self._follows):
            return False
        if self._repaired():
            return False
        self._add(rows, through, 1 + later, self._since_when(through))
        return True

    def _was_told(self, rows: Step, reading: Reading, kind: Kind) -> bool:
        """Tell whether a function was given what a reported step of another made bad."""
        maker, tracker = rows.makers.get(ANYTHING), self._tracker()
        if maker is None:
            return False
        comes = "comes from" if maker.certain else "is bad, and came after"
        self._note_once(reading, kind, None)
        if not self._comes:
            self._comes = True
            name = "it" if tracker is None else tracker.name
            self.say(
                messages.GIVEN_BY_ANOTHER(
                    name=name, comes=comes, maker=f"step {maker.step} of {maker.name}"
                )
            )
        return True

    def _handed_back(self, rows: Step, later: int) -> bool:
        """Tell whether a model was given what it gave itself in a step that was reported."""
        for doubt in rows.pending_inputs:
            maker = rows.makers.get(doubt.reading.site.tensor)
            if maker is not None and maker.itself and maker.step == self._bad[0]:
                first = self._bad[1]
                assert first is not None
                said = f"what {maker.name} is given comes from its own step {first.failed.step}"
                self._add(rows, first, 1 + later, f"{said}, which was reported")
                return True
        return False

    def _is_buffer(self, event: Event) -> bool:
        name = event.parameter
        return any(item.buffer for item in self._adapter.bad_parameters() if item.name == name)

    def _repaired(self) -> bool:
        """Look at one weight that was bad, at all only where it is good; forget it if they are."""
        if self._witness is None or not self._adapter.is_bad(self._witness):
            bad = [item for item in self._adapter.bad_weights() if item.name not in self._meant]
            self._witness = min(bad, key=lambda item: item.summary.size, default=None)
        if self._witness is None:
            self._through = None
        return self._witness is None

    def is_spoilt(self, rows: Step) -> bool:
        """Tell whether weights are bad since a step before, which was reported."""
        through = self._through
        return through not in (None, rows) and rows.number >= through.number and self._is_spoilt()

    def _is_spoilt(self) -> bool:
        if self._through is None or (self._follows is not None and self._cleared):
            return False
        return not self._repaired()

    def _look_for_repair(self, rows: Step) -> None:
        """Look at the weights once, when the first clean step comes after they were bad."""
        if self._through is None or rows.failed is not None:
            self._cleared = False
        elif not self._cleared and self.adapter is not None:
            self._cleared = not self._repaired()

    def _since_when(self, through: Step) -> str:
        step = through.failed.step
        if self._follows is not None:
            return f"the weights are bad since step {step}, which went on although it was reported"
        return (
            f"the weights are bad since the update of step {step}, which was made although that "
            "step was reported"
        )

    def _came_of(self, rows: Step, event: Event, key: tuple[Any, ...]) -> bool:
        """Tell whether an event is about what a failed step before spoilt: a weight, a buffer."""
        through, earlier, name = self._through, self._went_on, event.parameter
        if through not in (None, rows) and event.phase in ("parameter", "optimizer"):
            same = not self._cleared or name == through.failed.parameter
            if same and not self._is_buffer(event):
                if self._follows is not None:
                    self._follows.add(key)
                self._add(rows, through, 1 + event.spread.count, self._since_when(through))
                return True
        if earlier is None or event.phase != "parameter" or earlier.number >= rows.number:
            return False
        clean = self._clean is not None and self._clean > earlier.number
        buffers = {item.name for item in self._adapter.bad_parameters() if item.buffer}
        if clean or name not in buffers or name in self._meant:
            return False
        step = earlier.failed.step
        said = f"{name} is bad since step {step}, which went on although it was reported"
        self._add(rows, earlier, 1 + event.spread.count, said)
        return True

    def _add(self, rows: Step, first: Step, count: int, said: str) -> None:
        """Count what is bad in a step as spread of the event of an earlier one."""
        event: Event = first.failed
        count += event.spread.count
        rows.follows, self._bad = True, (rows.number, first)
        rows.failed = first.failed = replace(event, spread=replace(event.spread, count=count))
        rows.skip = rows.skip or (environment() or self.options.action) == "skip"
        self._exchange(event, first.failed)
        note = messages.WEIGHTS_BAD_SINCE(since=said, action=self._action_name())
        (self.say if self.options.action == "warn" else self.remark)(note)

    def _exchange(self, event: Event, new: Event) -> None:
        """Put a recorded event's successor in its place, for later steps too."""
        for rows in (self._went_on, self._through, self._bad[1], *self.inputs.values()):
            if rows is not None and rows.failed is event:
                rows.failed = new
        super()._exchange(event, new)

    def _goes_on(self, rows: Step) -> bool:
        """Tell whether the program goes on with what a failed step of its own left behind."""
        return not (rows.follows or self._stops(rows))

    def _stops(self, rows: Step) -> bool:
        action = environment() or self.options.action
        return action in ("raise", "skip") or rows.skip

    def _action_name(self) -> str:
        action = self.options.action
        return repr(action) if isinstance(action, str) else "a function"

    def _unread(self) -> str:
        """Say why an update may have used a bad gradient, empty if none can have."""
        if not self.options.backward:
            return "backward=False reads no gradient"
        if self._spoiled is not None:
            return (
                f"the gradients of step {self._spoiled} were bad, which read={self.options.read} "
                "saw only after the update"
            )
        return ""

    def _excuse(self, rows: Step, order: int, kind: Kind, reading: Reading) -> str | None:
        expected = rows.expected.get(order)
        if expected is not None and kind in expected:
            return expected[kind]
        return self.options.policy.allowed(kind, reading.phase, reading.layer)

    def _is_bad(self, rows: Step, order: int) -> bool:
        """Tell whether a row is bad by itself: no suspect, and not excused."""
        reading = rows.reading(order)
        site = reading.site
        judged = self.options.policy.judge(
            site.phase, rows.lo[order], rows.hi[order], layer=site.layer, dtype_max=site.dtype_max
        )
        meant = order in rows.suspect or (site.buffer and site.phase == "parameter")
        if judged is None or judged[1] != "bad" or meant:
            return False
        key = (site.layer, site.phase, judged[0])
        if site.parameter is None and key in self.monitor.downgraded:
            return False
        return self._excuse(rows, order, judged[0], reading) is None

    def _spread(self, rows: Step) -> None:
        """Write into a failed step's event what turned bad after it was recorded."""
        event: Event = rows.failed
        if rows.spread <= event.spread.count or event.step != rows.number:
            return
        rows.failed = replace(event, spread=replace(event.spread, count=rows.spread))
        self._exchange(event, rows.failed)

    def _note_once(
        self, reading: Reading, kind: Kind, value: Any, *, expected: str | None = None
    ) -> None:
        """Record a suspect or an expected reading the first time, count it every time."""
        self._counts["expected" if expected else "suspect"] += 1
        key = _noted(reading, kind)
        self._seen[key] += 1
        if self._seen[key] > 1:
            return
        summary, cause = self._measured(value), None
        if reading.site.tensor == STATE and summary is not None:
            parts = (reading.site.parameter or "").split(".")
            state = dict.fromkeys(parts, summary)
            cause = explain(Situation("optimizer", kind, tensor=STATE, state=state))
        event = self._suspect(reading, kind, summary=summary, expected=expected, cause=cause)
        self._keep(event)
        if kind not in NON_FINITE and expected is None:
            self._warn_of(event)

    def _note_state(self, reading: Reading, kind: Kind, value: Any) -> None:
        """Note a buffer that is bad as it is found: it may be meant so."""
        name = reading.site.parameter or ""
        if self._went_on is None or name in self._meant:  # else that step may have spoilt it
            self._meant.setdefault(name, reading.step)
            if kind != "neginf":  # a mask
                self._note_once(reading, kind, value)

    def _suspect(self, reading: Reading, kind: Kind, **said: Any) -> Event:
        """Make the event of a reading that does not act."""
        if kind == "large":
            said["notes"] = (self._beyond(reading), *said.get("notes", ()))
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
            rank=self._adapter.rank(),
            **said,
        )
        return self._signed(event)

    def _settle_carried(self, rows: Step) -> None:
        """Look at layers that were bad beside bad data, where nothing that left the model was."""
        new = [reading for reading in rows.carrying if _carrier(reading) not in self._carriers]
        if new and rows.failed is None and rows.held is None and self.adapter is not None:
            rows.spread -= 1  # it is what is told
            self.fail(rows, new[-1], new[-1].kind or "nan")

    def _beyond(self, reading: Reading) -> str:
        """Say how large a reading is, and beyond which limit."""
        site, policy = reading.site, self.options.policy.at(reading.layer)
        limit = policy.limit(site.layer, site.dtype_max)
        text = f"{magnitude(reading.absmax or 0.0)} is beyond {magnitude(limit)}"
        return (
            f"{text}, large=" if limit == policy.large else f"{text}, headroom={policy.headroom:g}"
        )

    def _settle_inputs(self, rows: Step) -> None:
        """Note what came in bad and did no harm."""
        if self.adapter is None:  # removed by the user's own callback, mid-step
            return
        if rows.failed is None or rows.failed.phase != "input":
            for doubt in rows.pending_inputs:
                if doubt.reading.site.tensor in rows.makers:  # noted where it was made
                    continue
                self._note_once(doubt.reading, doubt.kind, doubt.value())

    def _measured(self, value: Any) -> Summary | None:
        try:
            known = value is None or isinstance(value, Summary)
            return value if known else self._adapter.measure(value)
        except Exception:  # noqa: BLE001  an array that cannot be summarised was still seen
            return None

    def _settle_scale(self, rows: Step) -> None:
        """Judge a step whose scaled gradients overflowed, once its end is known."""
        reading, rows.pending = rows.pending, None
        if reading is None or rows.failed is not None or self.adapter is None:
            if reading is None:
                self._scaled_streak = 0
            return
        kind = reading.kind or "nan"
        self._scaled_streak += 1
        now = self._adapter.loss_scale()
        scale = now if rows.scale is None else float(rows.scale)
        policy = self.options.policy
        floor = scale is not None and scale <= policy.scale_floor
        # What came in bad and reached the gradients is no matter of the scale.
        if self._scaled_streak >= policy.scale_streak or floor or rows.carried:
            self.fail(rows, reading, kind)
            return
        self._counts["expected"] += 1
        expected = (_STOPPED if rows.applied else _SKIPPED) + _scales(scale, now)
        self._keep(self._suspect(reading, kind, expected=expected))


def _noted(reading: Reading, kind: Kind) -> tuple[Any, ...]:
    """Give what a suspect is counted by."""
    return "noted", reading.layer, reading.phase, kind, reading.site.tensor


def _carrier(reading: Reading) -> tuple[Any, ...]:
    """Give what a layer that hands on bad data is known by."""
    return reading.layer, reading.phase, reading.kind


def _live(rows: Step, order: int) -> Any:
    """Give what was read, where it is at hand still."""
    return rows.live[order]() if order in rows.live else None


def _lookup(rows: Step, order: int, value: Any, *, weak: bool) -> Callable[[], Any]:
    """Give access to an array, for as long as the program or a step that may tell of it lasts."""
    found = rows.live[order]() if order in rows.live else value
    if not weak:
        return lambda: found
    try:
        return weakref.ref(found)
    except TypeError:
        return lambda: found


def _scales(scale: float | None, now: float | None) -> str:
    if now is None or scale is None:
        return ""
    texts = [f"{x:.0f}" if x.is_integer() and x < 1e15 else f"{x:g}" for x in (scale, now)]
    return f" (scale {texts[0]}, now {texts[1]})" if scale != now else f" (scale now {texts[1]})"
