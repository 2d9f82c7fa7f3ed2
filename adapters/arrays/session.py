"""What drives a tracked function of array code: the adapter behind ``anynan.track``."""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from fnmatch import fnmatchcase
from functools import partial
from types import MethodType
from typing import Any

import numpy as np

from anynan._arrays.access import namespace, on_host, type_name
from anynan._arrays.arguments import bound, positional
from anynan._arrays.chunked import is_chunked
from anynan._arrays.containers import leaves
from anynan._arrays.measures import measure
from anynan._base.summary import Summary
from anynan._bundle.collector import Collector
from anynan._diagnosis.evidence import ReplayError
from anynan._diagnosis.lineage import Replay
from anynan._diagnosis.rules.repair import Repair
from anynan._diagnosis.trials import Attempt
from anynan._reach.messages import REPLAY_STOPPED
from anynan._readings.readings import Reading
from anynan._readings.step import Step
from anynan._steps.adapter import BaseAdapter
from anynan._steps.framework import EVERY_OPERATION, Escalation
from anynan._steps.loaders import bad_rows
from anynan._steps.tracked import Tracked
from anynan.arrays.again import Call, attempt, bundled
from anynan.arrays.bundle import DIALECT
from anynan.arrays.ends import Ends
from anynan.arrays.errorlog import ErrorLog
from anynan.arrays.lazy import LazyTape, StandardSlots
from anynan.arrays.live import LiveTape
from anynan.arrays.messages import (
    ARGUMENT_OPAQUE,
    ARGUMENTS_OVERWRITTEN,
    ARRAY_PARTED,
    PATTERN_UNMATCHED,
    SCALAR_DEFERRED,
)
from anynan.arrays.parting import divergence
from anynan.arrays.reached import Reached, Start
from anynan.arrays.refusals import explain
from anynan.arrays.state import State
from anynan.arrays.tape import Tape, given, now
from anynan.arrays.trackable import change, is_array, unwrap
from anynan.arrays.tracked import TrackedArray, is_tracked
from anynan.errors import AnomalyError

# An operand up to this size is copied before it is overwritten, so that a report can quote it.
SNAPSHOT = 2**16  # bytes


