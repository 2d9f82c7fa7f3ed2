"""``track``, ``check`` and ``errstate``: the public entry points."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Self, Unpack, overload

import cupy

import anynan
from anynan._base.notices import warn
from anynan._readings.policy import Policy
from anynan._reports.report import render
from anynan._steps.tracked import Tracked
from anynan.arrays.deferred import DeferredTape, StandardSlots
from anynan.arrays.namespaces import recording
from anynan.arrays.session import ArraySession
from anynan.arrays.tape import now
from anynan.arrays.trackable import unwrap
from anynan.arrays.tracked import TrackedArray
from anynan.arrays.tracking import start
from anynan.errors import NonFiniteError
from anynan.events import Event
from anynan.options import Options, TrackOptions
from anynan.tracker import Tracker, begin


class CupyArray(TrackedArray):
    """Stand for a CuPy array: CuPy looks for these two methods in what its kernels are given."""

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

        given = {"axis": axis, "keepdims": keepdims}
        return self._tape.operate(name, reduce, (self,), given, writes=out)


class CupySlots(StandardSlots):
    """Keep the flags of one call on the device of each array."""

    def put(self, raw: Any) -> int | None:
        """Reduce an array on its own device, whichever is the current one."""
        with raw.device if isinstance(raw, cupy.ndarray) else nullcontext():
            return super().put(raw)

    def numbers(self, flags: list[Any]) -> Any:
        """Read the flags of one device, after every stream that wrote some."""
        with flags[0].device as device:
            device.synchronize()
            return super().numbers(flags)


class CupySession(ArraySession):
    """Watch a function of CuPy arrays: flags stay on the device until the call ends."""

    backend = "cupy"
    wrapper = CupyArray
    slots = CupySlots


@overload
def track(**options: Unpack[TrackOptions]) -> Callable[[Any], Tracker]: ...
@overload
def track(target: Callable[..., Any], **options: Unpack[TrackOptions]) -> Tracker: ...
@Options.shown
def track(target: Any = ..., **options: Unpack[TrackOptions]) -> Any:
    """Watch a function of CuPy arrays: every operation on its arguments, until ``remove``.

    Operators, methods, ufuncs and reductions are recorded as they are; for other functions of
    CuPy's (``matmul``, ``linalg``, ``fft``) write ``xp = anynan.arrays.namespace(cupy)``.
    Gradients written by hand are operations too: put them into an ``anynan.scope("backward")``.
    Target, options and errors are those of ``anynan.track``.
    """
    return start(target, options, CupySession)


def check(**arrays: Any) -> None:
    """Check CuPy arrays, given by name, with one read, and raise at the first that is bad.

    Raises:
        NonFiniteError: If one of them holds a NaN or an Inf.
        TypeError: If one of them is no CuPy array.
    """
    for name, x in arrays.items():
        if not isinstance(x, cupy.ndarray):
            msg = f"check({name}=...) takes CuPy arrays, not {type(x).__name__}: anynan.check(x)"
            raise TypeError(msg)
    slots = CupySlots()
    places = [slots.put(x) for x in arrays.values()]
    spans = slots.read()
    for (name, x), place in zip(arrays.items(), places, strict=True):
        if place is not None and not all(map(math.isfinite, spans[place])):
            anynan.check(x, name)


class errstate:  # noqa: N801  as NumPy names it
    """Raise or warn when an operation inside makes NaN or Inf, as ``numpy.errstate`` does.

    ``as watch`` gives a function that puts arrays under watch; everything computed with them is
    read once, at the end. ``nan`` and ``inf``, of both signs, are ``"raise"``, ``"warn"`` or
    ``"ignore"``.

    Raises:
        ValueError: If a word is unknown.
    """

    session_type: type[ArraySession] = CupySession
    xp = recording(cupy)  # CuPy's functions, recorded
    plain = staticmethod(unwrap)  # gives plain CuPy arrays for watched ones, in containers too

    def __init__(self, nan: str = "raise", inf: str = "warn") -> None:
        for name, word in (("nan", nan), ("inf", inf)):
            if word not in ("raise", "warn", "ignore"):
                msg = f"errstate({name}={word!r}): choose from raise, warn, ignore"
                raise ValueError(msg)
        self._words = {"nan": nan, "posinf": inf, "neginf": inf}
        levels: Any = {k: "ignore" if w == "ignore" else "bad" for k, w in self._words.items()}
        self._options = Options(policy=Policy(**levels), action=self._act)
        self._tape: DeferredTape | None = None

    def __enter__(self) -> Self:
        tracker = Tracked(unwrap, self._options, "errstate")
        self._session = self.session_type(tracker)
        begin(tracker, self._session)
        self._tape = DeferredTape(self._session, tracker.judge.rows())
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

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        now.reset(self._token)
        tape, self._tape = self._tape, None
        if tape is None or tape.rows is None:
            return
        # Nothing says which values are results: every one is.
        for index, node in enumerate(tape.nodes):
            if node.name and node.slot is not None:
                tape.arrive(index)
        tape.close()
        with tape.session.tracker.judge.softly(on=kind is not None):
            self._session.end(tape, tape.rows, None)

    def _act(self, event: Event) -> None:
        if self._words.get(event.kind) == "raise":
            raise NonFiniteError(render(event), event)
        warn(render(event))
