"""From operation records to the origin: which operation made the bad value that matters."""

from dataclasses import dataclass, field
from typing import Any, Literal

from anynan.events import Phase, Source
from anynan.summary import Summary

External = Literal["input", "parameter", "buffer", "constant", "uninitialised", "unknown"]


@dataclass(slots=True)
class Operand:
    """Hold one operand of a recorded operation.

    Attributes:
        name: The operation's own name for it (``self``, ``other``, ``grad``, ``result``).
        summary: Its content before the operation ran; None if it could not be seen.
        value: Its element at the output's first bad index, where shapes broadcast.
        parents: Indices of the records that wrote its bad values.
        source: Where a bad operand that no record wrote came from.
        label: The name of that source (``batch['image']``, ``encoder.weight``).
    """

    name: str
    summary: Summary | None
    value: float | complex | None = None
    parents: tuple[int, ...] = ()
    source: External | None = None
    label: str | None = None


@dataclass(slots=True)
class OpRecord:
    """Hold one operation whose result was bad, as an adapter saw it in a replay.

    Attributes:
        index: Position in execution order, unique in the replay.
        name: Canonical name, the array-API's where one exists.
        raw: The framework's own name.
        layer: Layer path, None outside every watched layer.
        phase: Phase it ran in. A backward record is placed at the forward layer and line.
        output: What came out.
        operands: What went in. For a backward record ``grad`` is the incoming gradient and
            the others are what the forward operation saved.
        source: The user's line; for a backward record the forward line that made it.
        params: Plain arguments that a cause rule may need (``dim``, ``exponent``, ``eps``).
        value: The output at its first bad index.
        forward: Index of the forward record whose bad result this backward record reuses.
        feeds: Names of the operations whose backward gave the incoming gradient (the
            forward consumers of this operation's result), for a backward record.
        expected: Reason, if it ran inside ``anynan.expect``.
        direct: True for an operation that the user's own code ran during the backward pass
            (a custom function's backward, a gradient hook), and not autograd.
        wide: The same result's largest magnitude computed in float32 or float64, when the
            adapter could do that and it is finite there.
    """

    index: int
    name: str
    raw: str
    layer: str | None
    phase: Phase
    output: Summary | None
    operands: tuple[Operand, ...] = ()
    source: Source | None = None
    params: dict[str, Any] = field(default_factory=dict)
    value: float | complex | None = None
    forward: int | None = None
    feeds: tuple[str, ...] = ()
    expected: str | None = None
    wide: float | None = None
    direct: bool = False
    call: int = 0
    parameter: str | None = None


@dataclass(frozen=True, slots=True)
class Sink:
    """Mark a place where bad values do harm.

    Attributes:
        phase: ``forward`` for a layer's output, ``loss``, ``backward`` for a gradient that
            leaves a layer or lands on a parameter, ``parameter`` for a written weight.
        layer: Layer path, None outside every watched layer.
        label: Which tensor.
        parents: Records that wrote its bad values.
        kind: The worst kind in it.
    """

    phase: Phase
    layer: str | None
    label: str
    parents: tuple[int, ...]
    kind: str


@dataclass(slots=True)
class Replay:
    """Hold what an adapter's second, operation-level run of a step saw.

    Attributes:
        records: Operations with a bad result, in execution order.
        sinks: Where bad values arrived, in execution order.
        notes: What could not be seen, said plainly.
        incoming: True if the gradient was bad already when it came into the model.
    """

    records: list[OpRecord] = field(default_factory=list)
    sinks: list[Sink] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    incoming: bool = False


@dataclass(frozen=True, slots=True)
class Token:
    """Name one root of bad values: an operation, a placed constant, or something from outside."""

    index: int
    placed: bool = False
    source: External | None = None
    label: str | None = None


@dataclass(slots=True)
class Verdict:
    """Say which operation is to blame.

    Attributes:
        origin: The first harmful origin, None if nothing harmful was seen.
        outside: Set when the bad values came from outside every operation.
        then: The first NaN on the way, when the origin made an Inf.
        sink: Where the harm was done.
        contained: Origins whose bad values reached nothing that matters.
        placed_only: True if every sink held only placed values (masks).
    """

    origin: OpRecord | None = None
    outside: Token | None = None
    then: OpRecord | None = None
    sink: Sink | None = None
    contained: list[OpRecord] = field(default_factory=list)
    placed_only: bool = False


PLACING = frozenset(
    {
        "where", "masked_fill", "full", "full_like", "fill", "pad", "index_put", "scatter",
        "masked_scatter", "index_fill", "constant", "copy", "tril", "triu", "nan_to_num",
        "zeros", "ones", "asarray", "setitem",
    }
)  # fmt: skip


