"""The probe: the smallest and the largest value, which NaN and Inf cannot hide from."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from anynan._arrays import chunked, values
from anynan._arrays.access import (
    REFUSALS,
    Format,
    as_float,
    blocks,
    detached,
    device_name,
    fields,
    format_of,
    library_name,
    namespace,
    on_host,
    pieces,
    standard_format,
    unreadable,
    widened,
)
from anynan._arrays.chunked import is_chunked
from anynan._arrays.registry import reader_of
from anynan._base.summary import Summary

Span = tuple[float, float]

PIECE = 2**19  # bytes: every reduction of a piece finds it in the cache
NAN: Span = (math.nan, math.nan)

_PARTS = {
    np.dtype(kind): np.dtype(part)
    for kind, part in (("f4", "f4"), ("f8", "f8"), ("c8", "f4"), ("c16", "f8"))
}
_SIGNED = {size: np.dtype(f"i{size}") for size in (1, 2, 4, 8)}
_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def probe(x: Any) -> Span | None:
    """Return the smallest and the largest value of an array of any library.

    Args:
        x: An array, a NumPy scalar or a Python number.

    Returns:
        ``(lo, hi)``; both are NaN if any element is, and an Inf keeps its sign. A complex
        array gives the range of its parts, or Inf twice, for its infinity has no sign.
        None if there is nothing to look at: no elements, or no floating dtype.

    Raises:
        TypeError: If the elements cannot be read.

    Example:
        >>> import numpy
        >>> from anynan._arrays.probe import probe
        >>> probe(numpy.array([3.0, -numpy.inf, 1.0]))
        (-inf, 3.0)
    """
    if type(x) is float:
        return x, x
    reader = reader_of(x)
    if reader is not None:
        return reader.probe(x)
    if is_chunked(x):
        return ends(chunked.describe(x)) if chunked.holds_floats(x) else None
    if type(x) is not np.ndarray or x.dtype.hasobject:
        held = values.plain(x)
        if held is not x and not isinstance(held, np.ndarray):  # another library's, or in chunks
            return probe(held)
        x = held
    view = on_host(x)
    if view is None:
        return _standard(x)
    if type(view) is np.ndarray and view.dtype.names is None:
        return _numpy(view, None, format_of(view.dtype))
    found = None
    for part, mask, form in fields(view):
        span = _numpy(part, mask, form)
        if span is not None:
            found = span if found is None else _join(found, span)
    return found


_PRODUCT = 10_000  # elements: above, OpenBLAS wakes its pool of threads


def ends(summary: Summary) -> Span | None:
    """Give what a probe of the summarised array would have given."""
    if summary.nan:
        return NAN
    if summary.min is None and summary.absmax is not None:  # complex: the magnitudes' range
        low, high = -summary.absmax, summary.absmax
        return (math.inf, math.inf) if summary.posinf else (low, high)
    if summary.low is None or summary.high is None:
        return (math.inf, math.inf) if summary.posinf else None
    return summary.low, summary.high


def is_clean(x: Any) -> bool:
    """Tell whether an array is known to be finite by one reading of it; False is no verdict.

    A sum of squares is NaN or infinite where an element is, and cannot hide that. It also
    overflows on finite numbers, so ``probe`` has the last word.

    Args:
        x: Anything; only contiguous NumPy arrays of float32 and float64, and of their complex
            pairs, are answered.

    Example:
        >>> import numpy
        >>> from anynan._arrays.probe import is_clean
        >>> is_clean(numpy.ones(3)), is_clean(numpy.array([numpy.nan]))
        (True, False)
    """
    if type(x) is not np.ndarray or x.dtype not in _PARTS:
        return False
    flags = x.flags
    if not flags.aligned or x.ndim == 0:
        return False
    if flags.c_contiguous:
        flat = x.reshape(-1)
    elif flags.f_contiguous:
        flat = x.T.reshape(-1)
    else:
        return False
    flat, dot = flat.view(_PARTS[x.dtype]), np.dot
    with np.errstate(all="ignore"):
        for start in range(0, flat.size, _PRODUCT):
            piece = flat[start : start + _PRODUCT]
            if not dot(piece, piece) < math.inf:
                return False
    return True


def _join(one: Span, other: Span) -> Span:
    if one[0] != one[0] or other[0] != other[0]:
        return NAN
    return min(one[0], other[0]), max(one[1], other[1])


def _numpy(x: np.ndarray[Any, Any], mask: np.ndarray[Any, Any] | None, form: Format) -> Span | None:
    if form.kind not in ("real", "complex") or x.size == 0:
        return None
    found = None
    for stream in _streams(x, mask, form):
        span = _of_codes(stream, mask, form) if form.nan_from else _of_values(stream, mask)
        if span is not None:
            found = span if found is None else _join(found, span)
    return _unsigned_infinity(found) if form.kind == "complex" else found


def _unsigned_infinity(span: Span | None) -> Span | None:
    if span is not None and (math.isinf(span[0]) or math.isinf(span[1])):
        return math.inf, math.inf
    return span


def _streams(
    x: np.ndarray[Any, Any], mask: np.ndarray[Any, Any] | None, form: Format
) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the real numbers of an array as views: bit patterns where their order is known."""
    if form.nan_from is None:
        yield from (x,) if form.kind == "real" else (x.real, x.imag)
        return
    code = _UNSIGNED[form.part.itemsize]
    if not x.dtype.isnative:
        code = code.newbyteorder()
    adjacent = mask is None and x.ndim > 0 and x.flags.c_contiguous
    if form.kind == "real" or adjacent:
        yield x.view(code)
    else:
        pair = x.view([("real", code), ("imag", code)])
        yield pair["real"]
        yield pair["imag"]


