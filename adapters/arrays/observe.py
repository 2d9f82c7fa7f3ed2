"""Every operation of one call of array code, shown as it runs; the call leaves no trace."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from functools import cached_property
from types import FrameType
from typing import Any

import numpy as np

from anynan._arrays.containers import leaves, mapped
from anynan._base import context
from anynan._base.sources import user_source
from anynan._diagnosis.evidence import ReplayError
from anynan._steps.tracked import Tracked
from anynan._trace.op import Observed, Observer, Op, RerunError
from anynan.arrays.again import Call
from anynan.arrays.live import LiveTape
from anynan.arrays.messages import PLAIN_ARRAY
from anynan.arrays.names import named, params
from anynan.arrays.session import ArraySession
from anynan.arrays.tape import Tape
from anynan.arrays.trackable import is_array
from anynan.arrays.tracked import TrackedArray, strip
from anynan.arrays.tracking import array_options
from anynan.errors import reason
from anynan.events import Phase, Source


def takes(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether it is a function of array code: it is given arrays, and none of a framework."""
    if not callable(target):
        return False
    return any(is_array(x) for _, x in leaves((args, dict(kwargs)), ""))


def observe(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], observer: Observer
) -> Observed:
    """Run a function of array code once, and show each operation.

    Args:
        target: The function.
        args: What it is called with; it works on copies of them.
        kwargs: By name.
        observer: Sees each operation, right after it ran. One that writes shows what it wrote to;
            another result for it is written there in its turn.

    Raises:
        TypeError: If the target is no function.
        ReplayError: If it takes from an iterator or a queue, which cannot be put back.

    Example:
        >>> import numpy
        >>> from anynan.arrays.observe import observe
        >>> seen = []
        >>> observed = observe(
        ...     lambda x: numpy.log(x) / 2, (numpy.ones(3),), {}, lambda op: seen.append(op.name)
        ... )
        >>> seen, observed.value.tolist()
        (['log', 'divide'], [0.0, 0.0, 0.0])
    """
    options = array_options({"action": "record", "level": "operation"})
    tracked = Tracked(target, options, getattr(target, "__name__", type(target).__name__))
    session = _Quiet(tracked)
    call = Call(target, mapped(args, _own), mapped(dict(kwargs), _own), copy_context())
    call.random = np.random.get_state()  # noqa: NPY002
    tape = call.context.copy().run(_Shown, session, observer)
    observed = Observed()
    try:
        observed.value, _ = call.again(session, tape)
    except ReplayError:
        raise
    except Exception as error:
        if error is tape.broken:
            raise
        observed.error = error
    if tape.outlets:
        where = ";".join(list(tape.outlets)[:3])
        observed.notes.append(PLAIN_ARRAY(where=where))
    observed.notes += dict.fromkeys(tape.notes)
    return observed


def _own(value: Any) -> Any:
    """Copy an array whole: the call may write into its arguments."""
    if not is_array(value):
        return value
    return value.copy() if hasattr(value, "copy") else value + 0


class _Quiet(ArraySession):
    """Run a call for what its operations are: nothing of it is judged."""

    def read_result(self, tape: Tape, result: Any) -> None:
        """Read nothing: operations alone are shown."""

    def read_state(self, tape: Tape, state: Any, result: Any, *, heard: bool) -> None:
        """Likewise."""


