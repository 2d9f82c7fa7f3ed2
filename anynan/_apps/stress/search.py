"""Steps towards an edge, along the slope of the distance from it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from anynan._apps.stress.inputs import Array, Input

STEPS = 24
STILL = 4  # steps without a gain, each half as long, after which it does not move
# How far outside of the range a search may go, in widths.
FAR = (10.0, 1e3, 1e5)
_HALVINGS = 8


@dataclass(slots=True)
class Step:
    """Hold what a run on some inputs came to.

    Attributes:
        distance: From the edge that is sought; None where it was not met.
        slopes: Of each input.
        bad: Whether something went bad.
    """

    distance: float | None
    slopes: Sequence[Array | None]
    bad: bool


Look = Callable[[tuple[Array, ...]], Step]


def towards(inputs: Sequence[Input], first: Step, look: Look) -> Iterator[tuple[Array, ...]]:
    """Seek inputs at which something goes bad: within the range first, then outside of it.

    Args:
        inputs: What may change.
        first: What the example itself came to.
        look: Runs the program on such inputs.

    Yields:
        Inputs at which something went bad. The caller takes the first that holds.
    """
    start = tuple(item.example for item in inputs)
    for far in (0.0, *FAR):
        ends = [_ends(item, far) for item in inputs]
        found = _descend(inputs, ends, start, first, look, max(1.0, far))
        if found is not None:
            yield found
        if not any(slope is not None and np.any(slope) for slope in first.slopes):
            return
        if all(item.given for item in inputs if item.fractions):
            return


def _ends(item: Input, far: float) -> tuple[Array, Array]:
    """Give the bounds of a search."""
    if item.given or not far or not item.fractions:
        return np.asarray(item.low), np.asarray(item.high)
    top = float(np.finfo(item.example.dtype).max) / 4
    low, high = item.low - far * item.width, item.high + far * item.width
    return np.clip(low, -top, top), np.clip(high, -top, top)


def _descend(
    inputs: Sequence[Input], ends: Sequence[tuple[Array, Array]], start: tuple[Array, ...],
    first: Step, look: Look, length: float,
) -> tuple[Array, ...] | None:  # fmt: skip
    """Go down the slope in steps that are halved where they lead nowhere."""
    at, now, still = start, first, 0
    for _ in range(STEPS):
        if now.distance is None or still > STILL:
            return None
        moved = tuple(
            _moved(item, x, slope, length, *bounds)
            for item, x, slope, bounds in zip(inputs, at, now.slopes, ends, strict=True)
        )
        if all(x is y for x, y in zip(moved, at, strict=True)):
            return None
        then = look(moved)
        if then.bad:
            return moved
        if then.distance is not None and then.distance < now.distance * (1 - 1e-3):
            at, now, still, length = moved, then, 0, length * 2
        else:
            still, length = still + 1, length / 4
    return None


def _moved(
    item: Input, x: Array, slope: Array | None, length: float, low: Array, high: Array
) -> Array:
    if slope is None or not item.fractions or not np.any(slope):
        return x
    with np.errstate(all="ignore"):
        far = x - length * item.width * np.sign(slope)
    # What the slope does not touch stays as it is.
    moved = np.where(slope != 0, np.clip(far, low, high), x).astype(x.dtype)
    return x if np.array_equal(moved, x) else moved


def nearer(
    inputs: Sequence[Input], found: tuple[Array, ...], is_bad: Callable[[tuple[Array, ...]], bool]
) -> Iterator[tuple[Array, ...]]:
    """Bring inputs at which something goes bad nearer to the example.

    Yields:
        Those that went bad, the nearest first. Right at an edge a kernel may round otherwise when
        it runs again, so the caller takes the first that holds.
    """
    low, high, bad = 0.0, 1.0, [found]
    for _ in range(_HALVINGS):
        part = (low + high) / 2
        between = tuple(
            (item.example + part * (x.astype(np.float64) - item.example)).astype(x.dtype)
            if item.fractions
            else x
            for item, x in zip(inputs, found, strict=True)
        )
        if is_bad(between):
            high = part
            bad.append(between)
        else:
            low = part
    yield from reversed(bad)
