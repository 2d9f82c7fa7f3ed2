"""One call of a tracked function under a tape: what goes in, what runs, and what leaves it."""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from anynan._arrays.access import namespace, on_host, type_name
from anynan._arrays.arguments import bound, positional
from anynan._arrays.chunked import is_chunked
from anynan._arrays.containers import leaves
from anynan._steps.adapter import BaseAdapter
from anynan._steps.tracked import Tracked
from anynan.arrays.deferred import StandardSlots
from anynan.arrays.messages import ARGUMENT_OPAQUE
from anynan.arrays.reachable import ReachableState, StateSnapshot
from anynan.arrays.state import State
from anynan.arrays.tape import Tape, now
from anynan.arrays.trackable import change, is_array, unwrap
from anynan.arrays.tracked import TrackedArray, is_tracked


class Calls(BaseAdapter):
    """Run calls under tapes, whatever kind of tape.

    Attributes:
        backend: Name of the array library, known with the first call.
        wrapper: Class that arrays are wrapped in.
        slots: Class that holds the flags of one call on their device.
    """

    backend = "array"
    sees_training = False
    wrapper: type[TrackedArray] = TrackedArray
    slots: type[StandardSlots] = StandardSlots

    def __init__(self, tracker: Tracked) -> None:
        super().__init__(tracker)
        self._local = threading.local()
        self._reached: ReachableState | None = None
        self._matched: set[str] = set()
        self._paths: dict[str, bool] = {}

    # What a tape asks for.

    def watches(self, path: str) -> bool:
        """Tell whether ``layers=`` and ``exclude=`` choose this scope."""
        known = self._paths.get(path)
        if known is None:
            known = self._paths[path] = self._chosen(path)
        return known

    def _chosen(self, path: str) -> bool:
        keep, exclude = self.options.layers, self.options.exclude
        parts = list(_ancestors(path))
        left_out = () if exclude is None else each_pattern(exclude)
        if any(self._matches(p, part) for p in left_out for part in parts):
            return False
        return keep is None or any(self._matches(p, path) for p in each_pattern(keep))

    def _matches(self, pattern: Any, path: str) -> bool:
        found = pattern(path, None) if callable(pattern) else fnmatchcase(path, pattern)
        if found:
            self._matched.add(str(pattern))
        return bool(found)

    def reached(self, fn: Callable[..., Any]) -> ReachableState:
        """Give what a function's code reaches, as the last look found it."""
        reached = self._reached
        if reached is None or reached.fn != fn:
            reached = self._reached = ReachableState(fn)
        return reached

    def start_of(self, fn: Callable[..., Any], held: Sequence[Any] = ()) -> StateSnapshot:
        """Give what this thread's call began with; what is there now where it is over.

        Args:
            fn: The function.
            held: Containers among its arguments, with the keys and items that they held.
        """
        start: StateSnapshot | None = getattr(self._local, "start", None)
        start = ReachableState(fn).look().begin((), {}) if start is None else start
        start.held = held
        return start

    def is_reached_clean(self) -> bool:
        """Tell whether this thread's call made nothing bad that its code reaches."""
        start: StateSnapshot | None = getattr(self._local, "start", None)
        return start is None or next(start.corrupted(), None) is None

    def was_there(self, raw: Any) -> bool:
        """Tell whether an array is one that this thread's call began with, and as it was."""
        start: StateSnapshot | None = getattr(self._local, "start", None)
        return start is not None and start.had(raw)

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
        start: StateSnapshot | None = getattr(self._local, "start", None)
        done = set(tape.inputs)
        reached = start.corrupted() if heard and start is not None else ()
        for path, x in (*state.corrupted(result), *reached):
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


@contextmanager
def _ours(tape: Tape, what: str) -> Iterator[None]:
    """Let nothing out but an anomaly: the function itself goes well."""
    try:
        yield
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


def each_pattern(patterns: Any) -> Iterator[Any]:
    """Yield each of one pattern or several."""
    if isinstance(patterns, str) or callable(patterns):
        yield patterns
    else:
        yield from patterns


def _ancestors(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]
