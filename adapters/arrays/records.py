"""How records read arrays of any library."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from anynan._arrays import access, measures
from anynan._arrays.access import device_name, dtype_name
from anynan._arrays.chunked import is_chunked
from anynan._arrays.probe import Span, is_clean, probe
from anynan._base.summary import Summary
from anynan._diagnosis.operands import at_first_nan
from anynan._readings.policy import reading_kind

on_host = access.on_host


def is_finite(x: Any) -> bool:
    """Tell whether an array is finite; one that cannot be read counts as such."""
    if is_clean(x) or getattr(getattr(x, "dtype", None), "kind", "f") in "biu":
        return True
    ends = span(x)
    return ends is None or reading_kind(*ends) is None


def span(x: Any) -> Span | None:
    """Give the smallest and the largest value; None where they cannot be read."""
    try:
        return probe(x)
    except Exception:  # noqa: BLE001  it is told where it is read
        return None


def measure(x: Any) -> Summary:
    """Summarise an array, pointing at its first NaN where it holds one."""
    return at_first_nan(measures.measure(x), None if is_chunked(x) else on_host(x))


def blank(x: Any) -> Summary:
    """Summarise an array without a look at its elements."""
    shape = tuple(np.shape(x))
    size = 0 if any(length != length for length in shape) else math.prod(shape)
    return Summary(shape, dtype_name(x), device_name(x), size)


def light(x: Any) -> Summary:
    """Summarise by flags only: which kinds are there, not how many."""
    ends = span(x)
    return blank(x) if ends is None else flagged(blank(x), *ends)


def flagged(blank: Summary, lo: float, hi: float) -> Summary:
    """Add to a summary what an array's two ends tell."""
    finite = math.isfinite(lo) and math.isfinite(hi)
    return replace(
        blank,
        nan=int(lo != lo),
        posinf=int(hi == math.inf),
        neginf=int(lo == -math.inf),
        min=lo if math.isfinite(lo) else None,
        max=hi if math.isfinite(hi) else None,
        absmax=max(abs(lo), abs(hi)) if finite else None,
    )
