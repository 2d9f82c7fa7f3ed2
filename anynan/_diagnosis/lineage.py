"""From operation records to the origin: which operation made the bad value that matters."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

from anynan._base.summary import Summary
from anynan._base.walks import walk
from anynan._diagnosis.agreement import CheckedPoint
from anynan._readings.policy import may_mask
from anynan.events import Phase, Source

External = Literal[
    "handed", "input", "parameter", "buffer", "constant", "data", "uninitialised", "overwritten",
    "unknown",
]  # fmt: skip


@dataclass(slots=True)
class Operand:
    """Hold one operand of a recorded operation.

    Attributes:
        name: The operation's own name for it (``self``, ``other``, ``grad``, ``result``).
        summary: Its content before the operation ran; None if it could not be seen.
        value: Its element at the output's first bad index, where shapes broadcast.
        parents: Indices of the records that wrote its bad values.
        source: Where a bad operand that no record wrote came from; ``handed`` if code between
            the watched layers gave it to one of them, ``constant`` if the code writes it,
            ``data`` for other arrays that the code holds.
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
        call: Which call of the layer it ran in.
        parameter: The weight that an update's operation writes.
        iteration: Iteration of the innermost loop around it, inside a compiled program.
        shard: The shard it was seen on, where the program says so.
        hidden: Names of the forward operations that took its bad result, or what came of it,
            and gave a finite one; None where the adapter does not know.
        said: What the library itself said of it, where no more is known: ``overflow``,
            ``divide by zero`` or ``invalid value``.
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
    iteration: int | None = None
    shard: int | None = None
    hidden: tuple[str, ...] | None = None
    said: str = ""


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
        overwritten: True for an argument that was finite when the call began, if nothing that
            was watched wrote into it.
        written: True for an Inf that no operation was seen to make, where the code writes one.
    """

    phase: Phase
    layer: str | None
    label: str
    parents: tuple[int, ...]
    kind: str
    overwritten: bool = False
    written: bool = False

    @property
    def masks(self) -> bool:
        """Tell whether it may be a mask, which does no harm by itself."""
        return self.written or may_mask(self.kind, self.phase)


@dataclass(slots=True)
class Replay:
    """Hold what an adapter's second, operation-level run of a step saw.

    Attributes:
        records: Operations with a bad result, in execution order.
        sinks: Where bad values arrived, in execution order.
        notes: What could not be seen, said plainly.
        incoming: True if the gradient was bad already when it came into the model.
        uncompiled: True if the step ran compiled and this run of it did not.
        passed: The places it passed, to be compared with the first run's rows; empty where the
            adapter does not say.
        substituted: True if the gradient it began from stands in for one that was not kept.
        whole: True if it saw every operation of the failing run itself, or of one that agreed
            with it: what no operation explains was then made out of sight.
        inner: True if it ran a model's own call, and not the step around it.
        raised: The exception that ended it.
    """

    records: list[OpRecord] = field(default_factory=list)
    sinks: list[Sink] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    incoming: bool = False
    uncompiled: bool = False
    passed: list[CheckedPoint] = field(default_factory=list)
    substituted: bool = False
    whole: bool = False
    inner: bool = False
    raised: BaseException | None = None

    @property
    def made(self) -> bool:
        """Tell whether an operation made what arrived bad first, and not what came in bad."""
        verdict = trace(self.records, self.sinks)
        return verdict.origin is not None and verdict.outside is None

    def end(self) -> None:
        """Leave out what came after the first harm: it is spread, and tells nothing."""
        roots = _all_roots(self.records)
        for i, sink in enumerate(self.sinks):
            found = _arrived(sink.parents, roots)
            if sink.parents and not sink.masks and not _only_placed(sink, found):
                last = max(sink.parents)
                self.records = self.records[: last + 1]
                self.sinks = [s for s in self.sinks[: i + 1] if all(p <= last for p in s.parents)]
                return


@dataclass(frozen=True, slots=True)
class Root:
    """Name one root of bad values: an operation, a placed constant, or something from outside."""

    index: int
    placed: bool = False
    source: External | None = None
    label: str | None = None


@dataclass(slots=True)
class Lineage:
    """Say which operation is to blame.

    Attributes:
        origin: The first harmful origin, None if nothing harmful was seen.
        outside: Set when the bad values came from outside every operation.
        then: The first NaN on the way, when the origin made an Inf.
        sink: Where the harm was done.
        contained: Origins whose bad values reached nothing that matters.
        placed_only: True if every sink held only placed values (masks).
        spared: Layers' outputs that held only placed values.
    """

    origin: OpRecord | None = None
    outside: Root | None = None
    then: OpRecord | None = None
    sink: Sink | None = None
    contained: list[OpRecord] = field(default_factory=list)
    placed_only: bool = False
    spared: list[Sink] = field(default_factory=list)


PLACING = frozenset(
    {
        "where", "masked_fill", "full", "full_like", "fill", "pad", "index_put", "scatter",
        "masked_scatter", "index_fill", "constant", "copy", "tril", "triu", "nan_to_num",
        "zeros", "ones", "asarray", "setitem",
    }
)  # fmt: skip


# A mask goes into no product.
_PRODUCTS = frozenset({"matmul", "linear", "multiply", "divide", "convolution", "rnn", "square"})


@dataclass(frozen=True, slots=True)
class _Roots:
    """Say where bad values come from: the roots of ``parents``, and ``own``.

    The roots are not listed beyond that, as thousands of faults may meet in one value.

    Attributes:
        parents: Records that passed bad values on.
        own: Roots that lie here.
        real: The earliest root that is not only placed, of all there are.
        placed: The earliest root that is.
    """

    parents: tuple[int, ...] = ()
    own: tuple[Root, ...] = ()
    real: Root | None = None
    placed: Root | None = None

    @property
    def first(self) -> Root | None:
        """Give the earliest root, real ones first."""
        return self.real or self.placed


def trace(
    records: list[OpRecord], sinks: list[Sink], *, neginf: bool = False,
    past: External | None = None,
) -> Lineage:  # fmt: skip
    """Follow bad values from where they were made to where they did harm.

    An origin is an operation with finite operands and a non-finite result, or a NaN result
    with no NaN operand. A NaN made of an Inf inherits the Inf's origin, unless that Inf was
    only placed (a mask). A NaN is never only placed: where the code itself writes one, that is
    the origin. An origin is harmful if a sink's bad values descend from it.

    Args:
        records: Operations with bad results, in execution order.
        sinks: Where bad values arrived, in execution order.
        neginf: Take a computed -Inf that leaves a layer as harm too.
        past: Pass over what came from there.
    """
    roots = _all_roots(records)
    lineage = Lineage(placed_only=bool(sinks))
    harmful: set[int] = set()
    left: list[Sink] = []
    for sink in sinks:
        found = _arrived(sink.parents, roots)
        chosen = found.first
        if chosen is None:
            # Values that nobody was seen writing are not known to be placed.
            lineage.placed_only = lineage.placed_only and sink.masks
        elif past is not None and chosen.source == past:
            continue
        elif _only_placed(sink, found):
            lineage.spared.append(sink)
        elif sink.masks and not neginf:
            if not sink.layer:  # nothing of the model can hide it any more
                left.append(sink)
        else:
            lineage.placed_only = False
            harmful.update(found.parents)
            if lineage.sink is None:
                _blame(lineage, chosen, sink, left, records, roots)
    before = _before(harmful, roots)
    lineage.contained = [
        record
        for record in records
        if record.index not in before and Root(record.index) in roots[record.index].own
    ]
    lineage.then = _first_nan(lineage.origin, records, roots)
    return lineage


def _blame(
    lineage: Lineage, chosen: Root, sink: Sink, left: list[Sink], records: list[OpRecord],
    roots: dict[int, _Roots],
) -> None:  # fmt: skip
    """Name the root of the first harm, and the first place of all that it came to."""
    after = set() if chosen.placed else _after({chosen.index}, roots)
    lineage.sink = next((item for item in left if not after.isdisjoint(item.parents)), sink)
    lineage.outside = None if chosen.source is None else chosen
    lineage.origin = next((record for record in records if record.index == chosen.index), None)
    if chosen.placed:
        lineage.origin = _turned(records, roots, sink) or lineage.origin


def _first_nan(
    origin: OpRecord | None, records: list[OpRecord], roots: dict[int, _Roots]
) -> OpRecord | None:
    """Give the operation that made NaN of an origin's Inf."""
    if origin is None or origin.output is None or origin.output.nan:
        return None
    after = _after({origin.index} if roots[origin.index].own else set(), roots)
    return next(
        (
            record
            for record in records
            if record.index > origin.index
            and record.index in after
            and _has(record.output, "nan")
            and not any(_has(operand.summary, "nan") for operand in record.operands)
        ),
        None,
    )


