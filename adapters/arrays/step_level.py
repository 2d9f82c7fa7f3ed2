"""``level="step"``: a call runs on its own arrays, and what goes in and comes out is read.

Only a call that went bad is run again under the recorder, on copies of what it was given.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from types import MethodType
from typing import Any

import array_api_compat
import numpy as np

from anynan._arrays.access import dtype_max, dtype_name, namespace, on_host
from anynan._arrays.arguments import bound, positional
from anynan._arrays.containers import leaves
from anynan._arrays.probe import probe
from anynan._base.context import running as watching
from anynan._diagnosis.agreement import CheckedPoint, divergence
from anynan._diagnosis.evidence import ReplayError
from anynan._diagnosis.lineage import OpRecord, Replay, Sink, trace
from anynan._diagnosis.rules.repair import Repair
from anynan._diagnosis.trials import Attempt
from anynan._readings.policy import reading_kind
from anynan._readings.readings import Reading, Site
from anynan._readings.step import Step
from anynan._steps.failures import names_bad
from anynan.arrays.again import Call, attempt
from anynan.arrays.calls import Calls
from anynan.arrays.errorlog import STATE, ErrorLog
from anynan.arrays.fast import NUMBERS, FastPath, named
from anynan.arrays.live import LiveTape
from anynan.arrays.messages import NUMPY_LOG, NUMPY_LOG_FIRST, NUMPY_LOG_UNREAD, UNSEEN_AGAIN
from anynan.arrays.modules import taking_stand_ins
from anynan.arrays.reachable import SMALL, mark
from anynan.arrays.records import span
from anynan.arrays.state import State
from anynan.arrays.tape import now
from anynan.arrays.trackable import change, is_array, silent
from anynan.arrays.tracked import TrackedArray
from anynan.events import Event, Phase

_SHAPES = 1000  # kinds of arguments and results whose names are kept


class StepTape(LiveTape):
    """Read what goes in and what comes out; operations are not seen."""

    def __init__(self, ends: "StepLevel", session: Calls, rows: Step) -> None:
        super().__init__(session, rows)
        self._ends = ends
        self.closed = True  # to the namespaces: what they make is the library's own

    def read(self, layer: str | None, phase: Phase, tensor: str, x: TrackedArray) -> None:
        """Write a row, and have it judged at once if it is out of its limits."""
        span = probe(x._raw)
        if span is None:
            return
        if phase == "input" and reading_kind(*span) is not None:
            self.bad_inputs.add(id(x._raw))
        assert self.rows is not None
        site = self.site(layer, phase, tensor, x._raw)
        order = self.add_row(site)
        self.rows.fill(span[:1], span[1:])
        if not (-site.limit <= span[0] and span[1] <= site.limit):
            self.session.tracker.judge.flag(self.rows, order, x._raw)

    def take(self, event: Event, array: Any, later: int) -> bool:
        """Report what a direct check found, with the operation where a second run shows it."""
        rows, tracker = self.rows, self.session.tracker
        if rows is None:
            return False
        seen = None
        if event.phase == "input":  # what a loader gives inside may be the function's own
            seen = self._ends.seen_again(event.tensor)
            if seen is None:
                return False
        if rows.failed is not None:
            rows.spread_by(1 + later)
            return True
        site = self.site(event.layer, "value", event.tensor, array)
        span = probe(array) or (0.0, 0.0)
        reading = Reading(rows.number, len(rows.sites), 0, site, *span)
        tracker.judge.fail(rows, reading, event.kind, array, later=later, replayed=seen)
        return True


class CallSnapshot(Call):
    """Hold a call and copies of what it was given, so that it can be run again with it.

    Args:
        fn: The function.
        args: Its arguments.
        kwargs: Those by name.
        draws: Whether NumPy's global random numbers are kept, too.
        light: What a look at the sums alone has kept of the arguments already.
    """

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        *, draws: bool, light: FastPath | None = None,
    ) -> None:  # fmt: skip
        super().__init__(fn, args, kwargs, copy_context() if light is None else light.context)
        self.given = bound(positional(fn), args, kwargs)
        self._copies: dict[int, Any] = {}
        self._marks: dict[int, bytes] = {}
        self.random = np.random.get_state() if draws else None  # noqa: NPY002
        if light is not None:
            self.containers, self.log = light.containers, light.log
            self.arrays = list(light.arrays())
            for x, _, kept in light.held:
                (self._marks if type(kept) is bytes else self._copies)[id(x)] = kept
            return
        self.arrays = [
            (label, x)
            for name, value in self.given
            for label, x in leaves(value, name)
            if is_array(x) and _host(x) is not None
        ]
        for _, x in self.arrays:
            view = _host(x)
            if view.nbytes <= SMALL:
                self._copies[id(x)] = view.copy()
            else:
                self._marks[id(x)] = mark(view)
        self.log = ErrorLog(self.context)

    @property
    def draws(self) -> bool:
        """Tell whether the global random numbers were drawn from, or were not kept."""
        return not _same(self.random, np.random.get_state())  # noqa: NPY002

    def first(self, x: Any) -> Any:
        """Give an array as it came in, or itself where it was not kept."""
        return self._copies.get(id(x), x)

    def written(self) -> Iterator[tuple[str, Any]]:
        """Yield what the call wrote into its arguments, or put into them, as far as it shows."""
        known = {id(x) for _, x in self.arrays}
        yield from ((label, x) for label, x in self.arrays if self._is_written(x))
        for name, value in self.given:
            if not is_array(value):
                for label, x in leaves(value, name, silent):
                    if is_array(x) and id(x) not in known:
                        yield label, x

    def _is_written(self, x: Any) -> bool:
        copy, view = self._copies.get(id(x)), _host(x)
        if copy is None:
            return mark(view) != self._marks[id(x)]
        return bool(view.tobytes() != copy.tobytes())

    def fresh(self, raw: Any) -> Any:
        """Give a copy of an array as it was.

        Raises:
            ReplayError: If the call wrote into it, and it was too large to be kept.
        """
        copy = self._copies.get(id(raw))
        plain = isinstance(raw, np.ndarray)
        if copy is not None and plain:
            return copy.copy()
        if copy is not None or id(raw) in self._marks:
            if not self._is_written(raw):
                return raw.copy() if plain else raw
            if copy is not None:
                xp = namespace(raw)
                return xp.asarray(copy.copy(), dtype=raw.dtype, device=array_api_compat.device(raw))
            msg = (
                "the call wrote into an array that is too large to be kept, so it cannot be "
                "run again from where it began"
            )
            raise ReplayError(msg)
        return raw.copy() if plain else raw

    @contextmanager
    def lent(self, *, making: bool = False) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Give the arguments as they were, and afterwards leave the program's as they are."""
        originals: dict[int, Any] = {}

        def fresh(raw: Any, _: str) -> Any:
            copy = self.fresh(raw)
            originals[id(copy)] = raw
            return copy

        values: list[Any] = []
        try:
            values += [change(value, name, is_array, fresh) for name, value in self.given]
            args = tuple(values[: len(self.args)])
            with taking_stand_ins([x for _, x in self.arrays], making=making):
                yield args, dict(zip(self.kwargs, values[len(self.args) :], strict=True))
        finally:
            for value in values:
                change(value, "", lambda x: id(x) in originals, lambda x, _: originals[id(x)])


