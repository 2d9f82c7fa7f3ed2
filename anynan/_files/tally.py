"""Count what a stream of bit patterns holds, block by block."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anynan._files.formats import PAIRS, Format, format_of

Bits = NDArray[np.unsignedinteger[Any]]


@dataclass
class Tally:
    """Hold what was counted of one tensor.

    Attributes:
        size: Numbers looked at; a complex element has two.
        nan: How many are NaN.
        posinf: How many are +Inf.
        neginf: How many are -Inf.
        first: Position of the first that is not finite.
        min: The smallest finite number.
        max: The largest finite number.
        overflow: How many finite ones would be too large for the format asked about.
        flushed: How many would become zero in it.
    """

    size: int = 0
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    first: int | None = None
    min: float | None = None
    max: float | None = None
    overflow: int = 0
    flushed: int = 0
    # The largest patterns of finite numbers, of positive and of negative ones; -1 for none.
    _high: int = field(default=-1, repr=False)
    _low: int = field(default=-1, repr=False)
    _seen: NDArray[np.int64] = field(default_factory=lambda: np.zeros(256, np.int64), repr=False)

    @property
    def bad(self) -> int:
        """Count what is not finite."""
        return self.nan + self.posinf + self.neginf

    @property
    def absmax(self) -> float | None:
        """Give the largest finite magnitude."""
        if self.min is None or self.max is None:
            return None
        return max(abs(self.min), abs(self.max))


def tally(blocks: Iterable[Bits], dtype: str, target: Format | None = None) -> Tally:
    """Count over the blocks of a tensor.

    Args:
        blocks: Its numbers as unsigned integers, in order.
        dtype: What they stand for.
        target: A format they may be converted to.

    Returns:
        The counts; positions are of elements, also where an element is two numbers.
    """
    kind = format_of(dtype)
    assert kind is not None
    found = Tally()
    count = _narrow if kind.width == 8 else _wide
    limits = _limits(kind, target)
    for block in blocks:
        if block.size:
            count(found, block, kind, limits)
            found.size += block.size
    if kind.width == 8:
        _close_narrow(found, kind, target)
    if found.first is not None and dtype in PAIRS:
        found.first //= 2
    return found


def _limits(kind: Format, target: Format | None) -> tuple[int, int] | None:
    """Give the pattern from which a value overflows, and how many patterns are flushed."""
    if target is None or kind.width == 8:
        return None
    return kind.first_from(target.overflows), kind.count_upto(target.flushes) - 1


def _wide(found: Tally, bits: Bits, kind: Format, limits: tuple[int, int] | None) -> None:
    signed = bits.view(kind.signed)
    sign = 1 << (kind.width - 1)
    # As a signed integer the largest is the largest positive value, +Inf or a NaN; as an
    # unsigned one the most negative value, -Inf or a NaN.
    high, low = int(np.maximum.reduce(signed)), int(np.maximum.reduce(bits))
    if 0 <= high <= found._high and low <= found._low and limits is None:  # noqa: SLF001  its own
        return  # as most blocks: it has a positive number, and is within what was seen before
    if max(high, low - sign) > kind.top:
        bits, signed = _finite(found, bits, kind)
        if not bits.size:
            return
        high, low = int(signed.max()), int(bits.max())
    top = -kind.value(int(bits.min()) - sign) if high < 0 else kind.value(high)
    bottom = -kind.value(low - sign) if low >= sign else kind.value(int(bits.min()))
    _ends(found, bottom, top)
    found._high = max(found._high, high)  # noqa: SLF001  its own
    found._low = max(found._low, low) if low >= sign else found._low  # noqa: SLF001  its own
    if limits is not None:
        sizes = bits & bits.dtype.type(sign - 1)
        first, flushed = limits
        if max(abs(bottom), abs(top)) >= kind.value(min(first, kind.top)):
            found.overflow += int(np.count_nonzero(sizes >= first))
        if flushed:
            sizes -= 1  # a zero becomes the largest of all
            found.flushed += int(np.count_nonzero(sizes < flushed))


def _finite(found: Tally, bits: Bits, kind: Format) -> tuple[Bits, NDArray[Any]]:
    """Count what is not finite, and give what is."""
    sign = bits.dtype.type(1 << (kind.width - 1))
    sizes = bits & (sign - bits.dtype.type(1))
    bad = sizes > kind.top
    if found.first is None:
        found.first = found.size + int(bad.argmax())
    infinite = sizes == kind.inf
    negative = int(np.count_nonzero(infinite & (bits >= sign)))
    infinities = int(np.count_nonzero(infinite))
    found.neginf += negative
    found.posinf += infinities - negative
    found.nan += int(np.count_nonzero(bad)) - infinities
    kept = bits[~bad]
    return kept, kept.view(kind.signed)


def _ends(found: Tally, low: float, high: float) -> None:
    found.min = low if found.min is None else min(found.min, low)
    found.max = high if found.max is None else max(found.max, high)


def _narrow(found: Tally, bits: Bits, kind: Format, _: tuple[int, int] | None) -> None:
    held = np.bincount(bits.reshape(-1), minlength=256)
    found._seen += held  # noqa: SLF001  its own table
    bad = ~np.isfinite(kind.table)
    if found.first is None and held[bad].any():
        found.first = found.size + int(bad[bits].argmax())


def _close_narrow(found: Tally, kind: Format, target: Format | None) -> None:
    held, table = found._seen, kind.table  # noqa: SLF001  its own table
    found.nan = int(held[np.isnan(table)].sum())
    found.posinf = int(held[table == math.inf].sum())
    found.neginf = int(held[table == -math.inf].sum())
    there = table[(held > 0) & np.isfinite(table)]
    if there.size:
        _ends(found, float(there.min()), float(there.max()))
    if target is not None:
        sizes = np.abs(table)
        finite = np.isfinite(table)
        found.overflow = int(held[finite & (sizes >= target.overflows)].sum())
        found.flushed = int(held[(sizes > 0) & (sizes <= target.flushes)].sum())
