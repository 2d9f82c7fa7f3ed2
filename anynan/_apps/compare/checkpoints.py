"""Compare two files of weights, tensor by tensor, without holding either."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anynan._files.formats import FORMATS, PAIRS, format_of
from anynan._files.reader import reader
from anynan._files.tally import Bits
from anynan._files.tensors import Tensor, UnreadableError

_PART = 1 << 16  # numbers


@dataclass(frozen=True, slots=True)
class Weights:
    """Hold how far one tensor is apart in two files.

    Attributes:
        name: Its name.
        dtypes: Its dtype in the one and in the other, None where it is not.
        error: Relative L2 distance; None where it cannot be compared.
        unit: Unit roundoff of the coarser dtype: what storing it so explains.
        note: Why it was not compared, or what is not finite.
    """

    name: str
    dtypes: tuple[str | None, str | None]
    error: float | None
    unit: float
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times what rounding to the coarser dtype explains."""
        return None if self.error is None else self.error / self.unit


def compare_weights(a: str, b: str) -> list[Weights]:
    """Compare the tensors of two files by name.

    Args:
        a: Path of a file that ``anynan scan`` reads: safetensors, torch.save, npz and others.
        b: The other.

    Returns:
        All tensors of ``a`` in its order, then those that only ``b`` has.

    Raises:
        OSError: If one cannot be opened.
        UnreadableError: If one cannot be read; it says why.
    """
    mine, theirs = (_tensors(path) for path in (a, b))
    found = [_compared(tensor, theirs.get(name)) for name, tensor in mine.items()]
    found += [
        Weights(name, (None, tensor.dtype), None, 1.0, "only the second file has it")
        for name, tensor in theirs.items()
        if name not in mine
    ]
    return found


def _tensors(path: str) -> dict[str, Tensor]:
    with open(path, "rb"):
        pass
    try:
        return {tensor.name: tensor for tensor in reader(path)[1]()}
    except UnreadableError as error:
        msg = f"{path}: {error}"
        raise UnreadableError(msg) from error


def _compared(x: Tensor, y: Tensor | None) -> Weights:
    if y is None:
        return Weights(x.name, (x.dtype, None), None, 1.0, "only the first file has it")
    dtypes = x.dtype, y.dtype
    kinds = [format_of(dtype) for dtype in dtypes]
    if x.blocks is None or y.blocks is None or None in kinds:
        return Weights(x.name, dtypes, None, 1.0, "not of numbers with a fraction")
    unit = max(kind.unit for kind in kinds if kind is not None)
    if x.shape != y.shape:
        note = f"shape {x.shape} in the first, {y.shape} in the second"
        return Weights(x.name, dtypes, None, unit, note)
    apart = size = 0.0
    for p, q in zip(_numbers(x), _numbers(y), strict=True):
        fine = np.isfinite(p) & np.isfinite(q)
        if not fine.all() and not np.array_equal(p[~fine], q[~fine], equal_nan=True):
            bad = [not np.isfinite(part).all() for part in (p, q)]
            where = "in other places" if all(bad) else f"in the {'first' if bad[0] else 'second'}"
            return Weights(x.name, dtypes, math.inf, unit, f"NaN or Inf {where}")
        p, q = p[fine], q[fine]  # noqa: PLW2901  what both have
        apart += float(np.dot(p - q, p - q))
        size += float(np.dot(p, p))
    error = 0.0 if apart == 0 else math.sqrt(apart / size) if size else math.inf
    return Weights(x.name, dtypes, error, unit)


def _numbers(tensor: Tensor) -> Iterator[NDArray[np.float64]]:
    """Read a tensor in parts of one length, whatever blocks its file is read in."""
    assert tensor.blocks is not None
    held: list[NDArray[np.float64]] = []
    count = 0
    for bits in tensor.blocks():
        held.append(values(bits, tensor.dtype))
        count += bits.size
        while count >= _PART:
            whole = np.concatenate(held)
            yield whole[:_PART]
            held, count = [whole[_PART:]], count - _PART
    if count:
        yield np.concatenate(held)


def values(bits: Bits, dtype: str) -> NDArray[np.float64]:
    """Give the numbers that patterns stand for.

    Args:
        bits: Unsigned integers.
        dtype: What they are the bits of.
    """
    name = PAIRS.get(dtype, dtype)
    if name == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if bits.itemsize == 1:
        table: NDArray[np.float64] = FORMATS[name].table
        return table[bits]
    return np.ascontiguousarray(bits).view(name).astype(np.float64)