def _all_roots(records: Iterable[OpRecord]) -> dict[int, _Roots]:
    roots: dict[int, _Roots] = {}
    numbers: dict[int, OpRecord] = {}
    for record in records:
        if record.name == "constant" and record.output is not None and record.output.size == 1:
            numbers[record.index] = record
        for operand in record.operands:
            # A number written where it is used is an operand, and no operation of its own.
            if operand.parents and all(
                (one := numbers.get(parent)) is not None and one.source == record.source
                for parent in operand.parents
            ):
                operand.parents, operand.source, operand.label = (), "constant", "value"
        roots[record.index] = _roots(record, roots)
    return roots


def _only_placed(sink: Sink, found: _Roots) -> bool:
    """Tell whether a layer's output holds only what may be meant there: it does no harm yet."""
    return sink.phase == "forward" and found.first is not None and found.first.placed


def _turned(records: list[OpRecord], roots: dict[int, _Roots], sink: Sink) -> OpRecord | None:
    """Return the operation that made what arrived of another kind that was only placed.

    A loss that is +Inf because a target's score was masked with -Inf is the loss's doing.
    """
    before = _before(set(sink.parents), roots)
    after = _after({index for index in before if roots[index].own}, roots)
    return next(
        (
            record
            for record in records
            if record.index in after
            and record.name not in PLACING
            and _has(record.output, sink.kind)
            and record.operands
            and not any(_has(operand.summary, sink.kind) for operand in record.operands)
        ),
        None,
    )


