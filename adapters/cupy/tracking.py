"""``track``, ``check`` and ``errstate``: the public doors."""

import functools
import math
from collections.abc import Callable
from typing import Any, Self, Unpack, overload

import cupy

import anynan
from anynan._base.notices import warn
from anynan._readings.policy import Policy
from anynan._reports.report import render
from anynan._steps.tracked import Tracked
from anynan.arrays.lazy import LazyTape, Slots
from anynan.arrays.namespaces import Namespace, recording
from anynan.arrays.session import ArraySession
from anynan.arrays.tape import now
from anynan.arrays.trackable import unwrap
from anynan.arrays.tracked import TrackedArray
from anynan.arrays.tracking import array_options, start
from anynan.cupy.slots import DeviceSlots
from anynan.errors import NonFiniteError
from anynan.events import Event
from anynan.options import Options, TrackOptions
from anynan.tracker import Tracker, begin

WORDS = ("raise", "warn", "ignore")


class CupyArray(TrackedArray):
    """Stand for a CuPy array: CuPy's own ufuncs and reductions hand their work to it.

    The two hooks are those that ``cupyx.distributed.array`` is built on; ``cupy.ufunc``,
    ``ElementwiseKernel`` and the built-in reductions look for them in every argument.
    """

    __slots__ = ()

    def __cupy_override_elementwise_kernel__(self, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a ufunc or an elementwise kernel under record."""
        name = str(getattr(kernel, "name", "elementwise")).removeprefix("cupy_")
        return self._tape.operate(name, kernel, args, kwargs, writes=kwargs.get("out"))

    def __cupy_override_reduction_kernel__(
        self, kernel: Any, axis: Any, dtype: Any, out: Any, keepdims: bool
    ) -> Any:
        """Run a built-in reduction under record."""
        name = str(getattr(kernel, "name", "reduction")).removeprefix("cupy_")

        def reduce(x: Any, *, axis: Any, keepdims: bool) -> Any:
            plain = out._raw if isinstance(out, TrackedArray) else out
            return kernel(x, axis, dtype, plain, keepdims)

        options = {"axis": axis, "keepdims": keepdims}
        return self._tape.operate(name, reduce, (self,), options, writes=out)


class CupySession(ArraySession):
    """Watch a function of CuPy arrays: flags stay on the device until the call ends."""

    backend = "cupy"
    wrapper = CupyArray

    def new_slots(self) -> Slots:
        """Make room for the flags of one call."""
        return DeviceSlots()

    def snapshot(self, raw: Any) -> Any:
        """Copy nothing: device memory is the user's."""
        return None

    def is_near(self, raw: Any) -> bool:
        """Tell that a look at a CuPy array is a wait for its device."""
        return not isinstance(raw, cupy.ndarray) and super().is_near(raw)


@overload
def track(**options: Unpack[TrackOptions]) -> Callable[[Any], Tracker]: ...
@overload
def track(target: Callable[..., Any], **options: Unpack[TrackOptions]) -> Tracker: ...
@Options.shown
def track(target: Any = ..., **options: Unpack[TrackOptions]) -> Any:
    """Watch a function of CuPy arrays: every operation on its arguments, until ``remove``.

    Each result is reduced to two numbers on its device, on the current stream, into memory that
    was taken beforehand; they are read once, when the call ends. Operators, methods, ufuncs and
    reductions are recorded as they are; for other functions of CuPy's (``matmul``, ``linalg``,
    ``fft``, ``concatenate``) write ``xp = anynan.arrays.namespace(cupy)``.
    Gradients written by hand are operations too: put them into an ``anynan.scope("backward")``.

    Args:
        target: A function; leave it out to decorate.
        **options: Those of ``anynan.track``.

    Returns:
        A Tracker that is called in the function's place, or a decorator that makes one.

    Raises:
        TypeError: If the target is no function, or an option is of the wrong type or unknown.
        ValueError: If an option has an impossible value, or one that array code cannot serve.

    Example:
        >>> import anynan
        >>> @anynan.cupy.track(action="warn")
        ... def step(x):
        ...     return (x * x).sum()
        >>> step.__name__
        'step'
    """
    chosen = array_options(options)
    if target is ...:
        return functools.partial(start, options=chosen, session=CupySession)
    return start(target, chosen, CupySession)


def check(**arrays: Any) -> None:
    """Look at several arrays with one read, and raise at the first that is bad.

    Args:
        **arrays: CuPy arrays by name.

    Raises:
        NonFiniteError: If one of them holds a NaN or an Inf.
        TypeError: If one of them is no CuPy array.

    Example:
        >>> import anynan
        >>> anynan.cupy.check()
    """
    slots, taken = DeviceSlots(), {}
    for name, x in arrays.items():
        if not isinstance(x, cupy.ndarray):
            msg = f"check({name}=...) takes CuPy arrays, not {type(x).__name__}: anynan.check(x)"
            raise TypeError(msg)
        taken[name] = slots.put(x)
    spans = slots.read() if any(slot is not None for slot in taken.values()) else []
    for name, slot in taken.items():
        if slot is not None and not all(map(math.isfinite, spans[slot])):
            anynan.check(arrays[name], name)


class errstate:  # noqa: N801  as NumPy names it
    """Raise or warn when an operation inside makes NaN or Inf, as ``numpy.errstate`` does.

    What enters the context gives arrays a watch; the flags of all that is computed with them are
    read once, at the end.

    Args:
        nan: ``"raise"``, ``"warn"`` or ``"ignore"``.
        inf: Likewise, for both signs.

    Raises:
        ValueError: If a word is unknown.

    Example:
        >>> import anynan
        >>> state = anynan.cupy.errstate(nan="raise", inf="warn")
        >>> # with state as watch:
        >>> #     x, y = watch(x, y)
        >>> #     loss = cupy.log(x / y).sum()
    """

    session_type: type[ArraySession] = CupySession

    def __init__(self, nan: str = "raise", inf: str = "warn") -> None:
        for name, word in (("nan", nan), ("inf", inf)):
            if word not in WORDS:
                msg = f"errstate({name}={word!r}): choose from {', '.join(WORDS)}"
                raise ValueError(msg)
        self._words = {"nan": nan, "posinf": inf, "neginf": inf}
        levels: Any = {k: "ignore" if w == "ignore" else "bad" for k, w in self._words.items()}
        self._options = Options(policy=Policy(**levels), action=self._act)
        self._tape: LazyTape | None = None

    def __enter__(self) -> Self:
        tracker = Tracked(_nothing, self._options, "errstate")
        session = self.session_type(tracker)
        begin(tracker, session)
        self._tape = LazyTape(session, tracker.judge.rows())
        self._token = now.set(self._tape)
        return self

    def __call__(self, *arrays: Any) -> Any:
        """Put arrays under watch; give them back in the same order."""
        tape = self._tape
        if tape is None:
            msg = "errstate is entered first: with anynan.cupy.errstate(...) as watch: ..."
            raise RuntimeError(msg)
        found = tuple(tape.add_input(x, f"arrays[{i}]") for i, x in enumerate(arrays))
        return found[0] if len(found) == 1 else found

    @property
    def xp(self) -> Namespace:
        """Give CuPy's functions, recorded."""
        return recording(cupy)

    def plain(self, value: Any) -> Any:
        """Give plain CuPy arrays for watched ones, in containers too."""
        return unwrap(value)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        tape, self._tape = self._tape, None
        now.reset(self._token)
        if tape is None:
            return
        session, rows = tape.session, tape.rows
        assert rows is not None
        # Nothing says which values are results: every one is.
        for index, node in enumerate(tape.nodes):
            if node.name and node.slot is not None:
                tape.arrive(index)
        tape.close()
        with session.tracker.judge.softly(on=kind is not None):
            session.end(tape, rows, None, (), {})

    def _act(self, event: Event) -> None:
        if self._words.get(event.kind) == "raise":
            raise NonFiniteError(render(event), event)
        warn(render(event))


def _nothing() -> None:
    """Stand for the block of code."""
