"""Arrays in chunks, spread over a cluster or not computed yet: one graph for each question.

Whatever scheduler is active runs it; each chunk is reduced where it lies, and only the results
come back. A chunk is a plain array, so the engine is the same as for any other.
"""

from typing import Any

import numpy as np

from anynan._arrays.access import fields, format_of, on_host, to_host
from anynan._arrays.tally import Tally, first_bad
from anynan._base.summary import Summary


def is_chunked(x: Any) -> bool:
    """Tell whether an array is lazy and made of chunks."""
    kind = type(x)
    # A labelled array has chunks as well, of the array that it holds.
    return hasattr(kind, "chunksize") and hasattr(kind, "map_blocks")


def holds_floats(x: Any) -> bool:
    """Tell whether the elements are of a kind that can be bad."""
    return format_of(np.dtype(x.dtype)).kind in ("real", "complex") or x.dtype.names is not None


def sized(x: Any) -> bool:
    """Tell whether the length of every chunk is known."""
    return all(length == length for length in x.shape)


def describe(x: Any) -> Summary:
    """Summarise a chunked array in one graph.

    Args:
        x: The array; chunks of any library, of any and of unknown size.
    """
    ones = tuple((1,) * len(lengths) for lengths in x.chunks)
    parts = x.map_blocks(_describe_chunk, dtype=object, chunks=ones, meta=np.empty((0,) * x.ndim))
    found = np.asarray(parts.compute(), dtype=object)
    whole, first = Tally(), None
    for place in np.ndindex(found.shape):
        tally, _, bad = found[place]
        whole.merge(tally)
        if bad is not None:
            starts = [_start(found, place, axis) for axis in range(found.ndim)]
            index = tuple(int(a + b) for a, b in zip(starts, bad, strict=True))
            first = index if first is None else min(first, index)
    shape = tuple(
        sum(int(found[_along(found.ndim, axis, i)][1][axis]) for i in range(found.shape[axis]))
        for axis in range(found.ndim)
    )
    return whole.summary(shape, np.dtype(x.dtype).name, "cpu", first)


def _along(ndim: int, axis: int, i: int) -> tuple[int, ...]:
    return tuple(i if other == axis else 0 for other in range(ndim))


def _start(found: Any, place: tuple[int, ...], axis: int) -> int:
    """Add up the lengths of the chunks before this one, as they turned out to be."""
    return sum(int(found[_along(found.ndim, axis, i)][1][axis]) for i in range(place[axis]))


def _describe_chunk(block: Any) -> Any:
    """Tally one chunk, where it lies."""
    host = on_host(block)
    host = to_host(block) if host is None else host
    tally = Tally()
    bad = []
    for part, mask, form in fields(host):
        before = tally.bad
        tally.array(part, mask, form)
        if tally.bad > before:
            bad.append(first_bad(part, mask, form))
    found = np.empty((1,) * host.ndim, object)
    found[(0,) * host.ndim] = (tally, host.shape, min((i for i in bad if i), default=None))
    if bad and host.ndim == 0:
        found[()] = (tally, (), ())
    return found
