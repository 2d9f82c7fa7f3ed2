"""An operation that made bad values, or a reading that nothing explains."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from anynan._diagnosis import messages
from anynan._diagnosis.causes import advise
from anynan._diagnosis.evidence import Evidence
from anynan._diagnosis.investigation import Investigation, event_of, place
from anynan._diagnosis.kinds import weights
from anynan._diagnosis.lineage import Lineage, OpRecord
from anynan._diagnosis.rules.evidence import magnitude
from anynan._diagnosis.rules.repair import Repair
from anynan._diagnosis.rules.situation import Situation
from anynan._readings.readings import Reading, Site
from anynan._readings.step import Step
from anynan.events import Event, Spread

_EDGES = 4
# No division by an eps makes numbers so much larger than those before.
_BEYOND = 1e12

# What an event takes of the operation itself.
_RAN = ("call", "expected", "iteration", "shard")


def is_mask(case: Investigation) -> bool:
    """Tell whether what was read of a layer may be meant there, whatever comes of it later."""
    if case.replayed is None or case.reading.phase != "forward":
        return False
    shown = [sink for sink in case.replayed.sinks if sink.kind == case.kind]
    own = [s for s in shown if (s.phase, s.layer) == ("forward", case.reading.layer)]
    alone = case.lineage.placed_only and bool(shown)
    return alone or (bool(own) and all(sink in case.lineage.spared for sink in own))


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
    subject, surfaced = _of_reading(case), None
    if origin is not None:
        subject, surfaced = _of_operation(case, origin, subject)
    hidden = None if origin is None else _hidden_before(origin, lineage)
    if hidden is not None:
        case.notes.append(messages.HIDDEN_BEFORE(layer=hidden.layer))
    trained = case.trained or history.trains(case.rows.sites)
    situation = Situation(
        record=origin, then=then, growth=history.curve(case.reading.site),
        jump=_jump(case, origin) if trained else "",
        scale=case.evidence.scale if case.rows.scale is None else float(case.rows.scale),
        surfaced=harmed if subject["phase"] != harmed else None,
        overwritten=origin is None and _is_overwritten(case), watched=case.watched,
        trained=trained, **subject,
        **_updated(case, subject),
    )  # fmt: skip
    cause, code = advise(situation)
    grown = bool(situation.jump) and situation.jump in cause.evidence
    if situation.jump and not grown:
        case.notes.append(messages.GREW(jump=situation.jump))
    ran = {} if origin is None else {name: getattr(origin, name) for name in _RAN}
    if origin is not None and not grown:  # one operation is not what is to be mended
        case.repair = Repair.of(origin, code)
    call = ran.get("call", case.reading.call)
    return case.event(
        situation, cause=cause, trail=case.trail(situation.layer, situation.phase, call),
        spread=Spread(case.later, surfaced), **ran,
    )  # fmt: skip


def _jump(case: Investigation, origin: OpRecord | None) -> str:
    """Say what shows that the last updates made the weights far too large; empty if nothing does.

    What was computed is far above all that a step before came to, and what came in is not;
    gradients do not count. What is far below 0 may be a mask.
    """
    before = case.monitor.history.calmest(case.rows.number)
    if before is None:
        return ""
    most = _BEYOND * max(before[0], 1.0)
    found = [] if origin is None or origin.phase == "backward" else [
        (x.summary.max, "an operand is") for x in origin.operands if x.summary is not None
    ]  # fmt: skip
    for reading in map(case.rows.reading, range(case.reading.order)):
        size = reading.hi or 0.0
        if reading.phase == "input" and not abs(size) < most:
            return ""
        if reading.phase == "forward":
            found.append((size, f"{reading.layer or 'the model'} gave"))
    far = [(size, said) for size, said in found if size is not None and most < size < math.inf]
    if not far:
        return ""
    size, said = max(far)
    return (
        f"{said} up to {magnitude(size)}; step {before[1]} came to {magnitude(before[0])} at most"
    )


def _updated(case: Investigation, subject: dict[str, Any]) -> dict[str, Any]:
    """Give what is known of a weight that an update made bad."""
    if subject["phase"] == "optimizer" and subject["parameter"] is not None:
        for item in case.evidence.weights():
            if item.name == subject["parameter"]:
                return {"gradient": item.gradient, "state": item.state, "settings": item.settings}
    return {}


def _of_reading(case: Investigation) -> dict[str, Any]:
    """Say what was read, as an event names it."""
    site = case.reading.site
    return {
        "layer": site.layer, "phase": site.phase, "kind": case.kind, "tensor": site.tensor,
        "parameter": site.parameter, "summary": case.evidence.summary,
    }  # fmt: skip


def _of_operation(
    case: Investigation, origin: OpRecord, read: dict[str, Any]
) -> tuple[dict[str, Any], str | None]:
    """Say where an operation made bad values, and where they were read, if that is elsewhere."""
    here = (origin.layer, origin.phase) == (read["layer"], read["phase"])
    made: dict[str, Any] = {"layer": origin.layer, "phase": origin.phase}
    if origin.output is not None:
        made["kind"] = origin.output.kind or read["kind"]
        made["summary"] = (here and read["summary"]) or origin.output
    if here:
        return {**read, **made, "parameter": origin.parameter or read["parameter"]}, None
    made |= {"parameter": origin.parameter, "tensor": _result(origin)}
    if case.replayed is not None and case.replayed.raised is not None:
        return {**read, **made}, read["tensor"]
    if read["phase"] == "value":
        return {**read, **made}, f"the check of {read['tensor']}"
    return {**read, **made}, place(read["phase"], read["layer"], read["parameter"])


def _result(origin: OpRecord) -> str:
    return "output" if origin.phase != "backward" else "grad"


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
    summary = origin.output
    situation = Situation(
        phase=origin.phase, kind=(None if summary is None else summary.kind) or case.kind,
        layer=origin.layer, summary=summary, record=origin, then=lineage.then,
        surfaced=sink.phase if sink.phase != origin.phase else None,
    )  # fmt: skip
    cause, code = advise(situation)
    alone = replace(case, notes=[], evidence=replace(case.evidence, notes=()))
    event = alone.event(
        situation, call=origin.call, tensor=_result(origin), parameter=origin.parameter,
        cause=cause, spread=Spread(),
    )  # fmt: skip
    return event, Repair.of(origin, code)


def contained(record: OpRecord, rows: Step, evidence: Evidence, note: str) -> Event:
    """Tell of an operation whose bad values came to no harm that is known."""
    summary = record.output
    kind = (None if summary is None else summary.kind) or "nan"
    situation = Situation(record.phase, kind, layer=record.layer, summary=summary, record=record)
    return event_of(
        situation, evidence, severity="suspect", step=rows.number, call=record.call,
        order=len(rows.lo), expected=record.expected, notes=(note,),
    )  # fmt: skip
