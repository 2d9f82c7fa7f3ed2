"""Every operation of one call of array code, shown as it runs; the call leaves no trace."""

from collections.abc import Callable, Mapping
from contextvars import copy_context
from typing import Any

import numpy as np

from anynan._arrays.access import namespace, to_host
from anynan._arrays.containers import leaves, mapped
from anynan._base import context
from anynan._diagnosis.evidence import ReplayError
from anynan._steps.tracked import Tracked
from anynan._trace.op import Observed, Observer
from anynan._trace.target import Target
from anynan.arrays.again import Call
from anynan.arrays.messages import PLAIN_ARRAY
from anynan.arrays.operations import ArrayOp
from anynan.arrays.refusals import explain
from anynan.arrays.session import ArraySession
from anynan.arrays.tape import Tape
from anynan.arrays.trackable import is_array
from anynan.arrays.tracked import TrackedArray
from anynan.arrays.tracking import array_options
from anynan.events import Phase


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
        explain(error)
        observed.error = error
    if tape.outlets:
        where = ";".join(list(tape.outlets)[:3])
        observed.notes.append(PLAIN_ARRAY(where=where))
    observed.notes += dict.fromkeys(tape.notes)
    return observed


class ArrayTarget(Target):
    """Reach the numbers of arrays of any library."""

    takes, shows = staticmethod(takes), staticmethod(observe)

    def is_array(self, x: Any) -> bool:
        """Tell whether a value is an array of numbers."""
        return is_array(x)

    def host(self, x: Any) -> np.ndarray[Any, Any]:
        """Bring an array to the host."""
        found = x if type(x) is np.ndarray else np.asarray(to_host(x))
        return found.astype(np.float32) if found.dtype.kind == "V" else found

    def like(self, numbers: np.ndarray[Any, Any], x: Any) -> Any:
        """Make an array of the same library."""
        if not isinstance(x, np.ndarray | np.generic):
            return namespace(x).asarray(numbers, dtype=x.dtype)
        with np.errstate(all="ignore"):
            return numbers.astype(x.dtype)

    def cast(self, x: Any, dtype: str) -> Any:
        """Cast an array.

        Raises:
            ValueError: If NumPy does not know the dtype.
        """
        try:
            return x.astype(dtype)
        except TypeError as error:
            msg = f"NumPy does not know {dtype}: import ml_dtypes, which tells it, and run again"
            raise ValueError(msg) from error


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


class _Shown(Tape):
    """Show each operation to an observer, and put what it returns in the results' place.

    Attributes:
        broken: What the observer raised, if it did.
    """

    def __init__(self, session: ArraySession, observer: Observer) -> None:
        super().__init__(session, None)
        self._observer, self._count = observer, 0
        self.broken: BaseException | None = None

    def look(
        self, results: list[TrackedArray], show: Callable[[], ArrayOp], *, clean: bool,
        writes: TrackedArray | None,
    ) -> None:  # fmt: skip
        """Show one operation."""
        op = show()
        op.number, self._count = self._count, self._count + 1
        with context.replay_context():
            try:
                others = self._observer(op)
            except BaseException as error:
                self.broken = error
                raise
        op.over()
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