def _of_codes(
    codes: np.ndarray[Any, Any], mask: np.ndarray[Any, Any] | None, form: Format
) -> Span | None:
    """Find the extremes in sign-and-magnitude bit patterns, by integer reductions.

    Read as a signed integer the largest pattern is the largest value, read as an unsigned
    one it is the most negative value. Unlike float reductions these are equally fast in
    every dtype, float16 above all, and touch no floating point flags.
    """
    assert form.nan_from is not None
    size = codes.dtype.itemsize
    signed = _SIGNED[size]
    sign = 1 << (8 * size - 1)
    smallest, largest = np.minimum.reduce, np.maximum.reduce
    highest, lowest, nearest = -1, 0, 2 * sign
    seen = False
    for piece, hidden in pieces(codes, _count(size, mask), mask=mask):
        kept = piece if hidden is None else piece[~hidden]
        if kept.size == 0:
            continue
        seen = True
        highest = max(highest, int(largest(kept.view(signed))))
        lowest = max(lowest, int(largest(kept)))
        if highest >= form.nan_from or lowest >= sign + form.nan_from:
            return NAN
        if highest < 0 or lowest < sign:
            # One sign only so far: its other end is the pattern nearest to zero.
            nearest = min(nearest, int(smallest(kept)))
    if not seen:
        return None
    ends = (lowest if lowest >= sign else nearest, highest if highest >= 0 else nearest)
    lo, hi = np.array([end % (2 * sign) for end in ends], _UNSIGNED[size]).view(form.part)
    return float(lo), float(hi)


def _count(size: int, mask: object) -> int:
    # With a mask there are two buffers and a copy of what it leaves.
    return PIECE // size if mask is None else max(1, PIECE // size // 4)


def _of_values(floats: np.ndarray[Any, Any], mask: np.ndarray[Any, Any] | None) -> Span | None:
    wide = np.float32 if floats.dtype.itemsize == 1 else None
    size = 4 if wide else floats.dtype.itemsize
    found = None
    # What these reductions flag is not the user's doing.
    with np.errstate(all="ignore"):
        for piece, hidden in pieces(floats, _count(size, mask), mask=mask, dtype=wide):
            kept = piece if hidden is None else piece[~hidden]
            if kept.size == 0:
                continue
            lo, hi = np.minimum.reduce(kept), np.maximum.reduce(kept)
            if lo != lo:
                return NAN
            span = (as_float(lo), as_float(hi))
            found = span if found is None else _join(found, span)
    return found


def _standard(x: Any) -> Span | None:
    """Read an array by the functions of the array API standard, where it lives."""
    try:
        form = standard_format(x)
        if form.kind not in ("real", "complex") or 0 in x.shape or device_name(x) == "meta":
            return None
        compound = form.kind == "complex"
        low, high, nan = reduced(detached(x), compound=compound)
        if bool(nan):
            return NAN
        return span_of(float(low), float(high), compound=compound)
    except REFUSALS as error:
        raise unreadable(x, error) from error


# Libraries whose min() and max() are known to be NaN where an element is: no mask is made there.
_NAN_PASSES = frozenset({"cupy"})


def reduced(x: Any, *, compound: bool) -> tuple[Any, Any, Any]:
    """Reduce an array, by the standard's functions, to the ends and whether it holds NaN.

    Args:
        x: An array outside of a gradient graph.
        compound: Whether it is complex.

    Returns:
        Three arrays without dimensions, which stay where the array is.
    """
    xp, known, passes = namespace(x), chunked.sized(x), library_name(x) in _NAN_PASSES
    lows, highs, nans = [], [], []
    for block in (x,) if passes else blocks(x):
        for part in (xp.real(block), xp.imag(block)) if compound else (block,):
            part = widened(part, 16)  # noqa: PLW2901  few libraries reduce 8 bits
            if known:
                lows.append(xp.min(part))
                highs.append(xp.max(part))
            else:  # a chunk may be empty, which has no smallest value
                one = xp.ones((), dtype=part.dtype)
                lows.append(xp.where(xp.any(part == -math.inf), -math.inf * one, 0 * one))
                highs.append(xp.where(xp.any(part == math.inf), math.inf * one, 0 * one))
            # A compiled or sharded max may drop NaN; any() of a mask cannot.
            nans.append(xp.isnan(lows[-1]) if passes else xp.any(xp.isnan(part)))
    if len(lows) == 1:
        return lows[0], highs[0], nans[0]
    return xp.min(xp.stack(lows)), xp.max(xp.stack(highs)), xp.any(xp.stack(nans))


def span_of(low: float, high: float, nan: float = 0, *, compound: bool) -> Span:
    """Make the span of what a reduction gave, once it is on the host."""
    if nan or low != low:
        return NAN
    span = (low, high)
    return _unsigned_infinity(span) or span if compound else span
