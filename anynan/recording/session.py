"""What drives a tracked function of array code: the adapter behind ``anynan.track``."""

import inspect
import math
import threading
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from anynan.adapter import BadParameter, ReplayError
from anynan.arrays import namespace, on_host, type_name
from anynan.chunked import is_chunked
from anynan.containers import leaves
from anynan.context import replay_context
from anynan.lineage import Replay
from anynan.measuring import measure
from anynan.monitor import Reading, Rows
from anynan.options import Options
from anynan.recording.lazy import LazyTape, Slots, StandardSlots
from anynan.recording.live import LiveTape
from anynan.recording.refusals import explain
from anynan.recording.tape import Tape, now
from anynan.recording.trackable import change, is_array, unwrap
from anynan.recording.tracked import TrackedArray, is_tracked
from anynan.summary import Summary
from anynan.tracker import Tracker
from anynan.watching import bad_rows

# An operand up to this size is copied before it is overwritten, so that a report can quote it.
SNAPSHOT = 2**16  # bytes


class ArraySession:
    """Watch a function of array code: its arguments, its operations, what leaves its scopes.

    Attributes:
        backend: Name of the array library, known with the first call.
        wrapper: Class that arrays are wrapped in.
    """

    backend = "array"
    wrapper: type[TrackedArray] = TrackedArray

    def __init__(self, options: Options) -> None:
        self.options = options
        self.tracker: Tracker
        self._local = threading.local()
        self._unread: list[tuple[LazyTape, Any, tuple[Any, ...], dict[str, Any]]] = []
        self._matched: set[str] = set()
        self._paths: dict[str, bool] = {}
        self._seen_scopes = False

    # What a tape asks for.

    def new_slots(self) -> Slots:
        """Make room for the flags of one call."""
        return StandardSlots()

    def watches(self, path: str) -> bool:
        """Tell whether ``layers=`` and ``skip=`` choose this scope."""
        known = self._paths.get(path)
        if known is None:
            known = self._paths[path] = self._chosen(path)
        return known

    def snapshot(self, raw: Any) -> Any:
        """Copy what is about to be overwritten, if it is small."""
        if not isinstance(raw, np.ndarray) or raw.nbytes > SNAPSHOT:
            return None
        return raw.copy()

    # The contract of ``anynan.adapter.Adapter``.

    def attach(self) -> None:
        """There is nothing to hook: the tracker stands in the function's place."""

    def detach(self) -> None:
        """Leave nothing behind."""
        self._unread.clear()

    def watched(self) -> list[str]:
        """List nothing: scopes are known when they run."""
        return []

    def set_paused(self, paused: bool) -> None:
        """Read what is left; a paused tracker calls the function itself."""
        if paused:
            self.read()

    def read(self) -> None:
        """Bring the flags of finished calls to the host and judge them."""
        unread, self._unread = self._unread, []
        for tape, fn, args, kwargs in unread:
            self._local.again = (tape, fn, args, kwargs)
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

    def finish(self) -> None:
        """Read what is left; the hooks go right after."""
        self.read()

    def replay(self, reading: Reading) -> Replay:
        """Run a call again where its operands can be seen, or tell what is known without."""
        again = getattr(self._local, "again", None)
        if again is None:
            msg = "the call is over and its arguments are gone"
            raise ReplayError(msg)
        tape: LazyTape
        tape, fn, args, kwargs = again
        reason = self._not_again(tape, fn, args, kwargs)
        if reason is None:
            try:
                seen = self._run_again(fn, args, kwargs)
            except Exception as error:  # noqa: BLE001  the first run's own records are left
                reason = f"the second run failed: {type(error).__name__} {error}".rstrip()
            else:
                if seen.sinks:
                    return seen
                reason = "the second run was clean: the function keeps state or is random"
        seen = tape.replay()
        if reason:
            seen.notes.append(f"{reason}; operands are known by their extremes only")
        return seen

    def _not_again(
        self, tape: LazyTape, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str | None:
        """Say why a call is not run again, None if it can be."""
        if any(node.array is not None for node in tape.nodes):
            return ""  # what is not computed yet was kept, and is measured as it is
        if fn is None:
            if self.options.read == "auto":
                return ""  # no function was called: there is nothing to run again
            return "the arguments of this call were not kept (read= waits for several calls)"
        if tape.overwritten or tape.given != _given(args, kwargs):
            return "the call wrote into its own arguments, so it was not run again"
        return None

    def _run_again(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Replay:
        tape = LiveTape(self, None)
        tape.judged = False
        state = np.random.get_state()  # noqa: NPY002  what the function may draw from
        np.random.set_state(self._local.random)  # noqa: NPY002
        try:
            with replay_context():
                self._run(tape, fn, args, kwargs)
        finally:
            np.random.set_state(state)  # noqa: NPY002
        return tape.replay()

    def measure(self, value: Any) -> Summary:
        """Summarise an array."""
        return measure(value)

    def bad_parameters(self) -> list[BadParameter]:
        """List nothing: array code does not say which of its arrays are weights."""
        return []

    def describe_input(self, reading: Reading, value: Any) -> tuple[int, ...]:
        """List the rows of a bad argument that are bad."""
        return bad_rows(value)

    def loss_scale(self) -> float | None:
        """Give None: array code has no loss scaler that could be seen."""
        return None

    def rank(self) -> int | None:
        """Give None: one process is all there is."""
        return None

    # One call.

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one step under a tape, and judge what it saw."""
        if now.get() is not None:
            return fn(*args, **kwargs)  # inside another tracked function, which owns the step
        rows = self.tracker.rows()
        lazy = self._is_lazy(args, kwargs)
        self._local.random = np.random.get_state() if lazy else None  # noqa: NPY002
        tape: Tape = LazyTape(self, rows) if lazy else LiveTape(self, rows)
        if isinstance(tape, LazyTape):
            tape.given = _given(args, kwargs)
        try:
            result = self._run(tape, fn, args, kwargs)
        except BaseException as error:
            explain(error)
            # What broke the step may be what anynan looks for: judge it, then let it go on.
            with self.tracker.softly():
                self.end(tape, rows, fn, args, kwargs)
            raise
        self.end(tape, rows, fn, args, kwargs)
        return result

    def _is_lazy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self.options.read == "immediate":
            return False
        if self.options.read != "auto":
            return True
        return any(not self.is_near(x) for _, x in leaves((args, kwargs), "") if is_array(x))

    def is_near(self, raw: Any) -> bool:
        """Tell whether an array lies in host memory, where a look at it costs no wait."""
        return not is_chunked(raw) and on_host(raw) is not None

    def _run(
        self, tape: Tape, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        names = argument_names(fn, args)
        token = now.set(tape)
        seen: list[Any] = []

        def watch(raw: Any, label: str) -> Any:
            if not seen:
                self._meet(raw)
            seen.append(raw)
            return tape.add_input(raw, label)

        watched: list[Any] = list(args)
        named = dict(kwargs)
        try:
            for i, name in enumerate(names):
                watched[i] = change(args[i], name, is_array, watch)
            for name, value in kwargs.items():
                named[name] = change(value, name, is_array, watch)
            self._tell_unwatched(args, kwargs)
            result = fn(*watched, **named)
            self._read_result(tape, result)
            return unwrap(result)
        finally:
            now.reset(token)
            tape.close()
            unwrap(list(watched))
            unwrap(named)

    def _meet(self, raw: Any) -> None:
        """Learn which library the function works with."""
        xp = namespace(raw)
        name = type(raw).__module__ if xp is None else xp.__name__
        self.backend = str(name).removeprefix("array_api_compat.").partition(".")[0]

    def _tell_unwatched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for label, x in leaves((args, kwargs), ""):
            if isinstance(x, TrackedArray | float | complex) or is_array(x):
                continue
            kind = getattr(getattr(x, "dtype", None), "kind", "f")
            if kind not in "SUMm":
                self.tracker.say(
                    f"the argument {label} is a {type_name(x)}: operations on it are not "
                    "watched, only what comes out of them and meets a watched array"
                )

    def _read_result(self, tape: Tape, result: Any) -> None:
        for label, x in leaves(result, "result"):
            if not is_tracked(x):
                if not isinstance(x, float) and not is_array(x):
                    continue
                x = tape.wrap(np.asarray(x) if isinstance(x, float) else x)  # noqa: PLW2901
            if x._made is not None:
                tape.leave(x, None)
            layer, phase = tape.placed(None)
            single = math.prod(x.shape) == 1
            if phase == "loss" and not single:
                phase = "forward"
            name = "loss" if phase == "loss" and label == "result" else label
            tape.read(layer, phase, name, x)

    def end(
        self, tape: Tape, rows: Rows, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """End a call: judge what it left, now or with later ones."""
        self.tracker.close_step()
        self._tell_patterns()
        if not isinstance(tape, LazyTape):
            self._judge(tape, rows)
            return
        every = self.options.read if isinstance(self.options.read, int) else 1
        # Calls that wait for a later read would keep all their arguments alive.
        kept = (fn, args, kwargs) if every == 1 else (None, (), {})
        if every > 1:
            rows.live.clear()
        self._unread.append((tape, *kept))
        if (rows.step + 1) % every == 0:
            self.read()

    def _judge(self, tape: Tape, rows: Rows) -> None:
        try:
            if self.options.level == "operation" and rows.failed is None:
                self.tracker.judge(rows)
                self.tracker.operations(rows, tape.replay())
        finally:
            try:
                self.tracker.settle(rows)
            finally:
                rows.live.clear()

    # Patterns.

    def _chosen(self, path: str) -> bool:
        keep, skip = self.options.layers, self.options.skip
        if skip is not None and any(self._matches(p, part) for p in _each(skip)
                                    for part in _ancestors(path)):  # fmt: skip
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
        for option in ("layers", "skip"):
            for pattern in _each(getattr(self.options, option) or ()):
                if str(pattern) not in self._matched:
                    known = ", ".join(sorted(self._paths)) or "none"
                    self.tracker.say(
                        f"{option}={pattern!r} matched no scope that a value left in the first "
                        f"call; the scopes were: {known}"
                    )


def _each(patterns: Any) -> Iterator[Any]:
    if isinstance(patterns, str) or callable(patterns):
        yield patterns
    else:
        yield from patterns


def _ancestors(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, int]]:
    """List which objects the arguments are made of."""
    return [(path, id(x)) for path, x in leaves((args, kwargs), "")]


def argument_names(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    """Name positional arguments as the function does."""
    names: list[str] = []
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    for i in range(len(args)):
        if i < len(parameters) and parameters[i].kind is not inspect.Parameter.VAR_POSITIONAL:
            names.append(parameters[i].name)
        else:
            names.append(f"args[{i}]")
    return names
