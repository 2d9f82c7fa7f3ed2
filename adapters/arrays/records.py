"""From one operation on arrays to its record: the operands are looked at, for its result is bad."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from anynan._arrays.access import device_name, dtype_name, namespace, on_host
from anynan._arrays.chunked import is_chunked
from anynan._arrays.measures import measure
from anynan._arrays.probe import probe
from anynan._base.summary import Summary
from anynan._diagnosis.lineage import OpRecord
from anynan._diagnosis.operands import at_first_nan
from anynan._diagnosis.records import SOFTMAX, Builder, Given, add_masked_rows
from anynan.arrays.names import is_number, named, params
from anynan.arrays.trackable import is_array
from anynan.arrays.tracked import TrackedArray, is_tracked

if TYPE_CHECKING:
    from anynan.arrays.live import LiveTape

# Their result depends on more than their operands, or is none of their own.
_UNREPEATED = frozenset({"setitem", "getitem", "copy", "empty", "random", "normal", "uniform"})


def make_record(
    tape: "LiveTape", index: int, name: str, raw: str, function: Callable[..., Any],
    args: tuple[Any, ...], kwargs: dict[str, Any], bad: TrackedArray, *, before: Any,
    writes: TrackedArray | None,
) -> OpRecord:  # fmt: skip
    """Describe an operation with a bad result; layer, line and reason are the caller's.

    Args:
        tape: The tape of this call.
        index: Number of the record.
        name: Canonical name.
        raw: The library's name.
        function: What was called.
        args: Positional arguments, tracked arrays among them.
        kwargs: Arguments by name.
        bad: The result that is bad.
        before: Copy of what was overwritten, None where there is none.
        writes: The array that was written to.
    """
    record = OpRecord(index, name, raw, None, "value", None, params=params(name, args, kwargs))
    result = Given("result", bad._raw, None, bad)
    given = [
        _given(tape, label, value, writes, before)
        for label, value in named(name, args, {k: v for k, v in kwargs.items() if k != "key"})
        if _counts(value)
    ]
    builder = Builder(measured, tape.origin, tape.notes.append)
    look = builder.fresh(record, result, given)
    if not look:
        result.known = light(bad._raw)

    def wider(output: Summary) -> float | None:
        if output.nan or writes is not None or name in _UNREPEATED:
            return None
        return wide(function, args, kwargs)

    builder.describe(record, result, given, look=look, wide=wider)
    if look and name in SOFTMAX:
        _add_masked_rows(record, args)
    return record


def _counts(value: Any) -> bool:
    return is_tracked(value) or is_array(value) or is_number(value)


def _given(
    tape: "LiveTape", label: str, value: Any, writes: TrackedArray | None, before: Any
) -> Given:
    if is_number(value):
        return Given(label, number=value)
    if writes is None or value is not writes:
        raw = value._raw if is_tracked(value) else value
        return Given(label, raw, light(raw), value)
    known = _kinds(tape, value) if before is None else light(before)
    return Given(label, before, known, value)


def _kinds(tape: "LiveTape", x: TrackedArray) -> Summary:
    """Say what an overwritten operand held, of which there is no copy."""
    shape = tuple(np.shape(x._raw))
    blank = Summary(shape, dtype_name(x._raw), device_name(x._raw), math.prod(shape))
    known = [tape.records[i].output for i in tape.parents(x) if i < len(tape.records)]
    kinds = {summary.kind for summary in known if summary is not None}
    return replace(
        blank, nan=int("nan" in kinds), posinf=int("posinf" in kinds),
        neginf=int("neginf" in kinds),
    )  # fmt: skip


def _add_masked_rows(record: OpRecord, args: tuple[Any, ...]) -> None:
    axis = record.params.get("dim", args[1] if len(args) > 1 else -1)
    x = args[0]._raw if args and is_tracked(args[0]) else None
    if x is not None and isinstance(axis, int):
        add_masked_rows(record, on_host(x), axis)


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