def trace(records: list[OpRecord], sinks: list[Sink]) -> Verdict:
    """Follow bad values from where they were made to where they did harm.

    An origin is an operation with finite operands and a non-finite result, or a NaN result
    with no NaN operand. A NaN made of an Inf inherits the Inf's origin, unless that Inf was
    only placed (a mask). An origin is harmful if a sink's bad values descend from it.

    Args:
        records: Operations with bad results, in execution order.
        sinks: Where bad values arrived, in execution order.
    """
    by_index = {record.index: record for record in records}
    roots: dict[int, frozenset[Token]] = {}
    for record in records:
        roots[record.index] = _roots(record, roots)
    verdict = Verdict(placed_only=bool(sinks))
    harmful: set[int] = set()
    left: dict[int, Sink] = {}
    for sink in sinks:
        tokens = frozenset[Token]().union(*(roots.get(p, frozenset()) for p in sink.parents))
        real = {token for token in tokens if not token.placed}
        masks_only = sink.phase == "forward" and sink.kind == "neginf"
        if not real and (sink.phase == "forward" or not tokens):
            continue
        if masks_only:
            if not sink.layer:  # nothing of the model can hide it any more
                left |= {token.index: sink for token in real if token.index not in left}
            continue
        verdict.placed_only = False
        chosen = min(real or tokens, key=lambda token: token.index)
        harmful |= {token.index for token in real or tokens}
        if verdict.sink is None:
            verdict.sink = left.get(chosen.index, sink)
            if chosen.source is not None:
                verdict.outside = chosen
            verdict.origin = by_index.get(chosen.index)
            if not real:
                verdict.origin = _turned(records, roots, tokens, sink) or verdict.origin
    verdict.contained = [
        record
        for record in records
        if record.index not in harmful and Token(record.index) in roots[record.index]
    ]
    origin = verdict.origin
    if origin is not None and origin.output is not None and not origin.output.nan:
        mine = {token for token in roots[origin.index] if token.index == origin.index}
        verdict.then = next(
            (
                record
                for record in records
                if record.index > origin.index
                and record.output is not None
                and record.output.nan
                and roots[record.index] & mine
                and not any(
                    operand.summary is not None and operand.summary.nan
                    for operand in record.operands
                )
            ),
            None,
        )
    return verdict


def _turned(
    records: list[OpRecord],
    roots: dict[int, frozenset[Token]],
    tokens: frozenset[Token],
    sink: Sink,
) -> OpRecord | None:
    """Return the operation that made what arrived of another kind that was only placed.

    A loss that is +Inf because a target's score was masked with -Inf is the loss's doing.
    """
    return next(
        (
            record
            for record in records
            if roots[record.index] & tokens
            and record.name not in PLACING
            and _has(record.output, sink.kind)
            and record.operands
            and not any(_has(operand.summary, sink.kind) for operand in record.operands)
        ),
        None,
    )


def _has(summary: Summary | None, kind: str) -> bool:
    return summary is not None and bool(getattr(summary, kind, 0))


def _roots(record: OpRecord, roots: dict[int, frozenset[Token]]) -> frozenset[Token]:
    """Give the roots of one record's bad values."""
    own = frozenset({Token(record.index, placed=record.name in PLACING)})
    inherited: set[Token] = set()
    of_nan: set[Token] = set()
    for operand in record.operands:
        tokens = _operand_roots(record, operand, roots)
        inherited |= tokens
        if operand.summary is not None and operand.summary.nan:
            of_nan |= tokens
    if record.forward is not None and record.forward in roots:
        inherited |= roots[record.forward]
        of_nan |= {token for token in roots[record.forward] if not token.placed}
    real = frozenset(token for token in inherited if not token.placed)
    output = record.output
    if record.name in PLACING:
        return frozenset(inherited) | own if not real else frozenset(inherited)
    if output is None or not inherited:
        return frozenset(inherited) or own
    if real:
        return frozenset(of_nan or inherited)
    # Only placed values came in: a NaN, or an Inf beside them, is this operation's own.
    if output.nan and not of_nan:
        return own
    if not output.nan and output.posinf + output.neginf > _carried(record, output.size):
        return own
    # A mask's -Inf that arithmetic turned into +Inf is no mask any more.
    summaries = [operand.summary for operand in record.operands if operand.summary is not None]
    if output.posinf and not any(summary.posinf for summary in summaries):
        return own
    return frozenset(inherited)


def _carried(record: OpRecord, size: int) -> float:
    """Count the Inf that the operands bring along, broadcast to the result's size."""
    total = 0.0
    for operand in record.operands:
        summary = operand.summary
        if summary is None or not summary.size:
            continue
        if summary.posinf + summary.neginf:
            if summary.size > size or size % summary.size:
                return float("inf")
            total += (summary.posinf + summary.neginf) * size / summary.size
    return total


def _operand_roots(
    record: OpRecord, operand: Operand, roots: dict[int, frozenset[Token]]
) -> frozenset[Token]:
    summary = operand.summary
    found = frozenset[Token]().union(*(roots.get(p, frozenset()) for p in operand.parents))
    if found:
        return found
    if operand.source is None or (summary is not None and not summary.bad):
        return frozenset()
    if operand.source == "constant" or (
        operand.source == "input" and summary is not None and is_mask(summary)
    ):
        return frozenset({Token(record.index, placed=True)})
    # A bias with a mask in it, made once: no program keeps another -Inf between its steps.
    kept = operand.source in ("buffer", "unknown")
    if kept and summary is not None and not summary.nan and not summary.posinf:
        return frozenset({Token(record.index, placed=True)})
    return frozenset({Token(record.index, source=operand.source, label=operand.label)})


def is_mask(summary: Summary) -> bool:
    """Tell whether an array holds only 0 and -Inf: an additive mask."""
    return (
        summary.neginf > 0
        and not summary.nan
        and not summary.posinf
        and summary.zero + summary.neginf == summary.size
    )
