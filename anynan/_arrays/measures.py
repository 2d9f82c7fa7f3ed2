"""The engine of ``summarize``: exact counts and careful sums, piece by piece."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from anynan._arrays import chunked, values
from anynan._arrays.access import (
    BLOCK,
    REFUSALS,
    blocks,
    detached,
    device_name,
    dtype_name,
    fields,
    on_host,
    standard_format,
    to_host,
    unreadable,
)
from anynan._arrays.chunked import is_chunked
from anynan._arrays.registry import reader_of
from anynan._arrays.tally import Tally, first_bad
from anynan._base.summary import Summary


def measure(x: Any) -> Summary:
    """Describe an array of any library, in one pass and a second if it holds NaN or Inf.

    Args:
        x: An array, a NumPy scalar or a Python number.

    Returns:
        The counts are exact; mean and rms are accumulated in float64 and do not overflow.
        Masked elements count only in ``size``; a structured array gives its float fields
        together.

    Raises:
        TypeError: If the elements cannot be read.

    Example:
        >>> import numpy
        >>> from anynan._arrays.measures import measure
        >>> measure(numpy.array([[1.0, -3.0], [numpy.nan, 0.0]])).first_bad
        (1, 0)
    """
    reader = reader_of(x)
    if reader is not None:
        return reader.summarize(x)
    return describe(x)


def describe(x: Any) -> Summary:
    """Describe an array without asking an adapter; adapters use it for what they unwrapped."""
    if is_chunked(x):
        return chunked.describe(x)
    held = values.plain(x)
    if held is not x:
        summary = describe(held)
        first = values.place(x, summary.first_bad)
        shape = summary.shape
        with suppress(Exception):  # nested arrays may have none
            shape = tuple(x.shape)
        dtype = dtype_name(x) if hasattr(x, "dtype") else summary.dtype
        return replace(summary, shape=shape, dtype=dtype, first_bad=first)
    view = on_host(x)
    if view is None:
        return _standard(x)
    tally = Tally()
    for part, mask, form in fields(view):
        tally.array(part, mask, form)
    first = None
    if tally.bad:
        found = [first_bad(part, mask, form) for part, mask, form in fields(view)]
        first = min(index for index in found if index is not None)
    shown = x if hasattr(x, "dtype") else view
    return tally.summary(view.shape, dtype_name(shown), device_name(shown), first)


def _standard(x: Any) -> Summary:
    """Bring an array of another library to the host block by block."""
    shape = tuple(int(length) for length in x.shape)
    tally, first, start = Tally(), None, 0
    try:
        form = standard_format(x)
        readable = form.kind != "other" and device_name(x) != "meta"
        for block in blocks(detached(x), BLOCK // 4) if readable else ():
            host = to_host(block)
            tally.array(host, None, form)
            if first is None and tally.bad:
                (inner,) = first_bad(host.reshape(-1), None, form) or (0,)
                first = tuple(int(i) for i in np.unravel_index(start + inner, shape))
            start += host.size
    except REFUSALS as error:
        raise unreadable(x, error) from error
    return tally.summary(shape, form.name, device_name(x), first)
