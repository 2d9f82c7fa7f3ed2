"""How large and how small the numbers of an array are, by powers of two."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anynan._files.formats import Format

SAMPLED = 2**12  # elements whose powers of two are counted; all are looked at for the largest
_BIAS = 127


@dataclass(frozen=True, slots=True, eq=False)
class Range:
    """Hold the magnitudes of an array.

    Attributes:
        size: How many elements it has.
        largest: The largest finite magnitude, 0 if there is none.
        smallest: The smallest of the sampled that is not zero, infinite if there is none.
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


def finite(x: NDArray[Any]) -> bool:
    """Tell whether no NaN or Inf is among numbers: two reads, and no copy; one of float16."""
    if x.dtype == np.float16:  # NumPy has no fast kernel for it, but for its bits
        return not x.size or int((x.view(np.uint16) & 0x7FFF).max()) < 0x7C00
    if x.dtype.kind == "c":
        return bool(np.isfinite(x).all())
    return not x.size or math.isfinite(float(x.max()) - float(x.min()))


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
    counts = np.zeros(256, np.int64)
    if not x.size:
        return Range(0, 0.0, math.inf, bad=False, powers=counts)
    top = max(float(x.max()), -float(x.min()))  # two reads, and no copy; NaN comes through
    bad = not math.isfinite(top)
    if bad:
        top = float(np.abs(x, where=np.isfinite(x), out=np.zeros_like(x)).max())
    flat = x.ravel(order="K")
    sample = flat[:: -(-flat.size // SAMPLED)].view(np.int32) & 0x7FFFFFFF
    sample = sample[(sample > 0) & (sample < 0x7F800000)]
    counts += np.bincount(sample >> 23, minlength=256)
    smallest = float(sample.min().view(np.float32)) if sample.size else math.inf
    return Range(flat.size, top, smallest, bad, counts)
