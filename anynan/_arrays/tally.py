"""Counts and sums over the pieces of arrays."""

import math
import sys
from typing import Any

import numpy as np

from anynan._arrays.access import Format, as_float, pieces
from anynan._base.summary import Summary

# Elements: a handful of temporaries stay below 1 MiB, and OpenBLAS wakes no pool of threads.
PIECE = 10_000

_NATIVE = (np.float32, np.float64, np.longdouble)

# Squares outside these magnitudes may overflow float64 or vanish in it.
_SAFE = (2.0**-400, 2.0**400)


class Tally:
    """Add up counts and sums over the pieces of one array or of several."""

    def __init__(self) -> None:
        self.nan = self.posinf = self.neginf = self.zero = self.subnormal = self.finite = 0
        self.lo: Any = math.inf
        self.hi: Any = -math.inf
        self.absmax: Any = 0.0
        self.ordered = True  # False once complex numbers came in
        self.top: Any = None  # log2 of the largest finite value of the narrowest dtype
        # (exponent, sum, sum of squares) of pieces divided by two to that exponent.
        self.sums: list[tuple[int, float, float]] = []

    @property
    def bad(self) -> int:
        """Count the NaN and infinite elements so far."""
        return self.nan + self.posinf + self.neginf

    def array(
        self, x: np.ndarray[Any, Any], mask: np.ndarray[Any, Any] | None, form: Format
    ) -> None:
        """Add an array; a dtype without numbers adds nothing."""
        if form.kind == "other":
            return
        if form.max is not None:
            top = np.log2(np.longdouble(form.max))
            self.top = top if self.top is None else min(self.top, top)
        with np.errstate(all="ignore"):
            for piece, hidden in pieces(x, PIECE, mask=mask, dtype=_wide(form)):
                kept = piece if hidden is None else piece[~hidden]
                if kept.size == 0:
                    continue
                if form.kind == "complex":
                    self._complex(kept.real, kept.imag, form.tiny)
                else:
                    self._real(kept, form.tiny)

    def _real(self, values: np.ndarray[Any, Any], tiny: Any) -> None:
        lo, hi = np.minimum.reduce(values), np.maximum.reduce(values)
        if not (np.isfinite(lo) and np.isfinite(hi)):
            self.nan += int(np.count_nonzero(np.isnan(values)))
            self.posinf += int(np.count_nonzero(values == np.inf))
            self.neginf += int(np.count_nonzero(values == -np.inf))
            values = values[np.isfinite(values)]
            if values.size == 0:
                return
            lo, hi = np.minimum.reduce(values), np.maximum.reduce(values)
        # Most pieces hold nothing that small: one count then stands for two.
        small = int(np.count_nonzero(np.abs(values) < tiny)) if tiny else values.size
        if small:
            zero = values.size - int(np.count_nonzero(values))
            self.zero += zero
            if tiny:
                self.subnormal += small - zero
        self.lo, self.hi = min(self.lo, lo), max(self.hi, hi)
        self._add(values, max(-lo, hi))

    def _complex(self, real: np.ndarray[Any, Any], imag: np.ndarray[Any, Any], tiny: Any) -> None:
        self.ordered = False
        nan = np.isnan(real) | np.isnan(imag)
        finite = np.isfinite(real) & np.isfinite(imag)
        self.nan += int(np.count_nonzero(nan))
        self.posinf += int(np.count_nonzero(~(nan | finite)))
        real, imag = real[finite], imag[finite]
        if real.size == 0:
            return
        self.zero += int(np.count_nonzero((real == 0) & (imag == 0)))
        small = [(part != 0) & (np.abs(part) < tiny) for part in (real, imag)]
        self.subnormal += int(np.count_nonzero(small[0] | small[1]))
        # The magnitude of finite parts may be beyond their dtype: that is as large as it gets.
        size = np.minimum(np.hypot(real, imag), np.finfo(real.dtype).max)
        self._add(size, np.maximum.reduce(size))

    def _add(self, values: np.ndarray[Any, Any], absmax: Any) -> None:
        self.finite += values.size
        self.absmax = max(self.absmax, absmax)
        exponent = 0
        if absmax and not _SAFE[0] < absmax < _SAFE[1]:
            exponent = int(np.frexp(absmax)[1])
            values = np.ldexp(values, -exponent)
        values = values.astype(np.float64, copy=False)
        self.sums.append((exponent, float(values.sum()), float(np.dot(values, values))))

    def merge(self, other: "Tally") -> None:
        """Add what another tally counted."""
        for name in ("nan", "posinf", "neginf", "zero", "subnormal", "finite"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.lo, self.hi = min(self.lo, other.lo), max(self.hi, other.hi)
        self.absmax = max(self.absmax, other.absmax)
        self.ordered = self.ordered and other.ordered
        tops = [top for top in (self.top, other.top) if top is not None]
        self.top = min(tops, default=None)
        self.sums += other.sums

    def summary(
        self, shape: tuple[int, ...], dtype: str, device: str, first_bad: tuple[int, ...] | None
    ) -> Summary:
        """Finish the sums."""
        facts: dict[str, float | None] = {}
        if self.finite:
            absmax = as_float(self.absmax)
            facts = {"absmax": absmax, "rms": min(self._rms(), absmax)}
            if self.ordered:
                lo, hi = as_float(self.lo), as_float(self.hi)
                facts |= {"min": lo, "max": hi, "mean": min(max(self._mean(), lo), hi)}
            if self.absmax and self.top is not None:
                bits = float(self.top - np.log2(np.longdouble(self.absmax)))
                facts["headroom"] = round(max(bits, 0.0), 6)
        return Summary(
            shape=tuple(shape),
            dtype=dtype,
            device=device,
            size=math.prod(shape),
            nan=self.nan,
            posinf=self.posinf,
            neginf=self.neginf,
            zero=self.zero,
            subnormal=self.subnormal,
            first_bad=first_bad,
            **facts,
        )

    def _mean(self) -> float:
        common = self._exponent()
        total = math.fsum(math.ldexp(part, e - common) for e, part, _ in self.sums)
        return _ldexp(total / self.finite, common)

    def _rms(self) -> float:
        common = self._exponent()
        total = math.fsum(math.ldexp(part, 2 * (e - common)) for e, _, part in self.sums)
        return _ldexp(math.sqrt(total / self.finite), common)

    def _exponent(self) -> int:
        return max((e for e, _, squares in self.sums if squares), default=0)


def _wide(form: Format) -> type[np.generic] | None:
    """Give the dtype to convert pieces to, None where NumPy is quick in their own."""
    if form.part.type in _NATIVE:
        return None
    return np.complex128 if form.kind == "complex" else np.float64


def _ldexp(value: float, exponent: int) -> float:
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.copysign(sys.float_info.max, value)


def first_bad(
    x: np.ndarray[Any, Any], mask: np.ndarray[Any, Any] | None, form: Format
) -> tuple[int, ...] | None:
    """Give the index of the first NaN or Inf in C order, None if there is none."""
    start = 0
    with np.errstate(all="ignore"):
        for piece, hidden in pieces(x, PIECE, mask=mask, order="C", dtype=_wide(form)):
            bad = ~np.isfinite(piece)
            if hidden is not None:
                bad &= ~hidden
            if bad.any():
                index = np.unravel_index(start + int(bad.argmax()), x.shape)
                return tuple(int(i) for i in index)
            start += piece.size
    return None
