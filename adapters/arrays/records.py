"""How records read arrays of any library."""

from typing import Any

from anynan._arrays import access, measures
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