class StepLevel:
    """Run calls on their own arrays, and read their ends.

    Args:
        session: Whose calls they are.
        in_full: Runs a call with all that may be wanted of it kept.

    Attributes:
        refused: Whether a call went wrong as its operations were watched.
    """

    def __init__(self, session: Calls, in_full: Callable[..., Any]) -> None:
        self.refused = False
        self._session, self._in_full, self._local = session, in_full, threading.local()
        self._draws = True  # until a call is seen to leave the global random numbers alone
        self._sizes = session.options.sizes
        self._sites: dict[tuple[Any, ...], list[Site]] = {}
        self._logs: list[ErrorLog] = []  # at rest

    @property
    def is_running(self) -> bool:
        """Tell whether a call of this thread is under way here."""
        return getattr(self._local, "began", None) is not None

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call, and judge what came out of it.

        One of plain arrays and numbers is cleared by a sum of each.
        """
        session, judge = self._session, self._session.tracker.judge
        if self._draws or self._sizes or STATE is None:
            return self._in_full(fn, args, kwargs)
        logs = self._logs
        log = logs.pop() if logs else None
        if log is None or log.below is not STATE.get():
            log = ErrorLog.prepared(STATE)
        context, failed = copy_context(), None
        begun = clean = False
        state: State | None = None
        try:
            STATE.set(log.state)
            log.deaf = True
            light = FastPath(self.deepened, log, context, fn, args, kwargs)
            known = judge.bad_inputs.get(light.bad) if light.bad else None
            self._local.bad = light.bad
            if light.begins_clean or known is not None:
                if type(fn) is MethodType:
                    state = State(fn, [], session.is_near)
                begun = True
                watching.set(light)  # it makes a tape where one is wanted
                log.deaf = False
                try:
                    result = fn(*args, **kwargs)
                except Exception as error:  # noqa: BLE001  raised again below
                    failed = error
                log.deaf = True
                if known is None:
                    clean = failed is None and light.ends_clean(result)
                if clean and state is not None:
                    clean = next(state.corrupted(result), None) is None
                if clean and log.lines:
                    read = light.gave or (state is not None and state.looked)
                    clean = read and session.is_reached_clean()
        except BaseException:
            deep: StepTape | None = getattr(self._local, "deep", None)
            if deep is not None and deep.rows is not None:
                with judge.softly():
                    self._end(deep.rows)
            raise
        finally:
            log.deaf = False
            left = STATE.get()
            changes = None if left is log.state or left is log.below else log.changes()
            STATE.set(log.below)
            watching.set(None)  # no call is watched inside of another
            if changes is not None:
                changes()
        if not begun:
            logs.append(log)
            return self._in_full(fn, args, kwargs)
        if known is not None:
            logs.append(log)
            log.lines = {}
            if failed is not None:
                raise failed
            judge.came_again(known)
            return result
        if clean and not light.deepened:
            key = (*light.kinds, *kwargs)
            sites = self._sites.get(key)
            if sites is None:
                if len(self._sites) > _SHAPES:  # as of a list that grows
                    self._sites.clear()
                sites = self._sites[key] = self._named(light, result)
            if judge.passed(sites, light.squares):
                if log.lines:
                    log.lines = {}
                logs.append(log)
                return result

        def ran() -> Any:
            if failed is not None:
                raise failed
            return result

        try:
            tape = self.deepened(light)
            return self._judged(tape, self._local.began, state, ran)
        finally:
            failed = None  # it holds this frame, which holds it

    def _named(self, light: FastPath, result: Any) -> list[Site]:
        """Name what is known of a clean call: of each array a number that none of it exceeds."""
        given = named(bound(positional(light.fn), light.args, light.kwargs))
        read: list[tuple[str | None, Phase, str, Any]] = [
            (None, "input", name, x) for name, x in given if _holds_floats(x)
        ]
        read += [
            ("", "forward", name, x)
            for name, x in named([("result", result)])
            if type(x) in NUMBERS or _holds_floats(x)
        ]
        site = self._session.tracker.judge.monitor.site
        return [
            site(layer, phase, name, dtype_name(x), dtype_max(x), bound=True)
            for layer, phase, name, x in read
        ]

    def deepened(self, light: FastPath) -> StepTape:
        """Make of a light call one that is looked at in full; its arguments came in clean."""
        known: StepTape | None = getattr(self._local, "deep", None)
        if known is not None:
            return known
        session = self._session
        began = CallSnapshot(light.fn, light.args, light.kwargs, draws=False, light=light)
        rows = session.tracker.judge.rows()
        tape = StepTape(self, session, rows)
        self._local.began, self._local.rows, self._local.deep = began, rows, tape
        light.deepened = True
        for label, x in began.arrays:
            session.came_in(tape, label, x, began.first(x))
        return tape

    def read(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call, and look at its ends in full."""
        session = self._session
        rows = session.tracker.judge.rows()
        tape = StepTape(self, session, rows)
        began = self._local.began = CallSnapshot(fn, args, kwargs, draws=self._draws)
        self._local.rows = rows
        state = State(fn, began.given, session.is_near)

        def run() -> Any:
            with began.log:
                return fn(*args, **kwargs)

        return self._judged(tape, began, state, run, fresh=True)

    def _judged(
        self, tape: StepTape, began: CallSnapshot, state: State | None, run: Callable[[], Any],
        *, fresh: bool = False,
    ) -> Any:  # fmt: skip
        session, rows = self._session, tape.rows
        judge = session.tracker.judge
        assert rows is not None
        before = now.get()
        try:
            now.set(tape)
            if fresh:
                session.read_given(tape, began.given)
            try:
                result = run()
            except Exception as error:
                with judge.carried_by(error, rows):
                    self._written(tape, began, ())
                    heard = self._heard(began) if names_bad(error) else None
                    judge.raised(rows, error, partial(self._up_to, began), heard)
                raise
            if self._draws:
                self._draws = began.draws
            session.read_result(tape, result)
            self._written(tape, began, [x for _, x in leaves(result, "result")])
            state = state or State(began.fn, began.given, session.is_near)
            made = bool(began.log.lines or rows.pending_inputs)
            session.read_state(tape, state, result, heard=made)
            self._tell_unread(began, state, rows)
        except BaseException:
            with judge.softly():
                self._end(rows)
            raise
        finally:
            now.set(before)
            tape.close()
        self._end(rows)
        return result

    def _heard(self, began: CallSnapshot) -> tuple[OpRecord, str] | None:
        """Give the one error that NumPy noted in a call that was ended by NaN or Inf."""
        if len(began.log.lines) != 1:
            return None
        (error,) = began.log.lines
        return error.record(0), NUMPY_LOG(log=began.log)

    def _tell_unread(self, began: CallSnapshot, state: State, rows: Step) -> None:
        """Warn of NaN that NumPy noted in a call of which nothing that came out could be read."""
        if state.looked or any(site.phase != "input" for site in rows.sites):
            return
        record = began.log.first_nan()
        if record is not None:
            note = NUMPY_LOG_UNREAD(log=began.log)
            self._session.tracker.judge.note_operation(rows, record, note)

    def _written(self, tape: StepTape, began: CallSnapshot, done: Any) -> None:
        """Read what the call wrote into its arguments."""
        known = {id(x) for x in done}
        for label, x in began.written():
            if id(x) not in known:
                self._session.arrive(tape, label, x)

    def _end(self, rows: Step) -> None:
        judge = self._session.tracker.judge
        judge.close_step()
        try:
            judge.settle(rows)
        finally:
            bad = getattr(self._local, "bad", ())
            if bad:
                judge.remember_input(bad, rows)
            rows.forget_arrays()
            self._local.bad = ()
            self._local.began = self._local.tape = self._local.deep = None

    # The second run.

    def replay(self, reading: Reading) -> Replay:
        """Run the call again under the recorder; where that does not show it, ask the error log.

        Raises:
            ReplayError: If the call cannot be run again, and the log names no single line.
        """
        began: CallSnapshot | None = getattr(self._local, "began", None)
        if began is None:
            msg = "the call is over and its arguments are gone"
            raise ReplayError(msg)
        try:
            seen = self._again(began)
        except ReplayError as error:
            return self._logged(began, reading, str(error))
        except Exception as error:  # noqa: BLE001  the log is left
            self.refused = True
            why = f"the second run failed: {type(error).__name__} {error}".rstrip()
            return self._logged(began, reading, why)
        parted = divergence(self._local.rows, reading, seen.passed, ends=True)
        if parted is not None or not seen.sinks:
            why = parted or "the second run was clean"
            return self._logged(began, reading, f"a second run showed something else ({why})")
        if began.log.lines and not _explained(seen):
            seen = self._made_inside(began, reading) or seen
        if began.log.lines and not any(sink.parents for sink in seen.sinks):
            return self._unseen(began, reading, seen)
        return seen

    def _made_inside(self, began: CallSnapshot, reading: Reading) -> Replay | None:
        """Run the call again with the arrays that its own code makes under watch."""
        tape, seen = self._local.tape, None
        with suppress(Exception):
            made = self._again(began, making=True)
            same = divergence(self._local.rows, reading, made.passed, ends=True) is None
            seen = made if same and _explained(made) else None
        if seen is None:
            self._local.tape = tape
        return seen

    def attempt(self, repairs: Sequence[Repair]) -> Attempt | None:
        """Run the call once more, with operations repaired that its second run saw."""
        began: CallSnapshot | None = getattr(self._local, "began", None)
        tape: LiveTape | None = getattr(self._local, "tape", None)
        if began is None or tape is None:
            return None
        return attempt(self._session, began, tape, repairs)

    def _up_to(self, began: CallSnapshot) -> Replay | None:
        """Run a call that an exception has ended again, up to there."""
        self._local.tape = None
        try:
            self._again(began)
        except Exception as error:  # noqa: BLE001  the program's own
            tape: LiveTape | None = self._local.tape
            return None if tape is None else tape.ended(error)
        return None

    def _again(self, began: CallSnapshot, *, making: bool = False) -> Replay:
        """Run the call again under the recorder."""
        tape = self._local.tape = began.new_tape(self._session)
        result, _ = began.again(self._session, tape, making=making)
        seen = tape.replay()
        seen.passed = [place for place in tape.passed if place.layer] + [
            CheckedPoint("", "forward", label, 0, *ends)
            for label, x in leaves(result, "result")
            if (ends := span(x)) is not None
        ]
        return seen

    def seen_again(self, label: str) -> Replay | None:
        """Run the call again; give what was seen if it made what a check of this name found."""
        began: CallSnapshot | None = getattr(self._local, "began", None)
        if began is None or not self._session.options.replay:
            return None
        try:
            seen = self._again(began)
        except Exception:  # noqa: BLE001  it is told by the check then
            return None
        made = any(sink.label == label and sink.parents for sink in seen.sinks)
        return seen if made else None

    def _unseen(self, began: CallSnapshot, reading: Reading, seen: Replay) -> Replay:
        """Ask the error log where a second run came to the same without seeing what made it."""
        why = UNSEEN_AGAIN()
        tape: LiveTape = self._local.tape
        if tape.others:  # it hears nothing of what a table does
            seen.notes.append(why)
            return seen
        try:
            told = self._logged(began, reading, why)
        except ReplayError as error:
            seen.notes.append(error.note)
            return seen
        told.notes += seen.notes
        return told

    def _logged(self, began: CallSnapshot, reading: Reading, why: str) -> Replay:
        """Tell what NumPy's own error log says of the first run."""
        kind = reading.kind or "nan"
        if not any(error.makes(kind) for error in began.log.lines):
            raise ReplayError(why)
        note = NUMPY_LOG_FIRST(why=why, log=began.log)
        record = began.log.told(0, kind)
        if record is None:
            raise ReplayError(note)
        sink = Sink(reading.phase, reading.layer, reading.site.tensor, (0,), kind)
        return Replay([record], [sink], [note])


def _explained(seen: Replay) -> bool:
    """Tell whether an operation that was seen is known to have made what arrived."""
    verdict = trace(seen.records, seen.sinks, neginf=True)
    outside = verdict.outside
    return verdict.sink is not None and (outside is None or outside.source != "unknown")


def _holds_floats(x: Any) -> bool:
    return type(x) is np.ndarray and x.dtype.kind == "f"


def _host(x: Any) -> Any:
    """View an array in host memory; None where that cannot be."""
    if isinstance(x, np.ndarray):
        return x
    try:
        return on_host(x)
    except Exception:  # noqa: BLE001  it is read where it is used
        return None


def _same(one: Any, other: Any) -> bool:
    if one is None:
        return True
    return bool(one[2] == other[2] and one[3:] == other[3:] and (one[1] == other[1]).all())