class ArraySession(BaseAdapter):
    """Watch a function of array code: its arguments, its operations, what leaves its scopes.

    Attributes:
        backend: Name of the array library, known with the first call.
        wrapper: Class that arrays are wrapped in.
        slots: Class that holds the flags of one call on their device.
        ends: Runs calls on their own arrays, at ``level="step"``.
    """

    backend = "array"
    sees_training = False
    wrapper: type[TrackedArray] = TrackedArray
    slots: type[StandardSlots] = StandardSlots

    def __init__(self, tracker: Tracked) -> None:
        super().__init__(tracker)
        self._local = threading.local()
        self.ends = Ends(self)
        self._reached: Reached | None = None
        self._unread: list[tuple[LazyTape, Call | None]] = []
        self._matched: set[str] = set()
        self._paths: dict[str, bool] = {}
        self._seen_scopes = False

    # What a tape asks for.

    def watches(self, path: str) -> bool:
        """Tell whether ``layers=`` and ``exclude=`` choose this scope."""
        known = self._paths.get(path)
        if known is None:
            known = self._paths[path] = self._chosen(path)
        return known

    def snapshot(self, raw: Any) -> Any:
        """Copy what is about to be overwritten, if it is small."""
        if not isinstance(raw, np.ndarray) or raw.nbytes > SNAPSHOT:
            return None
        return raw.copy()

    # The contract of ``anynan._steps.adapter.Adapter``.

    def detach(self) -> None:
        """Leave nothing behind."""
        self._unread.clear()

    def read(self) -> None:
        """Bring the flags of finished calls to the host and judge them."""
        unread, self._unread = self._unread, []
        for tape, call in unread:
            self._local.again = tape, call
            try:
                try:
                    tape.finish()
                except Exception as error:  # noqa: BLE001  the call itself went well
                    tape.failed("the flags of a call", error)
                    continue
                assert tape.rows is not None
                self._judge(tape, tape.rows)
            finally:
                self._local.again = None

    def replay(self, reading: Reading) -> Replay:
        """Run a call again where its operands can be seen, or tell what is known without."""
        if self.ends.is_running:
            return self.ends.replay(reading)
        again: tuple[LazyTape, Call | None] | None = getattr(self._local, "again", None)
        if again is None:
            msg = "the call is over and its arguments are gone"
            raise ReplayError(msg)
        tape, call = again
        reason = self._not_again(tape, call)
        if reason is None:
            try:
                seen_by = call.new_tape(self)
                call.again(self, seen_by)
                seen = seen_by.replay()
            except ReplayError as error:
                reason = f"the call was not run again: {error}"
            except Exception as error:  # noqa: BLE001  the first run's own records are left
                reason = REPLAY_STOPPED(where=f"at {type(error).__name__} {error}".rstrip())
            else:
                parted = divergence(tape.replay(), seen)
                if parted is None:
                    return seen
                reason = ARRAY_PARTED(parted=parted)
        seen = tape.replay()
        if reason:
            seen.notes.append(reason)
        return seen

    def _not_again(self, tape: LazyTape, call: Call | None) -> str | None:
        """Say why a call is not run again, None if it can be."""
        if any(node.array is not None for node in tape.nodes):
            return ""  # what is not computed yet was kept, and is measured as it is
        if call is None:
            if self.options.read == "auto":
                return ""  # no function was called: there is nothing to run again
            return SCALAR_DEFERRED()
        if call.is_changed or tape.is_changed():
            return ARGUMENTS_OVERWRITTEN()
        return None

    @property
    def dialect(self) -> str:
        """Name NumPy, whose functions the script of a bundle calls, whatever the arrays."""
        return DIALECT.framework

    def capture(self, reading: Reading, into: Collector) -> None:
        """Run the failing call again for a bundle."""
        call: Call | None = getattr(self._local, "call", None)
        if self.ends.is_running or call is None:
            super().capture(reading, into)
        else:
            bundled(self, call, into)

    def escalation(self) -> Escalation:
        """Watch every operation of the next calls."""
        return EVERY_OPERATION

    def attempt(self, reading: Reading, repairs: Sequence[Repair]) -> Attempt | None:
        """Run the call again with operations repaired, where its arguments are as they were."""
        if self.ends.is_running:
            return self.ends.attempt(repairs)
        call: Call | None = getattr(self._local, "call", None)
        tape = None if call is None else call.tape
        if call is None or tape is None or tape.rows is None or tape.rows.number != reading.step:
            return None
        return attempt(self, call, tape, repairs)

    def measure(self, value: Any) -> Summary:
        """Summarise an array."""
        return measure(value)

    def bad_rows(self, value: Any) -> tuple[int, ...]:
        """List the rows of a bad argument that are bad."""
        return bad_rows(value)

    # One call.

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one step, and judge what it saw."""
        if now.get() is not None:
            return fn(*args, **kwargs)  # inside another tracked function, which owns the step
        reached = self._reached
        if reached is None or reached.fn != fn:
            reached = self.reached(fn)
        if reached.is_due():
            reached.look()
        if self.tracker.judge.level != "step":
            return self.in_full(fn, args, kwargs)
        if reached.is_empty and type(fn) is not MethodType:
            return self.ends.call(fn, args, kwargs)
        return self.begun(fn, args, kwargs, self.ends.call)

    def in_full(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one step with all that may be wanted of it kept."""
        near = self.tracker.judge.level == "step" and self._are_near(args, kwargs)
        run = self.ends.read if near else self._call
        if getattr(self._local, "start", None) is not None:  # it was kept already
            return run(fn, args, kwargs)
        return self.begun(fn, args, kwargs, run)

    def begun(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        run: Callable[..., Any],
    ) -> Any:  # fmt: skip
        """Run a call with what a second run of it needs at hand."""
        if not self.options.replay:
            return run(fn, args, kwargs)
        reached = self.reached(fn)
        with reached.lending(args, kwargs) as lent:
            self._local.start = reached.begin(*lent)
            try:
                return run(fn, *lent)
            finally:
                self._local.start = None

    def reached(self, fn: Callable[..., Any]) -> Reached:
        """Give what a function's code reaches, as the last look found it."""
        reached = self._reached
        if reached is None or reached.fn != fn:
            reached = self._reached = Reached(fn)
        return reached

    def start_of(self, fn: Callable[..., Any], held: Sequence[Any] = ()) -> Start:
        """Give what this thread's call began with; what is there now where it is over.

        Args:
            fn: The function.
            held: Containers among its arguments, with the keys and items that they held.
        """
        start: Start | None = getattr(self._local, "start", None)
        start = Reached(fn).look().begin((), {}) if start is None else start
        start.held = held
        return start

    def is_reached_clean(self) -> bool:
        """Tell whether this thread's call made nothing bad that its code reaches."""
        start: Start | None = getattr(self._local, "start", None)
        return start is None or next(start.spoilt(), None) is None

    def was_there(self, raw: Any) -> bool:
        """Tell whether an array is one that this thread's call began with, and as it was."""
        start: Start | None = getattr(self._local, "start", None)
        return start is not None and start.had(raw)

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one step under a tape."""
        rows = self.tracker.judge.rows()
        lazy = self._is_lazy(args, kwargs)
        call = self._local.call = Call(fn, args, kwargs, copy_context())
        call.random = np.random.get_state() if lazy else None  # noqa: NPY002
        tape: Tape = (LazyTape if lazy else LiveTape)(self, rows, ErrorLog(call.context))
        tape.given = given(args, kwargs)
        call.tape = tape
        try:
            try:
                result = self.run(tape, fn, args, kwargs)
            except BaseException as error:
                explain(error)
                # What broke the step may be what anynan looks for: judge it, then let it go on.
                with self.tracker.judge.carried_by(error, rows):
                    self.tracker.judge.raised(rows, error, partial(tape.ended, error))
                    self.end(tape, rows, call)
                raise
            self.end(tape, rows, call)
        finally:
            self._local.call = None
        return result

    def _is_lazy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self.options.read == "immediate" or self.tracker.judge.level == "operation":
            return False  # every operation is looked at as it runs, so nothing is left to read
        if self.options.read != "auto":
            return True
        return not self._are_near(args, kwargs)

    def _are_near(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not kwargs and all(type(x) is np.ndarray for x in args):  # seen without a walk
            return True
        return all(self.is_near(x) for _, x in leaves((args, kwargs), "") if is_array(x))

    def is_near(self, raw: Any) -> bool:
        """Tell whether an array lies in host memory, where a look at it costs no wait."""
        return not is_chunked(raw) and on_host(raw) is not None

    def read_given(self, tape: Tape, given: list[tuple[str, Any]]) -> None:
        """Read what a call is given."""
        with _ours(tape, "what the call was given"):
            for name, value in given:
                for label, x in self._leaves(value, name):
                    if is_array(x):
                        if not tape.inputs:
                            self._meet(x)
                        tape.add_input(x, label)
            self._look_at_others(tape, given)

    def came_in(self, tape: Tape, label: str, x: Any, first: Any) -> None:
        """Note an argument that came in clean: as it was then it is read, where it was kept."""
        if not tape.inputs:
            self._meet(x)
        tape.inputs[id(x)] = label
        tape.held += [x, first]
        if first is not x:
            tape.arrived(None, "input", label, tape.wrap(first, label))

    def run(
        self, tape: Tape, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call under a tape, and read what leaves it."""
        before = now.get()
        watched = bound(positional(fn), args, kwargs)
        state = State(fn, watched, self.is_near)
        seen: list[Any] = []

        def watch(raw: Any, label: str) -> Any:
            if not seen:
                self._meet(raw)
            seen.append(raw)
            return tape.add_input(raw, label)

        try:
            now.set(tape)
            for i, (name, value) in enumerate(watched):
                watched[i] = name, change(value, name, is_array, watch)
            with _ours(tape, "what the call was given"):
                self._look_at_others(tape, watched)
            known = {id(x) for _, value in watched for _, x in self._leaves(value, "")}
            values = [value for _, value in watched]
            named = dict(zip(kwargs, values[len(args) :], strict=True))
            try:
                with tape.hearing():
                    result = fn(*values[: len(args)], **named)
            except Exception:
                with _ours(tape, "what the call had handed out"):
                    for x in tape.handed:
                        self.arrive(tape, "an array that was handed out", x)
                raise
            with _ours(tape, "what the call left behind"):
                self.read_result(tape, result)
                self._read_written(tape, watched, known, result)
                self.read_state(tape, state, result, heard=tape.heard())
            return unwrap(result)
        finally:
            now.set(before)
            tape.close()
            unwrap([value for _, value in watched], 1)
            state.unwrap()

    def _meet(self, raw: Any) -> None:
        """Learn which library the function works with."""
        xp = namespace(raw)
        name = type(raw).__module__ if xp is None else xp.__name__
        self.backend = str(name).removeprefix("array_api_compat.").partition(".")[0]

    def _leaves(self, value: Any, name: str) -> Iterator[tuple[str, Any]]:
        return leaves(value, name, self.tracker.judge.say)

    def _look_at_others(self, tape: Tape, watched: list[tuple[str, Any]]) -> None:
        """Read the arguments that are arrays of a kind that is not watched, and say so."""
        for name, value in watched:
            said = False
            for label, x in self._leaves(value, name):
                kind: Any = type(x)
                if issubclass(kind, TrackedArray | float | complex) or is_array(x):
                    continue
                if not _holds_text(x):
                    if not said:  # a table has many columns
                        held = type(value) in (list, tuple, dict)
                        what = (label, x) if held else (name, value)
                        said = self._say_unwatched(tape, *what)
                    tape.add_other(x, label)

    def _say_unwatched(self, tape: Tape, label: str, x: Any) -> bool:
        """Say that an argument is of a kind that is not watched."""
        tape.others[f"{label} (a {type_name(x)})"] = None
        self.tracker.judge.say(ARGUMENT_OPAQUE(name=label, kind=type_name(x)))
        return True

    def read_result(self, tape: Tape, result: Any) -> None:
        """Read what a call returns."""
        for label, x in self._leaves(result, "result"):
            self.arrive(tape, label, x, result=True)

    def read_state(self, tape: Tape, state: State, result: Any, *, heard: bool) -> None:
        """Read what the call made bad in objects, and past its arguments.

        Args:
            tape: The call's.
            state: What the objects held when it began.
            result: What it returned.
            heard: Whether something was seen to make NaN or Inf; else only objects are looked at.
        """
        start: Start | None = getattr(self._local, "start", None)
        done = set(tape.inputs)
        reached = start.spoilt() if heard and start is not None else ()
        for path, x in (*state.spoilt(result), *reached):
            raw = x._raw if is_tracked(x) else x
            if id(raw) not in done:
                done.add(id(raw))
                self.arrive(tape, path, x)

    def _read_written(
        self, tape: Tape, watched: list[tuple[str, Any]], given: set[int], result: Any
    ) -> None:
        """Read what the function wrote into its arguments: it leaves the function as well."""
        done = {id(x) for _, x in self._leaves(result, "")}
        for name, value in watched:
            for label, x in self._leaves(value, name):
                if id(x) in done or type(x) in (float, complex):
                    continue
                done.add(id(x))
                if id(x) not in given or (is_tracked(x) and _is_changed(tape, x)):
                    self.arrive(tape, label, x)

    def arrive(self, tape: Tape, label: str, x: Any, *, result: bool = False) -> None:
        """Read one array that leaves the function."""
        if not is_tracked(x):
            raw = np.asarray(x) if type(x) in (float, complex) else x
            x = tape.wrap(raw, tape.inputs.get(id(raw)))
            x._cell.bad = id(raw) in tape.bad_inputs
        if x._made is not None:
            tape.leave(x, None)
        layer, phase = tape.placed(None)
        if phase == "loss" and not (result and _is_single(x._raw)):
            phase = "forward"
        name = "loss" if phase == "loss" and label == "result" else label
        tape.arrived(layer, phase, name, x)

    def end(self, tape: Tape, rows: Step, call: Call | None) -> None:
        """End a call, or a block of code: judge what it left, now or with later ones."""
        self.tracker.judge.close_step()
        self._tell_patterns()
        if not isinstance(tape, LazyTape):
            self._judge(tape, rows)
            return
        every = self.options.read if isinstance(self.options.read, int) else 1
        # Calls that wait for a later read would keep all their arguments alive.
        if every > 1:
            rows.forget_arrays()
        self._unread.append((tape, call if every == 1 else None))
        if (rows.number + 1) % every == 0:
            self.read()

    def _judge(self, tape: Tape, rows: Step) -> None:
        try:
            if self.options.level == "operation" and rows.failed is None:
                self.tracker.judge.review(rows)
                self.tracker.judge.operations(rows, tape.replay())
        finally:
            try:
                self.tracker.judge.settle(rows)
            finally:
                rows.forget_arrays()

    # Patterns.

    def _chosen(self, path: str) -> bool:
        keep, exclude = self.options.layers, self.options.exclude
        parts = list(_ancestors(path))
        left_out = () if exclude is None else _each(exclude)
        if any(self._matches(p, part) for p in left_out for part in parts):
            return False
        return keep is None or any(self._matches(p, path) for p in _each(keep))

    def _matches(self, pattern: Any, path: str) -> bool:
        found = pattern(path, None) if callable(pattern) else fnmatchcase(path, pattern)
        if found:
            self._matched.add(str(pattern))
        return bool(found)

    def _tell_patterns(self) -> None:
        if self._seen_scopes:
            return
        self._seen_scopes = True
        for option in ("layers", "exclude"):
            for pattern in _each(getattr(self.options, option) or ()):
                if str(pattern) not in self._matched:
                    known = ", ".join(sorted(self._paths)) or "none"
                    said = PATTERN_UNMATCHED
                    self.tracker.judge.say(said(option=option, pattern=repr(pattern), known=known))


@contextmanager
def _ours(tape: Tape, what: str) -> Iterator[None]:
    """Let nothing out but an anomaly: the function itself goes well."""
    try:
        yield
    except AnomalyError:
        raise
    except Exception as error:  # noqa: BLE001  see above
        tape.failed(what, error)


def _holds_text(x: Any) -> bool:
    try:
        return getattr(getattr(x, "dtype", None), "kind", "f") in "SUMm"
    except Exception:  # noqa: BLE001  a proxy may raise at any question
        return True


def _is_changed(tape: Tape, x: TrackedArray) -> bool:
    """Tell whether an argument may be bad by what the call wrote into it."""
    if not (x._cell.written or x._cell.handed):
        return False
    return bool(not x._cell.bad or tape.parents(x))


def _is_single(raw: Any) -> bool:
    try:
        return bool(math.prod(raw.shape) == 1)
    except Exception:  # noqa: BLE001  a table, an array of unknown shape
        return False


def _each(patterns: Any) -> Iterator[Any]:
    if isinstance(patterns, str) or callable(patterns):
        yield patterns
    else:
        yield from patterns


def _ancestors(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]
