"""Summaries of operands and results, and an operation that runs again in a wider dtype."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from anynan._arrays.access import device_name, dtype_name, namespace, on_host
from anynan._arrays.chunked import is_chunked
from anynan._arrays.measures import measure
from anynan._arrays.probe import probe
from anynan._base.summary import Summary
from anynan._diagnosis.operands import at_first_nan
from anynan.arrays.trackable import is_array
from anynan.arrays.tracked import is_tracked


def measured(raw: Any) -> Summary:
    """Summarise an array, pointing at its first NaN where it holds one."""
    return at_first_nan(measure(raw), None if is_chunked(raw) else on_host(raw))


def light(raw: Any) -> Summary:
    """Summarise by flags only: which kinds are there, not how many."""
    span = None
    shape = tuple(np.shape(raw))
    with suppress(TypeError):
        span = probe(raw)
    blank = Summary(shape, dtype_name(raw), device_name(raw), math.prod(shape))
    return blank if span is None else flagged(blank, *span)


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


def wide(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float | None:
    """Run an operation again in a wider dtype; give its largest magnitude if that is finite."""
    arrays = [x for x in _flat([*args, *kwargs.values()]) if _is_float(x)]
    # bfloat16 ends where float32 does, so only float64 shows by how much it overflowed.
    narrow = all(dtype_name(x) == "float16" for x in arrays)
    target = "float32" if narrow else "float64"

    def widen(value: Any) -> Any:
        plain = value._raw if is_tracked(value) else value
        if isinstance(plain, list | tuple):
            return type(plain)(widen(item) for item in plain)
        if is_array(plain) and _is_float(plain):
            xp = namespace(plain) or np
            return xp.astype(plain, getattr(xp, target))
        return plain

    try:
        if not arrays:
            return None
        with np.errstate(all="ignore"):
            out = function(*[widen(a) for a in args], **{k: widen(v) for k, v in kwargs.items()})
        span = probe(out)
    except Exception:  # noqa: BLE001  only a number for the report is lost
        return None
    if span is None or not (math.isfinite(span[0]) and math.isfinite(span[1])):
        return None
    return max(abs(span[0]), abs(span[1])) or None


def _flat(values: list[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if is_tracked(value):
            found.append(value._raw)
        elif isinstance(value, list | tuple):
            found += _flat(list(value))
        elif is_array(value):
            found.append(value)
    return found


def _is_float(raw: Any) -> bool:
    return "float" in dtype_name(raw)
