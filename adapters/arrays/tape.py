"""One call of a tracked function: what runs its operations, and follows values out of scopes."""

import math
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, copy_context
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, Protocol

import numpy as np

from anynan._arrays.access import dtype_max, dtype_name, type_name
from anynan._arrays.containers import leaves
from anynan._arrays.messages import UNLOOKED
from anynan._base import context
from anynan._base.sources import user_source
from anynan._diagnosis.lineage import Replay, Sink
from anynan._diagnosis.records import Origin
from anynan._readings.readings import Reading, Site
from anynan._readings.step import Step
from anynan._steps.tracked import Tracked
from anynan.arrays.errorlog import ErrorLog
from anynan.arrays.messages import PLAIN_ARRAY
from anynan.arrays.names import UNWRITTEN, canonical
from anynan.arrays.namespaces import Namespace, namespace_of
from anynan.arrays.operations import ArrayOp
from anynan.arrays.trackable import change, copied, is_array, silent
from anynan.arrays.tracked import CLEAN, UNKNOWN, Cell, TrackedArray, is_tracked, is_view, strip
from anynan.errors import AnomalyError, AnynanWarning, reason
from anynan.events import Event, Kind, Phase
from anynan.options import Options

_OUTLETS = 20
SNAPSHOT = 2**16  # bytes
now: ContextVar["Tape | None"] = context.running


class Watching(Protocol):
    """Say what a tape needs to know of the adapter whose call it is."""

    tracker: Tracked
    options: Options
    wrapper: type[TrackedArray]
    slots: Any

    def watches(self, path: str, /) -> bool:
        """Tell whether ``layers=`` and ``exclude=`` choose this scope."""
        ...

    def was_there(self, raw: Any, /) -> bool:
        """Tell whether an array is one that the call began with, and as it was."""
        ...


