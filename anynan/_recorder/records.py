"""From one operation on arrays to its record: the operands are looked at, for its result is bad."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from anynan._arrays.access import device_name, dtype_name, namespace, on_host
from anynan._arrays.measures import measure
from anynan._arrays.probe import probe
from anynan._arrays.summary import Summary
from anynan._diagnosis.lineage import Operand, OpRecord
from anynan._diagnosis.operands import at, at_broadcast, at_first_nan, constant
from anynan._recorder.names import is_number, named, params
from anynan._recorder.trackable import is_array
from anynan._recorder.tracked import TrackedArray, is_tracked

if TYPE_CHECKING:
    from anynan._recorder.live import LiveTape

MAX_DETAILED = 200
_SOFTMAX = ("softmax", "log_softmax")
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
    out = bad._raw
    flags = [
        (label, value, _quick(tape, value, writes, before))
        for label, value in named(name, args, {k: v for k, v in kwargs.items() if k != "key"})
        if _counts(value)
    ]
    # Where a NaN came in, the record that made it was measured.
    spread = any(
        quick is not None and quick.nan and is_tracked(value) and tape.parents(value)
        for _, value, quick in flags
    )
    detailed = not spread and index < MAX_DETAILED
    output = at_first_nan(measure(out), on_host(out)) if detailed else light(out)
    first = output.first_bad
    items = [
        _operand(tape, label, value, quick, first, np.shape(out), detailed, writes, before)
        for label, value, quick in flags
    ]
    record = OpRecord(
        index, name, raw, None, "value", output, tuple(items), params=params(name, args, kwargs),
        value=at(out, first),
    )  # fmt: skip
    if detailed:
        _refine(record, function, args, kwargs, writes)
    return record


def _counts(value: Any) -> bool:
    return is_tracked(value) or is_array(value) or is_number(value)


def _quick(
    tape: "LiveTape", value: Any, writes: TrackedArray | None, before: Any
) -> Summary | None:
    if is_number(value):
        return constant("", value).summary
    if writes is not None and value is writes:
        return _before(tape, writes, before)
    raw = value._raw if is_tracked(value) else value
    return light(raw)


def _before(tape: "LiveTape", x: TrackedArray, before: Any) -> Summary:
    """Say what an overwritten operand held."""
    if before is not None:
        return measure(before)
    shape = tuple(np.shape(x._raw))
    blank = Summary(shape, dtype_name(x._raw), device_name(x._raw), math.prod(shape))
    known = [tape.records[i].output for i in tape.parents(x) if i < len(tape.records)]
    kinds = {summary.kind for summary in known if summary is not None}
    return replace(
        blank, nan=int("nan" in kinds), posinf=int("posinf" in kinds),
        neginf=int("neginf" in kinds),
    )  # fmt: skip


def _operand(
    tape: "LiveTape", label: str, value: Any, quick: Summary | None,
    first: tuple[int, ...] | None, shape: tuple[int, ...], detailed: bool,
    writes: TrackedArray | None, before: Any,
) -> Operand:  # fmt: skip
    if is_number(value):
        return constant(label, value)
    raw = value._raw if is_tracked(value) else value
    if value is writes:
        raw = before
    summary = quick if raw is None or not detailed or value is writes else measure(raw)
    item = Operand(label, summary, None if raw is None else at_broadcast(raw, first, shape))
    if summary is None or not summary.bad:
        return item
    if is_tracked(value):
        item.parents = tape.parents(value)
        known, came_bad = value._cell.label, value._cell.bad
    else:
        known, came_bad = tape.inputs.get(id(raw)), id(raw) in tape.bad_inputs
        item.parents = () if known is not None else tape.lost()
    if not item.parents:
        item.source, item.label = ("input", known) if known is not None else ("unknown", label)
        if known is not None and not came_bad:
            item.source = "overwritten"
            tape.notes.append(tape.unseen())
        if id(raw) in tape.unwritten:
            item.source = "uninitialised"
    return item


def _refine(
    record: OpRecord, function: Callable[..., Any], args: tuple[Any, ...],
    kwargs: dict[str, Any], writes: TrackedArray | None,
) -> None:  # fmt: skip
    output = record.output
    if record.name in _SOFTMAX:
        _add_masked_rows(record, args)
    if output is not None and not output.nan and writes is None and record.name not in _UNREPEATED:
        record.wide = wide(function, args, kwargs)


def _add_masked_rows(record: OpRecord, args: tuple[Any, ...]) -> None:
    """Count the rows of a softmax that are -Inf throughout."""
    axis = record.params.get("dim", args[1] if len(args) > 1 else -1)
    x = args[0]._raw if args and is_tracked(args[0]) else None
    view = None if x is None else on_host(x)
    if view is not None and view.ndim and isinstance(axis, int):
        rows = int((np.maximum.reduce(view, axis=axis) == -np.inf).sum())
        if rows:
            record.params["masked_rows"] = rows


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
