"""An operation that made bad values, or a reading that nothing explains."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from anynan._base.summary import Summary
from anynan._diagnosis import messages
from anynan._diagnosis.causes import advise, explain
from anynan._diagnosis.evidence import Evidence
from anynan._diagnosis.investigation import Investigation, operation, place
from anynan._diagnosis.kinds import weights
from anynan._diagnosis.lineage import Lineage, OpRecord
from anynan._diagnosis.rules.repair import Repair
from anynan._diagnosis.rules.situation import Situation
from anynan._readings.readings import Reading, Site
from anynan._readings.step import Step
from anynan.events import Event, Kind, Phase, Spread

_EDGES = 4


class _Subject(NamedTuple):
    """Say what an event is about."""

    layer: str | None
    phase: Phase
    kind: Kind
    tensor: str
    call: int
    parameter: str | None
    summary: Summary | None
    surfaced: str | None = None


def is_mask(case: Investigation) -> bool:
    """Tell whether what was read of a layer may be meant there, whatever comes of it later."""
    if case.replayed is None or case.reading.phase != "forward":
        return False
    shown = [sink for sink in case.replayed.sinks if sink.kind == case.kind]
    own = [s for s in shown if (s.phase, s.layer) == ("forward", case.reading.layer)]
    alone = case.lineage.placed_only and bool(shown)
    return alone or (bool(own) and all(sink in case.lineage.spared for sink in own))


def of_mask(_case: Investigation, _: bool) -> None:
    """Report nothing."""


def is_all_else(_case: Investigation) -> bool:
    """Hold for whatever is left."""
    return True


def event(case: Investigation, _: bool) -> Event:
    """Report the operation, or what was read where none is known."""
    lineage = case.lineage
    if lineage.sink is None and case.reading.phase != "parameter":
        case.say_clean()
    elif case.replayed is not None:
        case.watched = case.watched or case.seen or case.replayed.whole
    if lineage.origin is None:
        _turn_to_the_likeliest_weight(case)
    told = _event(case, lineage)
    return weights.behind(case, told) or told


def _event(case: Investigation, lineage: Lineage) -> Event:
    origin, then, history = lineage.origin, lineage.then, case.monitor.history
    harmed = case.reading.phase if lineage.sink is None else lineage.sink.phase
    if origin is not None and origin.phase != "backward":
        # Results may be read after gradients: what the step returned bad was not hidden in it.
        harmed = next((s.phase for s in _forward_and_bad(case)), harmed)
    subject = _of_reading(case) if origin is None else _of_operation(case, origin)
    hidden = None if origin is None else _hidden_before(origin, lineage)
    if hidden is not None:
        case.notes.append(messages.HIDDEN_BEFORE(layer=hidden.layer))
    cause, code = advise(
        Situation(
            phase=subject.phase,
            kind=subject.kind,
            layer=subject.layer,
            tensor=subject.tensor,
            parameter=subject.parameter,
            summary=subject.summary,
            record=origin,
            then=then,
            growth=history.curve(case.reading.site),
            scale=case.evidence.scale if case.rows.scale is None else float(case.rows.scale),
            surfaced=harmed if subject.phase != harmed else None,
            overwritten=origin is None and _is_overwritten(case),
            watched=case.watched,
            trained=case.trained or history.trains(case.rows.sites),
            **_updated(case, subject),
        )
    )
    if origin is not None:
        case.repair = Repair.of(origin, code)
    said = subject._asdict()
    return case.event(
        operation=operation(origin),
        cause=cause,
        trail=case.trail(subject.layer, subject.phase, subject.call),
        spread=Spread(case.later, said.pop("surfaced")),
        expected=None if origin is None else origin.expected,
        iteration=None if origin is None else origin.iteration,
        shard=None if origin is None else origin.shard,
        then=operation(then),
        **said,
    )


def _updated(case: Investigation, subject: _Subject) -> dict[str, Any]:
    """Give what is known of a weight that an update made bad."""
    if subject.phase == "optimizer" and subject.parameter is not None:
        for item in case.evidence.weights():
            if item.name == subject.parameter:
                return {"gradient": item.gradient, "state": item.state, "settings": item.settings}
    return {}


def _of_reading(case: Investigation) -> _Subject:
    reading, site = case.reading, case.reading.site
    return _Subject(
        site.layer, site.phase, case.kind, site.tensor, reading.call, site.parameter,
        case.evidence.summary,
    )  # fmt: skip


def _of_operation(case: Investigation, origin: OpRecord) -> _Subject:
    """Say where an operation made bad values, and where they were read."""
    read = _of_reading(case)
    here = (origin.layer, origin.phase) == (read.layer, read.phase)
    kind, summary, output = read.kind, read.summary, origin.output
    if output is not None:
        kind = output.kind or kind
        summary = summary if here and summary is not None else output
    tensor, surfaced = read.tensor, None
    if not here:
        tensor = "output" if origin.phase != "backward" else "grad"
        surfaced = place(read.phase, read.layer, read.parameter)
        if case.replayed is not None and case.replayed.raised is not None:
            surfaced = read.tensor
        elif read.phase == "value":
            surfaced = f"the check of {read.tensor}"
    parameter = origin.parameter or (read.parameter if here else None)
    return _Subject(
        origin.layer, origin.phase, kind, tensor, origin.call, parameter, summary, surfaced
    )


def _forward_and_bad(case: Investigation) -> Iterator[Site]:
    """Yield the places of the step at which a forward value or a loss was NaN or +Inf."""
    rows = case.rows
    for order in range(len(rows.lo)):
        site = rows.sites[order]
        if site.phase in ("forward", "loss") and rows.reading(order).kind in ("nan", "posinf"):
            yield site


def _hidden_before(origin: OpRecord, lineage: Lineage) -> OpRecord | None:
    """Give an earlier layer's record of the same fault that reached nothing which matters."""
    for record in lineage.contained:
        forward = record.phase == origin.phase == "forward"
        same = forward and record.name == origin.name and record.index < origin.index
        if same and record.layer and record.layer != origin.layer:
            return record
    return None


