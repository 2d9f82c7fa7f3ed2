"""Floating-point formats as bits: every value is told by its integer pattern alone."""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Format:
    """Describe a format: sign, exponent, ``mantissa`` bits, from the highest bit down.

    Attributes:
        name: Its short name.
        width: Bits of one value.
        mantissa: Bits of the mantissa.
        bias: What is taken from the exponent.
        top: Pattern of the largest finite value.
        inf: Pattern of +Inf, None if there is none. What lies above is NaN.
        fnuz: NaN is where others have -0, and only there.
        unsigned: No sign, no zero: a bare exponent.
    """

    name: str
    width: int
    mantissa: int
    bias: int
    top: int
    inf: int | None = None
    fnuz: bool = False
    unsigned: bool = False

    def value(self, pattern: int) -> float:
        """Give the number that a pattern without sign stands for."""
        exponent, rest = pattern >> self.mantissa, pattern & ((1 << self.mantissa) - 1)
        if self.unsigned:
            return math.ldexp(1.0, exponent - self.bias)
        if exponent:
            rest += 1 << self.mantissa
        return math.ldexp(rest, max(exponent, 1) - self.bias - self.mantissa)

    @property
    def unit(self) -> float:
        """Give the unit roundoff: how far rounding moves a number, at most, as a share of it."""
        return 2.0 ** -(self.mantissa + 1)

    @property
    def max(self) -> float:
        """Give the largest finite value."""
        return self.value(self.top)

    @property
    def overflows(self) -> float:
        """Give the smallest magnitude that rounds beyond the largest finite value."""
        tie = self.max + (self.max - self.value(self.top - 1)) / 2
        return tie if self.top % 2 else math.nextafter(tie, math.inf)  # a tie goes to the even one

    @property
    def flushes(self) -> float:
        """Give the largest magnitude that rounds to zero."""
        return self.value(1) / 2

    def first_from(self, size: float) -> int:
        """Give the pattern of the smallest finite magnitude that is at least ``size``."""
        return bisect_left(range(self.top + 1), size, key=self.value)

    def count_upto(self, size: float) -> int:
        """Give how many patterns, 0 among them, stand for a magnitude of at most ``size``."""
        return bisect_right(range(self.top + 1), size, key=self.value)

    @cached_property
    def signed(self) -> "np.dtype[Any]":
        """Give the dtype of its patterns as signed integers."""
        return np.dtype(f"i{self.width // 8}")

    @cached_property
    def table(self) -> NDArray[np.float64]:
        """Give the value of each of the 256 patterns of a format of 8 bits."""
        numbers = []
        for pattern in range(256):
            size = pattern if self.unsigned else pattern & 0x7F
            if self.fnuz and pattern == 0x80:
                number = math.nan
            elif size <= self.top:
                number = self.value(size)
            else:
                number = math.inf if size == self.inf else math.nan
            numbers.append(-number if pattern >= 0x80 and not self.unsigned else number)
        return np.asarray(numbers)


_KNOWN = (
    Format("float64", 64, 52, 1023, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000),
    Format("float32", 32, 23, 127, 0x7F7FFFFF, 0x7F800000),
    Format("float16", 16, 10, 15, 0x7BFF, 0x7C00),
    Format("bfloat16", 16, 7, 127, 0x7F7F, 0x7F80),
    Format("float8_e4m3fn", 8, 3, 7, 0x7E),
    Format("float8_e5m2", 8, 2, 15, 0x7B, 0x7C),
    Format("float8_e4m3fnuz", 8, 3, 8, 0x7F, fnuz=True),
    Format("float8_e5m2fnuz", 8, 2, 16, 0x7F, fnuz=True),
    Format("float8_e8m0fnu", 8, 0, 127, 0xFE, unsigned=True),
)
FORMATS = {found.name: found for found in _KNOWN}
# Each element is two of these.
PAIRS = {"complex64": "float32", "complex128": "float64"}
# What a file's numbers may be converted to.
TARGETS = {
    "float16": FORMATS["float16"],
    "bfloat16": FORMATS["bfloat16"],
    "float8": FORMATS["float8_e4m3fn"],
    "float8_e4m3fn": FORMATS["float8_e4m3fn"],
    "float8_e5m2": FORMATS["float8_e5m2"],
}


def target_of(dtype: Any) -> Format:
    """Give the format that a framework's dtype, or a name, asks for.

    Raises:
        ValueError: If it is none of those that numbers may be converted to.
    """
    words = str(getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or dtype)
    found = TARGETS.get(words.rpartition(".")[2])  # torch.float16 spells itself so
    if found is None:
        msg = f"dtype={dtype!r} is unknown; choose from {', '.join(TARGETS)}"
        raise ValueError(msg)
    return found


def format_of(dtype: str) -> Format | None:
    """Give the format of a dtype's numbers, None if it holds none that could be bad."""
    return FORMATS.get(PAIRS.get(dtype, dtype))


def itemsize(dtype: str) -> int:
    """Give the bytes of one number of a dtype (half an element of a complex one)."""
    found = format_of(dtype)
    assert found is not None
    return found.width // 8
