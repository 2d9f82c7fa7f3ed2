"""Turn many tensors into rows of numbers that say whether they are finite, and how large.

A row is the smallest value, the largest value and half the sum of all squares. Where the first is
above the second nobody wrote it (the sum is 0, as it is for an empty tensor), or the tensor is
finite and nobody asked how large it is.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from anynan.tensorflow.read.probes import SMALL, wide

# What XLA adds before it sums, and what it multiplies with, to be kept in a variable. As constants
# of the graph they would be joined with those of the user, so that an overflow in ``x * 1e30``
# were gone; and two factors are joined in any case: the zero keeps them apart.
SCALE = (0.0, SMALL)
# A row that nobody wrote, and one of a finite tensor.
BLANK = (1.0, -1.0, 0.0)
FINE = (1.0, -1.0, 1.0)
# Vectors up to this size are summed together under XLA: each sum of its own costs more.
SIDE_BY_SIDE = 4096


def exact(tensors: Sequence[Any], *, xla: bool = False) -> Any:
    """Read how large the values are.

    A sum of squares is NaN only where a value is, whatever overflows: it is there because a
    minimum and a maximum may lose a NaN. Where there is none they are right, and tell the Inf.

    Args:
        tensors: Float or complex tensors.
        xla: True where XLA compiles the graph.

    Returns:
        (tensors, 3): a row for each.
    """
    axes: dict[int, Any] = {}
    lows, highs, squares = zip(*(_ends(x, axes, xla=xla) for x in tensors), strict=True)
    low = _together(lows, tf.stack)
    high = _together(highs, tf.stack)
    return tf.stack([low, high, _together(squares, _halves)], axis=1)


def scaled(tensors: Sequence[Any], scale: Any) -> Any:
    """Read in a graph that XLA compiles which tensors are finite: one sum of each.

    It adds up in the pass in which it makes the values. They are scaled, so that no sum of finite
    ones overflows; Infs of both signs add up to NaN. How large the values are is not read.

    Args:
        tensors: Float or complex tensors.
        scale: ``SCALE``, from a variable.

    Returns:
        (tensors, 3): a row for each.
    """
    axes: dict[int, Any] = {}
    sums = _together([_sum(x, axes, scale) for x in tensors], _totals)
    return _known(sums, np.array([_single(x) for x in tensors]))


def _axes(axes: dict[int, Any], count: int) -> Any:
    if count not in axes:
        axes[count] = tf.range(count) if count else tf.zeros([0], tf.int32)
    return axes[count]


def _ranked(x: Any) -> tuple[Any, int]:
    rank = x.shape.rank
    return (tf.reshape(x, [-1]), 1) if rank is None else (x, rank)


def _ends(x: Any, axes: dict[int, Any], *, xla: bool) -> tuple[Any, Any, Any]:
    """Give the smallest and the largest value, and half the sum of all squares."""
    if x.dtype.is_complex:
        (low, high, one), (lower, higher, other) = (
            _ends(part, axes, xla=xla) for part in (tf.math.real(x), tf.math.imag(x))
        )
        return tf.minimum(low, lower), tf.maximum(high, higher), one + other
    if x.dtype.name.startswith("float8"):
        x = wide(x)
    x, rank = _ranked(x)
    if _columns(x, rank, xla=xla):
        squares = tf.raw_ops.Sum(input=tf.raw_ops.Square(x=wide(x)), axis=_axes(axes, rank - 1))
    else:
        squares = tf.raw_ops.L2Loss(t=wide(x))
    low = tf.raw_ops.Min(input=x, axis=_axes(axes, rank))
    return low, tf.raw_ops.Max(input=x, axis=_axes(axes, rank)), squares


def _columns(x: Any, rank: int, *, xla: bool) -> bool:
    """Tell whether to sum each column: XLA adds up a row one by one, and columns side by side."""
    return xla and rank > 1 and x.shape[-1] is not None


def _single(x: Any) -> bool:
    return x.shape.num_elements() == 1 and not x.dtype.is_complex


def _sum(x: Any, axes: dict[int, Any], scale: Any) -> Any:
    """Sum each column of a tensor; one number alone, and a short vector, is given as it is."""
    if x.dtype.is_complex:
        x = tf.math.real(x) + tf.math.imag(x)
    if _single(x):
        return tf.reshape(wide(x), [])
    x, rank = _ranked(wide(x))
    zero, factor = tf.unstack(tf.cast(scale, x.dtype))
    x = (x + zero) * factor
    if rank == 1 and 0 < (x.shape[0] or 0) <= SIDE_BY_SIDE:
        return x  # summed together with the others
    left = rank - 1 if _columns(x, rank, xla=True) else rank
    return tf.raw_ops.Sum(input=x, axis=_axes(axes, left))


def _known(sums: Any, single: Any) -> Any:
    """Make rows of sums: of what is finite one number alone is known."""
    said = tf.logical_or(tf.constant(single), tf.logical_not(tf.math.is_finite(sums)))
    told = (sums, sums, sums * sums / 2)
    columns = [
        tf.where(said, x, tf.constant(y, tf.float64)) for x, y in zip(told, FINE, strict=True)
    ]
    return tf.stack(columns, 1)


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


def _totals(values: list[Any]) -> Any:
    stacked = tf.stack(values)
    return tf.reduce_sum(stacked, axis=1) if stacked.shape.rank > 1 else stacked


def _halves(squares: list[Any]) -> Any:
    # Those of columns are whole; an L2 loss is halved already.
    return _totals(squares) / 2 if squares[0].shape.rank else _totals(squares)


def read(values: Any) -> tuple[Any, Any, Any]:
    """Turn rows into the two ends of each, and tell which were written.

    Returns:
        Three arrays: the smallest value, the largest, above it where it is not known how large
        they are, and whether there is a reading.
    """
    low, high, squares = values.T
    nan = np.isnan(squares)
    if nan.any():
        low, high = np.where(nan, math.nan, low), np.where(nan, math.nan, high)
    return low, high, (low <= high) | (squares != 0)


def norm(row: Any) -> float:
    """Turn a row into the L2 norm."""
    return math.sqrt(2 * row[2])


def all_fine(rows: Any) -> Any:
    """Tell, as a tensor, whether everything that was read is finite."""
    low, high, squares = tf.unstack(rows, axis=1)
    bad = tf.math.is_nan(squares) | tf.equal(low, -math.inf) | tf.equal(high, math.inf)
    return tf.logical_not(tf.reduce_any(bad))