class ArrayOp(Op):
    """Tell of one operation of array code; its line is known while its observer sees it."""

    def __init__(
        self, number: int, name: str, raw: str, tape: Tape, function: Callable[..., Any],
        args: tuple[Any, ...], kwargs: dict[str, Any], results: Sequence[TrackedArray],
        before: Any, writes: TrackedArray | None,
    ) -> None:  # fmt: skip
        self.number, self.name, self.kernel, self.raw = number, name, name, raw
        self._tape, self._function, self._args, self._kwargs = tape, function, args, kwargs
        self._results, self._before, self._writes = results, before, writes
        self.written = writes is not None
        layer = context.scope_path()
        self.layer = None if layer == tape.base else layer
        self.frame: FrameType | None = sys._getframe(1)  # until the observer has seen it
        self.call = 0
        self.phase: Phase = "forward"

    @cached_property
    def source(self) -> Source | None:
        """Give the user's line."""
        like = type(self._results[0]._raw).__module__.partition(".")[0]
        return None if self.frame is None else user_source(self.frame, framework=like)

    @cached_property
    def inputs(self) -> Sequence[tuple[str, Any]]:
        """Give the arrays of fractions it works on, by name."""
        options = {key: x for key, x in self._kwargs.items() if key != "key"}
        return [
            (label, self._plain(x))
            for label, x in named(self.name, self._args, options)
            if _is_fraction(self._plain(x))
        ]

    @property
    def outputs(self) -> Sequence[Any]:
        """Give what it made."""
        return [x._raw for x in self._results]

    @cached_property
    def params(self) -> Mapping[str, Any]:
        """Give its plain arguments."""
        return params(self.name, self._args, self._kwargs)

    def rerun(
        self, inputs: Mapping[str, Any] | None = None, dtype: str | None = None
    ) -> Sequence[Any]:
        """Run it once more, and give what it makes then.

        Raises:
            RerunError: If it writes into an array, or cannot compute in that dtype.
        """
        if self._writes is not None:
            msg = f"{self.name} writes into an array that was there before"
            raise RerunError(msg)
        given = [(label, x) for label, x in named(self.name, self._args, self._kwargs)]
        new = {id(x): (inputs or {}).get(label, x) for label, x in given}

        def change(value: Any) -> Any:
            kind: Any = type(value)
            if kind in (list, tuple):
                return kind(map(change, value))
            value = self._plain(new.get(id(value), value))
            return value.astype(dtype) if dtype and _is_fraction(value) else value

        try:
            with np.errstate(all="ignore"):
                options = {key: change(x) for key, x in self._kwargs.items() if key != "out"}
                made = self._function(*map(change, self._args), **options)
        except Exception as error:
            raise RerunError(reason(error)) from error
        return list(made) if isinstance(made, tuple | list) else [made]

    def _plain(self, x: Any) -> Any:
        if self._writes is not None and x is self._writes and self._before is not None:
            return self._before
        return strip(x, [])


class _Shown(LiveTape):
    """Show each operation to an observer, and put what it returns in the results' place.

    Attributes:
        broken: What the observer raised, if it did.
    """

    def __init__(self, session: ArraySession, observer: Observer) -> None:
        super().__init__(session, None)
        self._observer, self._count = observer, 0
        self.broken: BaseException | None = None

    def look(
        self, name: str, raw: str, function: Callable[..., Any], args: tuple[Any, ...],
        kwargs: dict[str, Any], results: list[TrackedArray], *, clean: bool,
        before: Any = None, writes: TrackedArray | None = None,
    ) -> None:  # fmt: skip
        """Show one operation."""
        op = ArrayOp(
            self._count, name, self.named(raw, results[0]), self, function, args, kwargs, results,
            before, writes,
        )  # fmt: skip
        self._count += 1
        with context.replay_context():
            try:
                others = self._observer(op)
            except BaseException as error:
                self.broken = error
                raise
        op.frame = None
        if others is None:
            return
        for x, other in zip(results, others, strict=True):
            if x is writes:
                x._raw[...] = other
            else:
                x._raw = other

    def failed(self, what: str, error: Exception) -> None:
        """Let an observer's own error out: it is none of the program's."""
        raise error

    def read(self, layer: str | None, phase: Phase, tensor: str, x: TrackedArray) -> None:
        """Read nothing: operations alone are shown."""


def _is_fraction(x: Any) -> bool:
    if not is_array(x):
        return False
    kind = getattr(x.dtype, "kind", None)
    if kind is not None:
        return kind in "fcV" and math.prod(x.shape) >= 0
    return "float" in str(x.dtype) or "complex" in str(x.dtype)
