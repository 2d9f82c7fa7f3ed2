"""Reduce an array to its ends, lazily, and measure it on the host."""

import math
from typing import Any

import mlx.core as mx
import numpy as np

from anynan.arrays import records

EVALUATE = mx.eval  # as it is while nothing is tracked
_NARROW = (mx.float16, mx.bfloat16)


def is_float(x: Any) -> bool:
    """Tell whether a value is an array that could hold a NaN or an Inf."""
    return isinstance(x, mx.array) and mx.issubdtype(x.dtype, mx.inexact)


def dtype(x: Any) -> tuple[str, float]:
    """Give the short name of a floating dtype, and its largest finite value."""
    name = str(x.dtype).rpartition(".")[2]
    return name, float(mx.finfo(mx.float32 if name == "complex64" else x.dtype).max)


def ends(x: Any) -> tuple[Any, Any]:
    """Give the smallest and the largest value as arrays that are not computed yet.

    A NaN among the values is both: MLX's ``min`` and ``max`` let it pass. What is read so is as
    large as two numbers, and no copy of ``x`` is made. A complex array gives the ends of its parts.
    """
    if x.dtype == mx.complex64:
        parts = mx.real(x), mx.imag(x)
        return mx.minimum(*map(mx.min, parts)), mx.maximum(*map(mx.max, parts))
    return mx.min(x), mx.max(x)


def squares(x: Any) -> Any:
    """Give the sum of an array's squares, not computed yet; in float32 at least."""
    flat = x.astype(mx.float32).reshape(-1) if x.dtype in _NARROW else x.reshape(-1)
    if x.dtype == mx.complex64:
        return mx.real(mx.inner(flat, mx.conj(flat)))
    return mx.inner(flat, flat)


def span_of(low: Any, high: Any) -> tuple[float, float]:
    """Bring two ends to the host."""
    lo, hi = float(low.item()), float(high.item())
    return (math.nan, math.nan) if lo != lo or hi != hi else (lo, hi)


class Reader:
    """Read MLX's arrays now."""

    measure = staticmethod(records.measure)

    def is_finite(self, x: Any, /) -> bool:
        """Tell whether an array is finite."""
        return not is_float(x) or not x.size or bool(mx.isfinite(x).all().item())

    def span(self, x: Any, /) -> tuple[float, float] | None:
        """Give the smallest and the largest value; None where there is none, as in ``mx.vmap``."""
        try:
            return span_of(*ends(x)) if is_float(x) and x.size else None
        except (RuntimeError, ValueError):
            return None

    def on_host(self, x: Any, /) -> np.ndarray[Any, Any]:
        """Bring an array to the host, in a dtype that NumPy has."""
        return np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x)


READER = Reader()
