"""``level="step"``: a call runs on its own arrays, and what goes in and comes out is read.

Only a call that went bad is run again under the recorder, on copies of what it was given.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from anynan._arrays.arguments import bound, positional
from anynan._arrays.containers import leaves
from anynan._arrays.probe import Span, probe
from anynan._diagnosis.agreement import Passed, parting
from anynan._diagnosis.evidence import ReplayError
from anynan._diagnosis.lineage import OpRecord, Replay, Sink
from anynan._diagnosis.rules.repair import Repair
from anynan._diagnosis.trials import Attempt
from anynan._readings.policy import reading_kind
from anynan._readings.readings import Reading, Rows
from anynan._recorder.errorlog import ErrorLog
from anynan._recorder.live import LiveTape
from anynan._recorder.names import canonical
from anynan._recorder.reached import mark
from anynan._recorder.state import State
from anynan._recorder.tape import given, now
from anynan._recorder.trackable import change, is_array
from anynan._recorder.tracked import TrackedArray
from anynan._recorder.trials import Call, attempt
from anynan.events import Event, Phase

if TYPE_CHECKING:
    from anynan._recorder.session import ArraySession

# An argument up to this size is copied before the call, for the call may write into it.
SMALL = 2**16  # bytes


class EndsTape(LiveTape):
    """Read what goes in and what comes out; operations are not seen."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
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
        self.rows.lo.append(span[0])
        self.rows.hi.append(span[1])
        if not (-site.limit <= span[0] and span[1] <= site.limit):
            self.session.tracker.judge.flag(self.rows, order, x._raw)

    def take(self, event: Event, array: Any, later: int) -> bool:
        """Report what a direct check found, with the operation where a second run shows it."""
        rows, tracker = self.rows, self.session.tracker
        if event.phase == "input" or rows is None:
            return False
        if rows.failed is not None:
            rows.spread += 1 + later
            return True
        site = self.site(event.layer, "value", event.tensor, array)
        span = probe(array) or (0.0, 0.0)
        reading = Reading(rows.step, len(rows.sites), 0, site, *span)
        tracker.judge.fail(rows, reading, event.kind, array, later=later)
        return True


