"""What an operation was given, element by element: shared by all records of bad results."""

import cmath
import math
from dataclasses import replace
from typing import Any

import numpy as np

from anynan._arrays.access import BLOCK, device_name, dtype_name, type_name
from anynan._arrays.probe import probe
from anynan._base.summary import Summary
from anynan._diagnosis.lineage import Operand

# What a constant is called that has no name of its own.
VALUE = "value"


def constant(label: str, number: complex) -> Operand:
    """Describe a Python number as an operand."""
    finite = isinstance(number, int) or cmath.isfinite(number)  # an int may be beyond a float
    real = None if isinstance(number, complex) else float(number)
    summary = Summary(
        (), type_name(number), "host", 1,
        nan=int(number != number),
        posinf=int(real == math.inf or (real is None and not finite and number == number)),
        neginf=int(real == -math.inf),
        zero=int(number == 0),
        min=real if finite else None, max=real if finite else None,
        absmax=abs(number) if finite else None,
        mean=real if finite else None, rms=abs(number) if finite else None,
        first_bad=None if finite else (),
    )  # fmt: skip
    value = number if isinstance(number, complex) else float(number)
    return Operand(label, summary, value, source=None if finite else "constant", label=VALUE)


def at(array: Any, index: tuple[int, ...] | None) -> float | complex | None:
    """Read one element of an array of any library; None without an index, or if it will not."""
    if index is None:
        return None
    try:
        found = array[index] if index else array
        number = found.item() if hasattr(found, "item") else found
        try:
            return number if isinstance(number, complex) else float(number)
        except TypeError:  # a complex number of a library's own
            return complex(number)
    except Exception:  # noqa: BLE001  only a number for the report is lost
        return None


def at_broadcast(
    array: Any, index: tuple[int, ...] | None, shape: tuple[int, ...]
) -> float | complex | None:
    """Read the element that met the result's first bad one, where shapes broadcast.

    Args:
        array: An operand.
        index: The element of the result.
        shape: The shape of the result.
    """
    own = tuple(np.shape(array))
    if index is None or len(own) > len(shape) or 0 in own:
        return None
    start = len(shape) - len(own)
    if any(size not in (1, whole) for size, whole in zip(own, shape[start:], strict=True)):
        return None
    return at(array, tuple(0 if size == 1 else index[start + i] for i, size in enumerate(own)))


def blank(x: Any) -> Summary:
    """Summarise an array without a look at its elements."""
    shape = tuple(np.shape(x))
    size = 0 if any(length != length for length in shape) else math.prod(shape)
    return Summary(shape, dtype_name(x), device_name(x), size)


def light(x: Any) -> Summary:
    """Summarise by flags only: which kinds are there, not how many."""
    known = blank(x)
    try:
        span = probe(x)
    except Exception:  # noqa: BLE001  it is told where it is read
        return known
    return known if span is None else flagged(known, *span)


def flagged(blank: Summary, lo: float, hi: float) -> Summary:
    """Add to a summary what an array's two ends tell."""
    finite = math.isfinite(lo) and math.isfinite(hi)
    return Summary(
        blank.shape, blank.dtype, blank.device, blank.size,
        nan=int(lo != lo),
        posinf=int(hi == math.inf),
        neginf=int(lo == -math.inf),
        min=lo if math.isfinite(lo) else None,
        max=hi if math.isfinite(hi) else None,
        absmax=max(abs(lo), abs(hi)) if finite else None,
    )  # fmt: skip


def at_first_nan(summary: Summary, view: np.ndarray | None) -> Summary:
    """Point a summary at its first NaN where it holds an Inf before that.

    The NaN is what a report explains.

    Args:
        summary: Of the array.
        view: The array in host memory, None where there is none.
    """
    if view is None or not view.ndim or not (summary.nan and summary.posinf + summary.neginf):
        return summary
    flat = view.reshape(-1) if view.flags.c_contiguous else view.ravel()
    for start in range(0, flat.size, BLOCK):
        bad = flat[start : start + BLOCK] != flat[start : start + BLOCK]
        if bad.any():
            index = np.unravel_index(start + int(bad.argmax()), view.shape)
            return replace(summary, first_bad=tuple(int(i) for i in index))
    return summary