class Tape:
    """Run the operations of one call; the two kinds of tape say when results are looked at.

    Attributes:
        session: Whose call it is.
        rows: Where readings go; None in a second run of a call, which only collects.
        base: The scope that the call itself was made in.
        closed: True once the call has returned: what is left over is only an array.
        overwritten: True once an operation wrote into one of the call's arguments.
        given: Which objects the arguments were made of when the call began.
        scoped: True once an operation ran in a scope of the function's own.
        log: NumPy's errors outside of what is watched; none where the ends alone are read.
        around: Gives what to run in an operation's place, in a trial of a fix.
    """

    around: Callable[..., Callable[..., Any]] | None = None

    def __init__(self, session: Watching, rows: Step | None, log: ErrorLog | None = None) -> None:
        self.session, self.rows, self.log = session, rows, log
        if rows is None:  # a second run: NumPy says nothing twice
            with np.errstate(all="ignore"):
                self.log = ErrorLog(copy_context())
        self.base = context.scope_path()
        self.closed = self.scoped = False
        self.overwritten = False
        self.given: list[tuple[str, int]] = []
        self.leaky = False  # True once a plain array was handed out, which anyone may write into
        self.inputs: dict[int, str] = {}
        self.unwritten: set[int] = set()  # arrays of uninitialised memory
        self.held: list[Any] = []  # keeps the ids above from being used again
        self.escapes: dict[int, None] = {}
        # The last that were handed out and may be bad: code that refuses one may end the call.
        self.handed: deque[TrackedArray] = deque(maxlen=8)
        # What the last operation was given: an exception may be because of it.
        self.taken: list[TrackedArray] = []
        self.outlets: dict[str, None] = {}  # the lines at which plain arrays were handed out
        self.bad_inputs: set[int] = set()
        self.others: dict[str, None] = {}  # arguments of a kind that is not watched
        self.counts: dict[tuple[str | None, str, str], int] = {}
        self.notes: list[str] = []
        self.is_array = is_array

    # What a kind of tape does with results.

    def look(
        self, results: list[TrackedArray], show: Callable[[], ArrayOp], *, clean: bool,
        writes: TrackedArray | None,
    ) -> None:  # fmt: skip
        """Look at the results of an operation.

        Args:
            results: What it gave, and last what it wrote to.
            show: Gives the operation.
            clean: Whether the results are known to be finite.
            writes: What it wrote to.
        """
        raise NotImplementedError

    def wrote(self, x: TrackedArray, index: int, op: ArrayOp) -> None:
        """Know the record of what wrote an array."""
        if x is op.writes and op.name == "setitem":
            x._cell.writes.append(index)
            return
        x._node = index
        if x is op.writes:  # a whole write hands on what it read through its own operands
            x._cell.writes[:] = [index]

    def read(self, layer: str | None, phase: Phase, tensor: str, x: TrackedArray) -> None:
        """Write the row of a value that arrived somewhere."""
        raise NotImplementedError

    def arrived(self, layer: str | None, phase: Phase, tensor: str, x: TrackedArray) -> None:
        """Read a value that arrived somewhere, or say that it could not be read."""
        try:
            self.read(layer, phase, tensor, x)
        except Exception as error:  # noqa: BLE001  what we cannot read, the user still can use
            where = f" of {layer}" if layer else ""
            self.failed(f"the {tensor}{where}, a {type_name(x._raw)},", error)

    def hearing(self) -> AbstractContextManager[object]:
        """Hear what NumPy finds wrong while the function runs."""
        return nullcontext() if self.log is None else self.log

    def heard(self) -> bool:
        """Tell whether anything was seen to make NaN or Inf."""
        return False

    def replay(self) -> Replay:
        """Give what was seen so far."""
        raise NotImplementedError

    def history(self, x: TrackedArray) -> tuple[int, ...]:
        """Bring what is known so far to the host; give the records that made this array bad."""
        raise NotImplementedError

    def take(self, event: Event, array: Any, later: int) -> bool:
        """Report what a direct check found: the operation, where it is known, by the tracker.

        Args:
            event: What the check alone would report.
            array: The bad array.
            later: How many more the check found.

        Returns:
            False if this call is over, and the check is to report it itself.
        """
        rows, tracker = self.rows, self.session.tracker
        if self.closed or (event.phase == "input" and not is_tracked(array)):
            return False
        if rows is None:  # a second run only collects
            self.checked(event, array)
            return True
        if rows.failed is not None:
            rows.spread_by(1 + later)
            return True
        x = array if is_tracked(array) else self.wrap(array)
        seen = None
        try:
            parents = self.history(x)
            sink = Sink("value", event.layer, event.tensor, parents, event.kind)
            seen = self.replay()
            seen.sinks = [sink]
        except Exception as error:  # noqa: BLE001  the check itself has found it
            self.failed(f"what made {event.tensor}", error)
        if seen is None or not sink.parents:
            tracker.judge.accept(rows, replace(event, step=rows.number))
            return True
        site = self.site(event.layer, "value", event.tensor, x._raw)
        span = _span(event.kind)
        reading = Reading(rows.number, len(rows.sites), 0, site, span, span)
        tracker.judge.fail(rows, reading, event.kind, x._raw, later=later, replayed=seen)
        return True

    def checked(self, event: Event, array: Any) -> None:
        """Note in a second run what a direct check found."""

    # Arrays in and out.

    def wrap(self, raw: Any, label: str | None = None) -> TrackedArray:
        """Put an array from outside under watch; an argument has a label."""
        return self.session.wrapper(raw, self, None, CLEAN, Cell(label))

    def add_input(self, raw: Any, label: str) -> Any:
        """Put an argument under watch, and read it; one that cannot be read stays as it is."""
        x = self.wrap(raw, label)
        self.inputs[id(raw)] = label
        self.held.append(raw)
        try:
            self.read(None, "input", label, x)
        except Exception as error:  # noqa: BLE001  the function can do with it what it did before
            self.failed(f"the argument {label}", error)
            return raw
        return x

    def lend(self, raw: Any) -> Any:
        """Put an array under watch that the function reaches past its arguments."""
        return self.wrap(raw) if is_array(raw) else raw

    def give(self, item: Any, name: str) -> Any:
        """Put the arrays of an iterator's item under watch; the program's own stay as they are."""

        def watch(raw: Any, label: str) -> Any:
            return self.add_input(raw.copy() if isinstance(raw, np.ndarray) else raw, label)

        return change(copied(item), name, is_array, watch)

    def add_other(self, raw: Any, label: str) -> None:
        """Read an argument that is not watched; what it holds is known to have come in."""
        self.inputs[id(raw)] = label
        self.held.append(raw)
        self.arrived(None, "input", label, self.wrap(raw, label))

    def namespace_of(self, raw: Any, asking: FrameType) -> Namespace:
        """Give the recording namespace of an array's library, as the asking module knows it."""
        return namespace_of(raw, asking)

    def escape(self, x: TrackedArray, dtype: Any, copy: bool | None) -> np.ndarray[Any, Any]:
        """Hand the plain array to code that asks for it."""
        self.escaped(x, "np.asarray")
        if copy is None:
            return np.asarray(x._raw, dtype=dtype)
        return np.asarray(x._raw, dtype=dtype, copy=copy)

    def escaped(self, x: TrackedArray, word: str, *, said: bool = True) -> None:
        """Note that a value is out of sight from here on, and may be written into.

        Args:
            x: The array.
            word: What handed it out.
            said: Warn of it now; else only the report of a bad value tells.
        """
        if self.closed:
            return
        self.leaky = x._cell.handed = True
        self.slipped(x)
        if self.parents(x):
            self.handed.append(x)
        line = user_source(skip=2)
        where = "" if line is None else f" at {line.place}"
        through = "" if line is None or line.via is None else f" in {line.via.partition(' ')[0]}"
        if len(self.outlets) < _OUTLETS:
            self.outlets[f"{where} ({word}{through})"] = None
        if not said or self.rows is None:
            return
        self.session.tracker.judge.say(PLAIN_ARRAY(where=where))

    def parents(self, x: TrackedArray) -> tuple[int, ...]:
        """Give the records that wrote into this array's memory."""
        own = (x._node,) if x._node >= 0 else ()
        return tuple(dict.fromkeys((*own, *x._cell.writes)))

    def slipped(self, x: TrackedArray) -> None:
        """Remember who wrote a value that goes on as a plain array or number."""
        if not self.closed:
            self.escapes.update(dict.fromkeys(self.parents(x)))

    def unseen(self) -> str:
        """Say why a bad value has no operation that made it."""
        if self.outlets:
            lines = ";".join(list(self.outlets)[:3])
            return (
                f"a plain array left anynan's sight{lines}: what is computed from it is not watched"
            )
        if self.others:
            return (
                f"operations on {', '.join(self.others)} are not watched, and no other operation "
                "made it"
            )
        return (
            "no watched operation made it: it comes from arrays that the function was not given "
            "(globals, attributes), or from the inside of a library's function"
        )

    def lost(self) -> tuple[int, ...]:
        """Blame what was handed out as a plain array for a bad one of unknown origin."""
        return tuple(self.escapes)

    def close(self) -> None:
        """End the recording: what is left over is only an array, and holds no other."""
        self.closed = True
        self.held.clear()
        self.inputs.clear()
        self.unwritten.clear()
        self.taken = []

    def ended(self, error: BaseException) -> Replay | None:
        """Give what was seen up to an exception, and last what the program took that is bad."""
        return None

    # Operations.

    def operate(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...],
        kwargs: dict[str, Any], *, writes: Any = None,
    ) -> Any:  # fmt: skip
        """Run one operation on the plain arrays, and put its results under watch."""
        found: list[TrackedArray] = []
        plain = tuple([strip(value, found) for value in args])
        options = {key: strip(value, found) for key, value in kwargs.items()} if kwargs else kwargs
        if self.closed:
            return function(*plain, **options)
        self.taken = found
        layer = self._enter(found)
        target = writes if is_tracked(writes) else None
        if self.around is not None and found and target is None:
            function = self.around(name, function, found[0]._raw, layer)
        before = None if target is None else _snapshot(target._raw)
        if target is not None:
            target._cell.written = True
            self.about_to_write(target)
        result = self._run(function, plain, options)
        word = canonical(name)
        results: list[TrackedArray] = []
        try:
            out = self._wrap_result(result, layer, found, results, target, name)
        except Exception as error:  # noqa: BLE001  the function goes on with what it asked for
            self.failed(f"the result of {name}", error)
            out, results = result, []
        if target is not None:
            if not any(item is target for item in results):
                results.append(target)
            # What is written to in a layer is the layer's.
            target._made = layer
        if results and word in UNWRITTEN:
            for x in results:
                x._node = UNKNOWN
                self.unwritten.add(id(x._raw))
                self.held.append(x._raw)
        elif results:
            try:
                clean = target is None and self._clean(name, args, kwargs)
                show = partial(
                    ArrayOp, self.base, word, name, function, args, kwargs, results, before, target
                )
                self.look(results, show, clean=clean, writes=target)
            except Exception as error:  # noqa: BLE001  looking is ours, the result is there
                self.failed(f"the result of {name}", error)
        return out

    def _run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a function on plain arrays; what is in sight is looked at, and not noted."""
        log = self.log
        if log is None:
            return function(*args, **kwargs)
        lines, log.lines = log.lines, {}
        try:
            modes = np.geterr()
            if "warn" not in (modes["divide"], modes["over"], modes["invalid"]):
                return function(*args, **kwargs)
            # Set inside of the function: NumPy would warn of a line of ours.
            with np.errstate(all="ignore") if self.rows is None else ErrorLog(copy_context()):
                return function(*args, **kwargs)
        finally:
            log.lines = lines

    def failed(self, what: str, error: Exception) -> None:
        """Say that something could not be looked at; the function goes on.

        What anynan itself ends the call with goes on its way: an anomaly, or a report where the
        program's filters make warnings exceptions.
        """
        if isinstance(error, (AnomalyError, AnynanWarning)):
            raise error
        self.session.tracker.judge.say(UNLOOKED(what=what, error=reason(error)))

    def about_to_write(self, target: TrackedArray) -> None:
        """Remember whether an argument is lost for a second run."""
        self.overwritten = self.overwritten or target._cell.label is not None

    def _enter(self, found: list[TrackedArray]) -> str | None:
        layer = context.scope_path()
        if layer == self.base:
            layer = None
        elif not self.scoped:
            self.scoped = True
        for x in found:
            made = x._made
            if made is not None and made != layer:
                self.leave(x, layer)
        return layer

    def leave(self, x: TrackedArray, layer: str | None) -> None:
        """Read a value that an operation in ``layer`` takes out of the scopes it was made in."""
        path = x._made
        while path is not None and path != self.base and not _inside(layer, path):
            if self.session.watches(path):
                self.arrived(path, "forward", "output", x)
            path = path.rpartition(".")[0] or None
        x._made = None if path == self.base else path

    def _clean(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell without a reading whether the results are finite."""
        return False

    def _wrap_result(
        self, result: Any, layer: str | None, found: list[TrackedArray],
        results: list[TrackedArray], target: TrackedArray | None, name: str,
    ) -> Any:  # fmt: skip
        if target is not None and result is target._raw:
            results.append(target)
            return target
        if is_array(result):
            for x in found:
                if result is x._raw:  # an operation that had nothing to do gave its operand back
                    return x
            cell = Cell()
            if found and is_view(name):
                cell = found[0]._cell
            x = self.session.wrapper(result, self, layer, CLEAN, cell)
            results.append(x)
            return x
        if isinstance(result, tuple | list) and any(is_array(item) for item in result):
            items = [self._wrap_result(item, layer, found, results, None, name) for item in result]
            if hasattr(result, "_fields"):
                try:
                    return type(result)(*items)
                except TypeError:  # a structure of a compiled library
                    return tuple(items)
            return type(result)(items)
        return result

    def from_outside(self, name: str, known: str | None, *, came_bad: bool) -> Origin:
        """Say what an operand's bad values came from that no operation was seen writing.

        Args:
            name: The operation's own name for the operand.
            known: The argument that it is, None if it is none.
            came_bad: That argument was bad when the call began.
        """
        if known is None:
            return Origin((), "unknown", name)
        if came_bad:
            return Origin((), "input", known)
        self.notes.append(self.unseen())
        return Origin((), "overwritten", known)

    # Step.

    def site(self, layer: str | None, phase: Phase, tensor: str, raw: Any) -> Site:
        """Find the slot of a value."""
        monitor = self.session.tracker.judge.monitor
        return monitor.site(layer, phase, tensor, dtype_name(raw), dtype_max(raw))

    def add_row(self, site: Site) -> int:
        """Open a row; the caller fills in its two numbers."""
        rows = self.rows
        assert rows is not None
        key = (site.layer, site.phase, site.tensor)
        count = self.counts[key] = self.counts.get(key, -1) + 1
        order = rows.reserve(site, count)
        expected = context.expectations()
        if expected is not None:
            rows.expect([order], expected)
        return order

    def placed(self, layer: str | None) -> tuple[str | None, Phase]:
        """Give layer and phase of what was computed in this scope, now that all are known."""
        if layer is not None:
            return layer, "forward"
        # A function without scopes is the layer itself.
        return (None, "loss") if self.scoped else (self.base or "", "forward")


def _snapshot(raw: Any) -> Any:
    """Copy what is about to be overwritten, so that a report can quote it, if it is small."""
    return raw.copy() if isinstance(raw, np.ndarray) and raw.nbytes <= SNAPSHOT else None


def given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, int]]:
    """List which objects arguments are made of."""
    return [(path, id(x)) for path, x in leaves((args, kwargs), "", silent)]


def _inside(layer: str | None, path: str) -> bool:
    return layer is not None and (layer == path or layer.startswith(path + "."))


def _span(kind: Kind) -> float:
    return {"nan": math.nan, "neginf": -math.inf}.get(kind, math.inf)