class Began:
    """Hold what a call began with, so that it can be run again as it was."""

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, draws: bool
    ) -> None:
        self.fn, self.args, self.kwargs = fn, args, kwargs
        self.given = bound(positional(fn), args, kwargs)
        self.arrays = [
            (label, x)
            for name, value in self.given
            for label, x in leaves(value, name)
            if isinstance(x, np.ndarray) and is_array(x)
        ]
        self._copies = {id(x): x.copy() for _, x in self.arrays if x.nbytes <= SMALL}
        self._marks = {id(x): mark(x) for _, x in self.arrays if x.nbytes > SMALL}
        self._random = np.random.get_state() if draws else None  # noqa: NPY002
        self.context = copy_context()
        self.log = ErrorLog()

    def written(self) -> list[tuple[str, Any]]:
        """List the arguments that the call wrote into, as far as it shows."""
        return [(label, x) for label, x in self.arrays if self._is_written(x)]

    def _is_written(self, x: Any) -> bool:
        copy = self._copies.get(id(x))
        return bool(mark(x) != self._marks[id(x)] if copy is None else _bytes(x) != _bytes(copy))

    def fresh(self, raw: Any) -> Any:
        """Give a copy of an argument as it was.

        Raises:
            ReplayError: If the call wrote into it, and it was too large to be kept.
        """
        copy = self._copies.get(id(raw))
        if copy is not None:
            return copy.copy()
        if id(raw) in self._marks and self._is_written(raw):
            msg = (
                "the call wrote into an argument that is too large to be kept, so it cannot be "
                "run again from where it began"
            )
            raise ReplayError(msg)
        return raw.copy() if isinstance(raw, np.ndarray) else raw

    @contextmanager
    def lent(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Give the arguments as they were, in containers that are the user's own afterwards."""
        originals: dict[int, Any] = {}

        def fresh(raw: Any, _: str) -> Any:
            copy = self.fresh(raw)
            originals[id(copy)] = raw
            return copy

        values = [change(value, name, is_array, fresh) for name, value in self.given]
        try:
            args = tuple(values[: len(self.args)])
            yield args, dict(zip(self.kwargs, values[len(self.args) :], strict=True))
        finally:
            for value in values:
                change(value, "", lambda x: id(x) in originals, lambda x, _: originals[id(x)])

    def roll(self) -> None:
        """Put NumPy's global random numbers to where they were."""
        if self._random is not None:
            np.random.set_state(self._random)  # noqa: NPY002


class Ends:
    """Run calls on their own arrays, and read their ends.

    Args:
        session: Whose calls they are.
    """

    def __init__(self, session: "ArraySession") -> None:
        self._session, self._local = session, threading.local()
        self._draws = True  # until a call is seen to leave the global random numbers alone

    @property
    def is_running(self) -> bool:
        """Tell whether a call of this thread is under way here."""
        return getattr(self._local, "began", None) is not None

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call, and judge what came out of it."""
        session = self._session
        judge = session.tracker.judge
        rows = judge.rows()
        tape = EndsTape(session, rows)
        began = self._local.began = Began(fn, args, kwargs, draws=self._draws)
        self._local.rows = rows
        state = State(fn, began.given, session.is_near)
        token = now.set(tape)
        try:
            session.read_given(tape, began.given)
            try:
                with began.log:
                    result = fn(*args, **kwargs)
            except Exception as error:
                with judge.carried_by(error, rows):
                    self._written(tape, began, ())
                    judge.raised(rows, error, partial(self._up_to, began))
                raise
            if self._draws:
                self._draws = not _same(began._random, np.random.get_state())  # noqa: NPY002
            session.read_result(tape, result)
            self._written(tape, began, [x for _, x in leaves(result, "result")])
            for path, x in state.spoilt(result):
                session.arrive(tape, path, x)
        except BaseException:
            with judge.softly():
                self._end(rows)
            raise
        finally:
            now.reset(token)
            tape.close()
        self._end(rows)
        return result

    def _written(self, tape: EndsTape, began: Began, done: Any) -> None:
        """Read what the call wrote into its arguments."""
        known = {id(x) for x in done}
        for label, x in began.written():
            if id(x) not in known:
                self._session.arrive(tape, label, x)

    def _end(self, rows: Rows) -> None:
        judge = self._session.tracker.judge
        judge.close_step()
        try:
            judge.settle(rows)
        finally:
            rows.live.clear()
            self._local.began = self._local.tape = None

    # The second run.

    def replay(self, reading: Reading) -> Replay:
        """Run the call again under the recorder; where that does not show it, ask the error log.

        Raises:
            ReplayError: If the call cannot be run again, and the log names no single line.
        """
        began: Began | None = getattr(self._local, "began", None)
        if began is None:
            msg = "the call is over and its arguments are gone"
            raise ReplayError(msg)
        tape = self._local.tape = LiveTape(self._session, None)
        try:
            seen = self._again(began, tape)
        except ReplayError as error:
            return self._logged(began, reading, str(error))
        except Exception as error:  # noqa: BLE001  the log is left
            why = f"the second run failed: {type(error).__name__} {error}".rstrip()
            return self._logged(began, reading, why)
        parted = parting(self._local.rows, reading, seen.passed, ends=True)
        if parted is not None or not seen.sinks:
            why = parted or "the second run was clean"
            return self._logged(began, reading, f"a second run showed something else ({why})")
        return seen

    def attempt(self, repairs: Sequence[Repair]) -> Attempt | None:
        """Run the call once more, with operations repaired that its second run saw."""
        began: Began | None = getattr(self._local, "began", None)
        tape: LiveTape | None = getattr(self._local, "tape", None)
        if began is None or tape is None:
            return None
        try:
            with began.lent() as (args, kwargs):
                tape.given = given(args, kwargs)
                return attempt(
                    self._session, Call(tape, began.fn, args, kwargs, began.context), repairs
                )
        except ReplayError:
            return None

    def _up_to(self, began: Began) -> Replay | None:
        """Run a call that an exception has ended again, up to there."""
        tape = LiveTape(self._session, None)
        try:
            self._again(began, tape)
        except Exception as error:  # noqa: BLE001  the program's own
            return tape.ended(error)
        return None

    def _again(self, began: Began, tape: LiveTape) -> Replay:
        session = self._session
        tape.judged = False
        start = session.start_of(began.fn)
        again = start.again(session.tracker.judge.say, tape)
        with began.lent() as (args, kwargs), again:
            began.roll()
            with np.errstate(all="ignore"):
                result = session.run(tape, began.fn, args, kwargs)
        seen = tape.replay()
        seen.notes += start.missed
        seen.passed = [
            Passed("", "forward", label, 0, *span)
            for label, x in leaves(result, "result")
            if (span := _span(x)) is not None
        ]
        return seen

    def _logged(self, began: Began, reading: Reading, why: str) -> Replay:
        """Tell what NumPy's own error log says of the first run."""
        lines = began.log.lines
        if not lines:
            raise ReplayError(why)
        note = f"{why}; NumPy's error log of the first run has: {began.log}"
        if len(lines) > 1:
            raise ReplayError(note)
        (error,) = lines
        record = OpRecord(
            0, canonical(error.name), f"numpy.{error.name}", None, "forward", None,
            source=error.source,
        )  # fmt: skip
        sink = Sink(reading.phase, reading.layer, reading.site.tensor, (0,), reading.kind or "nan")
        return Replay([record], [sink], [note])


def _bytes(x: Any) -> bytes:
    held: bytes = x.tobytes()
    return held


def _same(one: Any, other: Any) -> bool:
    if one is None:
        return True
    return bool(one[2] == other[2] and one[3:] == other[3:] and (one[1] == other[1]).all())


def _span(x: Any) -> Span | None:
    try:
        return probe(x)
    except TypeError:
        return None
