"""How large and how small the numbers of an array are, by powers of two."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anynan._files.formats import Format

SAMPLED = 2**14  # elements whose powers of two are counted; all are looked at for the ends
_BIAS = 127


@dataclass(frozen=True, slots=True)
class Range:
    """Hold the magnitudes of an array.

    Attributes:
        size: How many elements it has.
        largest: The largest finite magnitude, 0 if there is none.
        smallest: The smallest that is not zero, infinite if there is none.
        bad: Whether a NaN or an Inf is among them.
        powers: How many of the sampled elements lie in each power of two: entry ``i`` counts
            those from ``2**(i - 127)`` up; zeros, NaN and Inf are left out.
    """

    size: int
    largest: float
    smallest: float
    bad: bool
    powers: NDArray[np.int64]

    def bits(self, form: Format, scale: float = 1.0) -> float:
        """Give the bits that are left before the largest overflows; negative if it does.

        ``log2(overflows / largest)``, where ``overflows`` is the smallest magnitude that rounds
        beyond the largest number of the format.
        """
        if not self.largest:
            return math.inf
        return math.log2(form.overflows) - math.log2(self.largest) - math.log2(scale)

    def share_below(self, limit: float, scale: float = 1.0) -> float:
        """Give the share of the elements other than 0 that are below a power of two."""
        total = int(self.powers.sum())
        first = math.floor(math.log2(limit) - math.log2(scale)) + _BIAS
        return float(self.powers[: max(first, 0)].sum()) / total if total else 0.0

    def flushed(self, form: Format, scale: float = 1.0) -> float:
        """Give the share of the elements other than 0 that round to 0."""
        return self.share_below(form.flushes, scale)

    def subnormal(self, form: Format, scale: float = 1.0) -> float:
        """Give the share of the elements other than 0 that have fewer bits than others, or none."""
        return self.share_below(form.value(1 << form.mantissa), scale)


def measured(x: NDArray[Any]) -> Range:
    """Measure an array of numbers with a fraction.

    Args:
        x: An array of float16, float32 or float64; of complex numbers both parts are taken.

    Example:
        >>> import numpy as np
        >>> found = measured(np.asarray([0.0, 3e-8, 1.0, 70000.0], np.float32))
        >>> found.largest, found.size
        (70000.0, 4)
    """
    if x.dtype.kind == "c":
        x = np.stack([x.real, x.imag])
    if x.dtype != np.float32:
        with np.errstate(over="ignore", under="ignore"):
            wide = x.astype(np.float64)
            x = np.where(np.isfinite(wide), np.clip(wide, -3.4e38, 3.4e38), wide).astype(np.float32)
    flat = np.ascontiguousarray(x).reshape(-1).view(np.int32) & 0x7FFFFFFF
    counts = np.zeros(256, np.int64)
    if not flat.size:
        return Range(0, 0.0, math.inf, bad=False, powers=counts)
    top = int(flat.max())
    bad = top >= 0x7F800000
    finite = flat[flat < 0x7F800000] if bad else flat
    step = -(-finite.size // SAMPLED) if finite.size else 1
    sample = finite[::step]
    counts += np.bincount(sample[sample > 0] >> 23, minlength=256)
    least = int((finite - 1).view(np.uint32).min()) if finite.size else 0xFFFFFFFF
    largest = int(finite.max()) if bad and finite.size else 0 if bad else top
    smallest = math.inf if least == 0xFFFFFFFF else _number(least + 1)
    return Range(flat.size, _number(largest), smallest, bad, counts)


def _number(pattern: int) -> float:
    return float(np.int32(pattern).view(np.float32))