def _before(indices: set[int], roots: dict[int, _Roots]) -> set[int]:
    """Give these records and all whose bad values they carry."""
    return set(walk((i for i in indices if i in roots), lambda i: roots[i].parents))


def _after(indices: set[int], roots: dict[int, _Roots]) -> set[int]:
    """Give these records and all that carry their bad values."""
    seen = set(indices)
    for index, found in roots.items():  # in execution order
        if not seen.isdisjoint(found.parents):
            seen.add(index)
    return seen


_index = attrgetter("index")


def _earliest(found: Iterable[Root | None]) -> Root | None:
    return min(filter(None, found), key=_index, default=None)


def _join(parts: Sequence[_Roots]) -> _Roots:
    parents = dict.fromkeys(index for part in parts for index in part.parents)
    own = dict.fromkeys(root for part in parts for root in part.own)
    real = _earliest(part.real for part in parts)
    return _Roots(tuple(parents), tuple(own), real, _earliest(part.placed for part in parts))


def _arrived(indices: Iterable[int], roots: dict[int, _Roots]) -> _Roots:
    """Give what records hand on together, those that were not recorded left out."""
    found = {index: roots[index] for index in indices if index in roots}
    real = _earliest([part.real for part in found.values()])
    return _Roots(tuple(found), (), real, _earliest([part.placed for part in found.values()]))


def _root(token: Root) -> _Roots:
    return _Roots((), (token,), None if token.placed else token, token if token.placed else None)


def _has(summary: Summary | None, kind: str) -> bool:
    return summary is not None and bool(getattr(summary, kind, 0))


def _roots(record: OpRecord, roots: dict[int, _Roots]) -> _Roots:
    """Give the roots of one record's bad values."""
    # A mask's Inf is placed; a NaN that the code itself writes is no mask.
    placed = record.name in PLACING and not _has(record.output, "nan")
    own = _root(Root(record.index, placed=placed))
    parts: list[_Roots] = []
    of_nan: list[_Roots] = []
    for operand in record.operands:
        part = _operand_roots(record, operand, roots)
        parts.append(part)
        if _has(operand.summary, "nan"):
            of_nan.append(part)
    if record.forward is not None:
        part = _arrived((record.forward,), roots)
        parts.append(part)
        if part.real is not None:
            of_nan.append(part)
    inherited, nans = _join(parts), _join(of_nan)
    output = record.output
    if record.name in PLACING:
        return inherited if inherited.real is not None else _join([inherited, own])
    if output is None or inherited.first is None:
        return own if inherited.first is None else inherited
    if inherited.real is not None:
        return nans if nans.real is not None else inherited
    # Only placed values came in: a NaN, or an Inf beside them, is this operation's own.
    if output.nan and nans.first is None:
        return own
    return own if _made_inf(record, output) else inherited


def _made_inf(record: OpRecord, output: Summary) -> bool:
    """Tell whether an operation that was given placed Inf made more of it, or of another kind."""
    if not output.nan and output.posinf + output.neginf > _carried(record, output.size):
        return True
    # A mask's -Inf that arithmetic turned into +Inf is no mask any more.
    summaries = [operand.summary for operand in record.operands if operand.summary is not None]
    return bool(output.posinf) and not any(summary.posinf for summary in summaries)


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


def _operand_roots(record: OpRecord, operand: Operand, roots: dict[int, _Roots]) -> _Roots:
    summary = operand.summary
    found = _arrived(operand.parents, roots)
    if found.first is not None:
        return found
    if operand.source is None or (summary is not None and not summary.bad):
        return _Roots()
    if _is_placed(record, operand, summary):
        return _root(Root(record.index, placed=True))
    return _root(Root(record.index, source=operand.source, label=operand.label))


def _is_placed(record: OpRecord, operand: Operand, summary: Summary | None) -> bool:
    """Tell whether a bad operand that no record wrote was put there, as a mask is."""
    if summary is None:
        return operand.source == "constant"
    only_neginf = not summary.nan and not summary.posinf
    additive = record.name not in _PRODUCTS
    match operand.source:
        case "constant":
            return not summary.nan
        case "input":
            return additive and is_mask(summary)
        case "handed":
            return additive and only_neginf
        # A bias with a mask in it, made once: no program keeps another -Inf between its steps.
        case "buffer" | "unknown":
            return only_neginf
    return False


def is_mask(summary: Summary) -> bool:
    """Tell whether an array holds only 0 and -Inf: an additive mask."""
    return (
        summary.neginf > 0
        and not summary.nan
        and not summary.posinf
        and summary.zero + summary.neginf == summary.size
    )