def _is_overwritten(case: Investigation) -> bool:
    """Tell whether the bad reading is of an argument that something unseen wrote into."""
    sinks = [] if case.replayed is None else case.replayed.sinks
    return any(sink.overwritten and sink.label == case.reading.site.tensor for sink in sinks)


def _turn_to_the_likeliest_weight(case: Investigation) -> None:
    """Choose among weights whose gradients were only read at the end of a step.

    A model mostly lists its weights in the order in which its layers run, and a backward pass runs
    from the last to the first: what went bad first stands before one that stayed finite.
    """
    reading, rows = case.reading, case.rows
    if not case.ends or not _is_gradient(reading):
        return
    read = list(filter(_is_gradient, map(rows.reading, range(len(rows.sites)))))
    bad = [other for other in read if other.kind is not None]
    if len(bad) < 2:
        return
    count = f"{len(bad)} of {len(read)}" if len(bad) < len(read) else f"all {len(read)}"
    likely = ""
    if case.in_order and case.evidence_of is not None:
        edges = [a for a, b in pairwise(read) if a.kind is not None and b.kind is None]
        edges = edges or bad[-1:]
        names = " or ".join(str(edge.site.parameter) for edge in edges[-_EDGES:])
        likely = f", probably that of {names}: mostly a backward pass runs up the model's list"
        likeliest = edges[-1]
        if likeliest.order != reading.order:
            case.reading, case.kind = likeliest, likeliest.kind or case.kind
            case.evidence = case.evidence_of(likeliest)
    case.unordered = True
    case.notes.append(messages.MANY_WEIGHTS(count=count, likely=likely))


def _is_gradient(reading: Reading) -> bool:
    return reading.phase == "backward" and reading.site.parameter is not None


def another(case: Investigation, lineage: Lineage) -> tuple[Event, Repair]:
    """Report a fault that was left in a run with the first one repaired, and how to repair it."""
    origin, sink = lineage.origin, lineage.sink
    assert origin is not None
    assert sink is not None
    phase, summary = origin.phase, origin.output
    kind = (None if summary is None else summary.kind) or case.kind
    harmed = sink.phase if sink.phase != phase else None
    cause, code = advise(
        Situation(
            phase=phase, kind=kind, layer=origin.layer, summary=summary, record=origin,
            then=lineage.then, surfaced=harmed,
        )
    )  # fmt: skip
    alone = replace(case, notes=[], evidence=replace(case.evidence, notes=()))
    event = alone.event(
        layer=origin.layer,
        phase=phase,
        kind=kind,
        call=origin.call,
        tensor="output" if phase != "backward" else "grad",
        parameter=origin.parameter,
        summary=summary,
        operation=operation(origin),
        cause=cause,
        then=operation(lineage.then),
        spread=Spread(),
    )
    return event, Repair.of(origin, code)


def contained(record: OpRecord, rows: Step, evidence: Evidence, note: str) -> Event:
    """Tell of an operation whose bad values came to no harm that is known."""
    summary = record.output
    kind = (None if summary is None else summary.kind) or "nan"
    return Event(
        backend=evidence.backend,
        layer=record.layer,
        phase=record.phase,
        kind=kind,
        severity="suspect",
        step=rows.number,
        call=record.call,
        order=len(rows.lo),
        summary=summary,
        operation=operation(record),
        cause=explain(
            Situation(record.phase, kind, layer=record.layer, summary=summary, record=record)
        ),
        expected=record.expected,
        rank=evidence.rank,
        notes=(note,),
    )
