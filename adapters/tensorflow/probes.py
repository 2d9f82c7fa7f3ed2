"""Reduce a tensor to numbers that say whether it is finite, and measure it on the host."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from anynan.measuring import describe
from anynan.summary import Summary

# A row that nobody wrote: its ends are in the wrong order, as an empty array's are.
BLANK = (1.0, -1.0, 0.0)
# Times this, no sum of finite numbers overflows, and NaN and Inf stay what they are.
SMALL = 2.0**-70
_WIDE = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16")


def checkable(x: Any) -> bool:
    """Tell whether a value is a tensor that could hold a NaN or an Inf."""
    dtype = getattr(x, "dtype", None)
    if not isinstance(x, tf.Tensor) or not isinstance(dtype, tf.DType):
        return False
    return bool(dtype.is_floating or dtype.is_complex)


def dtype_max(dtype: Any) -> float:
    """Give the largest finite value of a float or complex dtype."""
    return float((dtype.real_dtype if dtype.is_complex else dtype).max)


def ends(x: Any, axes: dict[int, Any] | None = None, *, xla: bool = False) -> Any:
    """Give the smallest and the largest value, and half the sum of all squares.

    A sum of squares is NaN only where a value is, whatever overflows: it is there because a
    minimum and a maximum may lose a NaN. Where there is none they are right, and tell the Inf.

    Args:
        x: A float or complex tensor.
        axes: The axes of tensors of so many dimensions, kept to be used again in one graph.
        xla: Give a sum of squares for each column, which ``rows`` adds up: XLA adds up a row
            number by number, and columns side by side.
    """
    if x.dtype.is_complex:
        (low, high, one), (lower, higher, other) = (
            ends(part, axes, xla=xla) for part in (tf.math.real(x), tf.math.imag(x))
        )
        return tf.minimum(low, lower), tf.maximum(high, higher), one + other
    if x.dtype.name.startswith("float8"):
        x = tf.cast(x, tf.float32)  # few kernels take 8 bits
    rank = x.shape.rank
    if rank is None:
        x, rank = tf.reshape(x, [-1]), 1
    axes = {} if axes is None else axes
    for n in (rank, rank - 1):
        if n >= 0 and n not in axes:
            axes[n] = tf.range(n) if n else tf.zeros([0], tf.int32)
    wide = tf.cast(x, tf.float32) if x.dtype.name in _WIDE else x
    if xla and rank > 1 and x.shape[-1] is not None:
        squares = tf.raw_ops.Sum(input=tf.raw_ops.Square(x=wide), axis=axes[rank - 1])
    else:
        squares = tf.raw_ops.L2Loss(t=wide)
    low = tf.raw_ops.Min(input=x, axis=axes[rank])
    return low, tf.raw_ops.Max(input=x, axis=axes[rank]), squares


def rows(found: Sequence[tuple[Any, Any, Any]]) -> Any:
    """Put what ``ends`` gave for some tensors into one tensor, a row for each."""
    lows, highs, squares = zip(*found, strict=True)
    low = _together(lows, tf.stack)
    high = _together(highs, tf.stack)
    return tf.stack([low, high, _together(squares, _total)], axis=1)


def _together(values: Sequence[Any], join: Callable[[list[Any]], Any]) -> Any:
    """Join values of the same dtype and shape at once, and keep their order."""
    alike: dict[Any, list[int]] = {}
    for i, value in enumerate(values):
        alike.setdefault((value.dtype, tuple(value.shape)), []).append(i)
    joined = [tf.cast(join([values[i] for i in held]), tf.float64) for held in alike.values()]
    if len(joined) == 1:
        return joined[0]
    order = np.argsort([i for held in alike.values() for i in held])
    return tf.gather(tf.concat(joined, 0), order)


def _total(values: list[Any]) -> Any:
    stacked = tf.stack(values)
    return tf.reduce_sum(stacked, axis=1) / 2 if stacked.shape.rank > 1 else stacked


def read(values: Any) -> list[tuple[float, float]]:
    """Turn rows into the two ends of each reading, the first the larger if there is none."""
    low_high = np.where(np.isnan(values).any(axis=1, keepdims=True), math.nan, values[:, :2])
    return list(map(tuple, low_high.tolist()))


def norm(row: Any) -> float:
    """Turn a row into the L2 norm."""
    return math.sqrt(2 * row[2])


def all_fine(found: Sequence[tuple[Any, Any, Any]]) -> Any:
    """Tell, as a tensor, whether everything that ``ends`` read is finite."""
    low, high, squares = tf.unstack(rows(found), axis=1)
    bad = tf.math.is_nan(squares) | tf.equal(low, -math.inf) | tf.equal(high, math.inf)
    return tf.logical_not(tf.reduce_any(bad))


def fine(x: Any) -> Any:
    """Tell, as a tensor, whether everything in a tensor is finite."""
    if x.dtype.is_complex:
        return tf.logical_and(fine(tf.math.real(x)), fine(tf.math.imag(x)))
    wide = tf.cast(x, tf.float32) if x.dtype.name in _WIDE else x
    return tf.math.is_finite(tf.reduce_sum(wide * SMALL))


def on_host(x: Any) -> np.ndarray[Any, Any]:
    """Bring a tensor to the host."""
    return np.asarray(x.numpy() if hasattr(x, "numpy") else x)


def device_name(x: Any) -> str:
    """Name the device: ``cpu``, ``gpu:0``."""
    device = getattr(x, "device", None)
    if not isinstance(device, str) or not device:
        return "cpu"
    kind, _, number = device.rpartition("device:")[2].lower().partition(":")
    return "cpu" if kind == "cpu" else f"{kind}:{number}"


def measure(x: Any) -> Summary:
    """Summarise a tensor on the host."""
    return dataclasses.replace(describe(on_host(x)), device=device_name(x))


def is_bad(x: Any) -> bool:
    """Tell whether a host array holds a NaN or an Inf."""
    return bool(x.size) and not bool(np.isfinite(_plain(x)).all())


def kind(x: Any) -> Any:
    """Name the worst that a host array holds, None if all of it is finite."""
    x = _plain(x)
    if np.isnan(x).any():
        return "nan"
    if np.iscomplexobj(x):
        return "posinf" if np.isinf(x).any() else None
    return "posinf" if (x == np.inf).any() else "neginf" if (x == -np.inf).any() else None


def bad_rows(x: Any) -> tuple[int, ...]:
    """List the rows of a batch that hold a NaN or an Inf."""
    if x is None or not np.ndim(on_host(x)):
        return ()
    bad = ~np.isfinite(_plain(on_host(x)))
    return tuple(np.flatnonzero(bad.reshape(len(bad), -1).any(1)).tolist())


def _plain(x: Any) -> Any:
    if not isinstance(x, np.ndarray):
        x = np.asarray(x)
    # bfloat16 and smaller are no floats to NumPy.
    return x if np.issubdtype(x.dtype, np.inexact) else x.astype(np.float32)
