"""From a bad reading to an event: replay, follow the lineage, name the cause."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from typing import Any

from anynan._base.summary import Summary
from anynan._diagnosis import messages
from anynan._diagnosis.agreement import Passed, parting
from anynan._diagnosis.causes import STEP, UNKNOWN, Situation, advise, explain
from anynan._diagnosis.evidence import BadParameter, Evidence
from anynan._diagnosis.lineage import OpRecord, Replay, Sink, Token, Verdict, is_mask, trace
from anynan._diagnosis.messages import INFERRED
from anynan._diagnosis.rules.circumstance import PROBABLE, is_label
from anynan._diagnosis.rules.evidence import seen
from anynan._diagnosis.rules.overflow import WRITTEN
from anynan._diagnosis.rules.repair import Repair
from anynan._readings.monitor import Monitor
from anynan._readings.norms import NORM, Finding
from anynan._readings.policy import may_mask
from anynan._readings.readings import Reading, Rows, Site
from anynan.errors import reason
from anynan.events import NON_FINITE, STATE, Cause, Event, Kind, Operation, Phase, Spread

_UNWATCHED = "outside what is watched"
_EDGES = 4
_INFERRED = INFERRED(
    what="the batch",
    why="it was bad before anything else was, and no second run shows what came of it",
)
_INFERRED_OF_BUFFER = INFERRED(
    what="this buffer",
    why="it was bad before, nothing that came of its layer was "
    "finite, and no second run shows what came of it",
)
_INFERRED_OF_INFINITE = INFERRED(
    what="this weight",
    why="it was infinite before anything else was bad, and what "
    "is computed of Inf may be finite, such as a 0",
)
_INFERRED_OF_WEIGHT = INFERRED(
    what="this weight",
    why="the code wrote the bad value itself, and may have chosen "
    "to because of what came of this weight",
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """Hold what is known of bad values that came in with the data.

    Attributes:
        reading: Their reading.
        kind: What is bad.
        evidence: What the adapter knows of them.
        harmless: The same came in before, and nothing came of it.
    """

    reading: Reading
    kind: Kind
    evidence: Evidence
    harmless: bool = False


@dataclass(slots=True)
class Case:
    """Hold what is known of one bad reading while the event is put together."""

    reading: Reading
    kind: Kind
    rows: Rows
    evidence: Evidence
    later: int = 0
    clean: int | None = None
    updates: list[int] = field(default_factory=list)
    replayed: Replay | None = None
    seen: bool = False
    together: bool = False
    unread: str = ""
    watched: bool = False
    ends: bool = False
    came_in: list[Arrival] = field(default_factory=list)
    meant: Mapping[str, int] = field(default_factory=dict)
    trained: bool = False
    notes: list[str] = field(default_factory=list)
    repair: Repair | None = None
    unshown: bool = False  # a second run was asked for, and did not show it
    of_model: bool = True
    in_order: bool = False
    unordered: bool = False  # read together, so no trail leads there
    evidence_of: Callable[[Reading], Evidence] | None = None


_GAVE = (
    "what became of it on the way to the loss is outside the model and was not seen: track the "
    "training step function to be sure"
)


def diagnose(case: Case, monitor: Monitor) -> Event | None:
    """Find the origin of a bad reading and say what caused it.

    Returns:
        The event, or None if a replay shows that only placed values (masks) are there.
    """
    reading = case.reading
    verdict = Verdict()
    if reading.phase == "input":  # too large: what is not finite waits for the harm it does
        case.came_in = [Arrival(reading, case.kind, case.evidence)]
        return _input_event(case, verdict, None)
    watched = case.seen  # every operation of the first run itself
    if case.replayed is not None:
        case.notes.extend(case.replayed.notes)
    parted = _parted(case) if not watched else None
    if parted is not None:
        case.replayed = None
        case.notes.append(messages.REPLAY_PARTED(parted=parted))
    if case.replayed is not None and case.replayed.inner and parted is None:
        case.notes.append(messages.CALL_ALONE())
    if case.replayed is not None:
        # A forward reading fails for -Inf only where the policy says so; a loss that is made
        # outside of the model, for the -Inf that the model gave.
        gave = reading.phase == "loss" and case.replayed.incoming
        neginf = gave or may_mask(case.kind, reading.phase)
        verdict = _traced(case, case.replayed, neginf=neginf)
        if reading.phase == "forward" and _is_placed(case, verdict, case.replayed.sinks):
            return None
    outside = verdict.outside
    incoming = case.replayed is not None and case.replayed.incoming
    origin = None if verdict.sink is None else verdict.origin
    if incoming and reading.phase == "loss" and origin is not None and origin.phase == "forward":
        incoming = False
        case.notes.append(_GAVE)
    elsewhere = incoming or verdict.sink is None or (outside and outside.source == "handed")
    if case.rows.carried and elsewhere:  # a layer was seen handing on what came in
        return _input_event(case, Verdict(), None)
    if incoming:
        guilty = _to_blame(case) if reading.phase == "loss" else None
        if guilty is None:
            return _incoming_event(case)
        case.notes.append(_INFERRED)
        return _input_event(case, verdict, guilty.reading.site.tensor)
    if outside is not None and outside.source == "input":
        return _input_event(case, verdict, outside.label)
    converted = _converted(case, verdict.origin)
    if converted is not None:
        return _input_event(case, verdict, converted.reading.site.tensor)
    if verdict.sink is None and case.came_in:
        guilty = _to_blame(case)
        if guilty is not None:
            case.notes.append(_INFERRED)
            return _input_event(case, verdict, guilty.reading.site.tensor)
        names = ", ".join(arrival.reading.site.tensor for arrival in case.came_in)
        case.notes.append(messages.ALSO_BAD(names=f"{names} came in bad,"))
    if outside is not None and outside.source == "handed":
        return _handed_event(case, monitor, verdict, outside)
    blamed = outside is not None and outside.source in ("parameter", "buffer")
    # What an update wrote since may be bad because of this reading, and does not explain it.
    unexplained = verdict.sink is None and not any(step >= reading.step for step in case.updates)
    unexplained = unexplained and not _is_before_its_weight(case)
    if blamed or reading.phase == "parameter" or unexplained:
        found = _parameter_event(case, monitor, verdict, outside if blamed else None)
        if found is not None:
            return found
    if verdict.sink is None:
        before = _given_bad(case, monitor) if reading.phase == "forward" else None
        # The loss of a model that is tracked alone is made outside of it, unless a second run, of
        # which no more is known, was of a step of its framework's own.
        unshown = case.replayed is None or case.together
        made_outside = reading.phase == "loss" and case.of_model and unshown and parted is None
        made_outside = made_outside and _gave_something(case)
        if before is not None or made_outside or _arrived_bad(case):
            _say_clean(case)
            return before or _incoming_event(case)
    if verdict.sink is None and reading.phase != "parameter":
        _say_clean(case)
    elif case.replayed is not None:
        case.watched = case.watched or watched or case.replayed.whole
    if verdict.origin is None:
        _turn_to_the_likeliest_weight(case)
    event = _operation_event(case, monitor, verdict)
    return _chosen_for_weight(case, monitor, verdict, event) or event


def _traced(case: Case, replayed: Replay, *, neginf: bool) -> Verdict:
    """Follow what was bad to where it was made.

    What a layer made of bad data does no harm if it is dealt with: what counts is what came out of
    the model, and of a layer, whether it made something bad by itself.
    """
    records, sinks = replayed.records, replayed.sinks
    if not case.came_in:
        return trace(records, sinks, neginf=neginf)
    if case.reading.layer and case.reading.phase == "forward":
        verdict = trace(records, sinks, neginf=neginf, past="input")
        return verdict if verdict.sink is not None else trace(records, sinks, neginf=neginf)
    left = [sink for sink in sinks if sink.phase != "forward" or not sink.layer]
    return trace(records, left or sinks, neginf=neginf)


def _turn_to_the_likeliest_weight(case: Case) -> None:
    """Choose among weights whose gradients were only read at the end of a step.

    A model mostly lists its weights in the order in which its layers run, and a backward pass runs
    from the last to the first: what went bad first stands before one that stayed finite.
    """
    reading, rows = case.reading, case.rows
    if not case.ends or reading.phase != "backward" or reading.site.parameter is None:
        return
    read = [rows.reading(i) for i, site in enumerate(rows.sites) if _is_gradient(site)]
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


def _is_gradient(site: Site) -> bool:
    return site.phase == "backward" and site.parameter is not None


def _is_placed(case: Case, verdict: Verdict, sinks: list[Sink]) -> bool:
    """Tell whether what was read of a layer may be meant there, whatever comes of it later."""
    shown = [sink for sink in sinks if sink.kind == case.kind]
    own = [s for s in shown if (s.phase, s.layer) == ("forward", case.reading.layer)]
    alone = verdict.placed_only and bool(shown)
    return alone or (bool(own) and all(sink in verdict.spared for sink in own))


def _say_clean(case: Case) -> None:
    """Note that no operation of a second run, or of the watched first one, explains a reading."""
    replayed = case.replayed
    if replayed is None:
        return
    watched, case.watched = case.seen, case.watched or case.seen or replayed.whole
    if not replayed.whole:  # else its own notes say it
        clean = messages.COMPILED_ONLY if replayed.uncompiled else messages.REPLAY_CLEAN
        said = messages.OPERATION_UNSEEN if watched and not case.together else clean
        case.notes.append(said())


def _arrived_bad(case: Case) -> bool:
    """Tell whether the first gradient that was read of a backward pass was bad already."""
    reading, rows = case.reading, case.rows
    if reading.phase != "backward" or reading.site.parameter is not None:
        return False
    if not case.in_order or case.kind not in NON_FINITE:
        return False
    if case.replayed is not None and case.replayed.uncompiled:
        return False
    return not reading.order or rows.sites[reading.order - 1].phase != "backward"


def _given_bad(case: Case, monitor: Monitor) -> Event | None:
    """Report what a layer was given, where that was bad and no operation is known to have made it.

    Between two layers runs the code of what holds both.
    """
    summary, model = (None, None) if case.rows.given is None else case.rows.given()
    layer = case.reading.layer
    if summary is None or not layer or case.kind not in NON_FINITE:
        return None
    if model is None:
        return _between(case, monitor, layer, summary, "input")
    names = zip(layer.split("."), (_layer_before(case, layer) or "").split("."), strict=False)
    around = ".".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], names))
    around = around if len(around) > len(model) else model
    event = _between(case, monitor, layer, summary, "input")
    assert event.cause is not None
    where = "the model's own code" if not around else f"the code of {around}"
    cause = replace(
        event.cause,
        text=event.cause.text.replace(_UNWATCHED, f"in {where}"),
        fix="wrap what is computed there in anynan.check(...), or track with level='operation'",
    )
    return replace(event, layer=around, phase="forward", cause=cause)


def shows(case: Case, replayed: Replay) -> bool:
    """Tell whether a second run saw the fault, and the same values as the first run before it."""
    if parting(case.rows, case.reading, replayed.passed, ends=case.ends) is not None:
        return False
    if replayed.incoming:
        return True
    neginf = may_mask(case.kind, case.reading.phase)
    verdict = trace(replayed.records, replayed.sinks, neginf=neginf)
    return verdict.sink is not None or verdict.placed_only


def _converted(case: Case, origin: OpRecord | None) -> Arrival | None:
    """Give what came in and was made into the framework's own array before it was used."""
    if origin is None:
        return None
    made = [item.summary for item in origin.operands if item.source == "constant"]
    if origin.name == "constant":
        made.append(origin.output)

    def known(held: Summary | None) -> tuple[Any, ...] | None:
        if held is None:
            return None
        return held.shape, held.nan, held.posinf, held.neginf, held.first_bad

    same = {known(summary) for summary in made} - {None}
    return next((item for item in case.came_in if known(item.evidence.summary) in same), None)


def _to_blame(case: Case) -> Arrival | None:
    """Give what came in and was dealt with nowhere, as far as readings show."""
    for arrival in case.came_in:
        name, first = arrival.reading.site.tensor, arrival.reading.order
        between = (case.rows.reading(order) for order in range(first, case.reading.order))
        outputs = [reading for reading in between if reading.phase == "forward"]
        # Labels pass no layer: they meet the outputs in the loss.
        if not is_label(name) and any(reading.kind is None for reading in outputs):
            continue
        if not arrival.harmless:
            return arrival
    return None


def _is_before_its_weight(case: Case) -> bool:
    """Tell whether a weight's gradient went bad in a step whose forward pass was finite.

    The weight was good then, and what is bad in it now came of that gradient.
    """
    reading, rows = case.reading, case.rows
    if reading.phase != "backward" or reading.site.parameter is None:
        return False
    forward = [i for i in range(reading.order) if rows.sites[i].phase in ("forward", "loss")]
    return bool(forward) and all(rows.reading(i).kind is None for i in forward)


def _parted(case: Case) -> str | None:
    """Say where the replay parted from the first run, None where it did not."""
    replayed = case.replayed
    if replayed is None:
        return None
    return parting(case.rows, case.reading, replayed.passed, ends=case.ends)


def bare(case: Case, error: Exception) -> Event:
    """Tell what is known of a bad reading whose report could not be put together."""
    reading = case.reading
    note = f"the rest of this report failed inside anynan, please report it: {reason(error)}"
    said = dict.fromkeys((*case.notes, *case.evidence.notes, note))
    return _event(
        case,
        layer=reading.layer,
        phase=reading.phase,
        tensor=reading.site.tensor,
        parameter=reading.site.parameter,
        spread=Spread(case.later),
        notes=tuple(said),
    )


def _operation_event(case: Case, monitor: Monitor, verdict: Verdict) -> Event:
    reading, origin, then = case.reading, verdict.origin, verdict.then
    summary = case.evidence.summary
    layer, phase, kind, tensor = reading.layer, reading.phase, case.kind, reading.site.tensor
    call = reading.call
    parameter = reading.site.parameter
    surfaced = None
    harmed = reading.phase if verdict.sink is None else verdict.sink.phase
    if origin is not None and origin.phase != "backward":
        # Results may be read after gradients: what the step returned bad was not hidden in it.
        harmed = next((s.phase for s in _forward_and_bad(case)), harmed)
    if origin is not None:
        layer, phase, call = origin.layer, origin.phase, origin.call
        here = (layer, phase) == (reading.layer, reading.phase)
        parameter = origin.parameter or (parameter if here else None)
        if origin.output is not None:
            kind = origin.output.kind or kind
            if not here or summary is None:
                summary = origin.output
        if not here:
            tensor = "output" if phase != "backward" else "grad"
            surfaced = place(reading.phase, reading.layer, reading.site.parameter)
            if case.replayed is not None and case.replayed.raised is not None:
                surfaced = reading.site.tensor
            elif reading.phase == "value":
                surfaced = f"the check of {reading.site.tensor}"
        hidden = _hidden_before(origin, verdict)
        if hidden is not None:
            case.notes.append(messages.HIDDEN_BEFORE(layer=hidden.layer))
    spoilt = None
    if phase == "optimizer" and parameter is not None:
        found = (item for item in case.evidence.weights() if item.name == parameter)
        spoilt = next(found, None)
    cause, code = advise(
        Situation(
            phase=phase,
            kind=kind,
            layer=layer,
            tensor=tensor,
            parameter=parameter,
            gradient=None if spoilt is None else spoilt.gradient,
            state={} if spoilt is None else spoilt.state,
            settings={} if spoilt is None else spoilt.settings,
            summary=summary,
            record=origin,
            then=then,
            growth=monitor.history.curve(reading.site),
            scale=case.evidence.scale if case.rows.scale is None else float(case.rows.scale),
            surfaced=harmed if phase != harmed else None,
            overwritten=origin is None and _overwritten(case),
            watched=case.watched,
            trained=case.trained or monitor.history.trains(case.rows.sites),
        )
    )
    if origin is not None:
        case.repair = Repair.of(origin, code)
    return _event(
        case,
        layer=layer,
        phase=phase,
        kind=kind,
        call=call,
        tensor=tensor,
        parameter=parameter,
        summary=summary,
        operation=None if origin is None else operation(origin),
        cause=cause,
        trail=_trail(case, monitor, layer, phase, call),
        spread=Spread(case.later, surfaced),
        expected=None if origin is None else origin.expected,
        iteration=None if origin is None else origin.iteration,
        shard=None if origin is None else origin.shard,
        then=None if then is None else operation(then),
    )


def _chosen_for_weight(
    case: Case, monitor: Monitor, verdict: Verdict, event: Event
) -> Event | None:
    """Report a weight whose NaN was computed with in a step that wrote a bad value itself.

    Code that chooses what to write (a solver that takes back its step, an ``if``) hands no value
    on, so no way leads from the weight to what was written.
    """
    if case.replayed is None or event.cause is None or verdict.outside is not None:
        return None
    label, note = _infinite_weight(case, verdict), _INFERRED_OF_INFINITE
    if event.cause.tag == WRITTEN.tag:
        operands = (item for record in case.replayed.records for item in record.operands)
        used = (item for item in operands if item.source == "parameter")
        nan = (item.label for item in used if item.summary is not None and item.summary.nan)
        label, note = next(nan, None), _INFERRED_OF_WEIGHT
    if label is None:
        return None
    found = _parameter_event(case, monitor, verdict, Token(0, source="parameter", label=label))
    if found is None:
        return None
    case.repair = None
    return replace(found, notes=(*found.notes, note))


def _infinite_weight(case: Case, verdict: Verdict) -> str | None:
    """Give the name of a weight that held Inf before anything went bad.

    Its values may have become finite ones, as a sigmoid of -Inf is 0, and these an Inf again.
    """
    if verdict.origin is None or any(step >= case.reading.step for step in case.updates):
        return None
    for item in case.evidence.weights():
        x = item.summary
        aside = item.buffer or item.optimizer or not item.held or item.name in case.meant
        aside = aside or item.after
        mask = is_mask(x) and x.zero
        if not aside and not mask and not x.nan and x.posinf + x.neginf:
            return item.name
    return None


def another(case: Case, verdict: Verdict) -> tuple[Event, Repair]:
    """Report a fault that was left in a run with the first one repaired, and how to repair it."""
    origin, sink, summary = verdict.origin, verdict.sink, None
    assert origin is not None
    assert sink is not None
    phase = origin.phase
    if origin.output is not None:
        summary = origin.output
    kind = (None if summary is None else summary.kind) or case.kind
    harmed = sink.phase if sink.phase != phase else None
    cause, code = advise(
        Situation(
            phase=phase, kind=kind, layer=origin.layer, summary=summary, record=origin,
            then=verdict.then, surfaced=harmed,
        )
    )  # fmt: skip
    event = _event(
        replace(case, notes=[], evidence=replace(case.evidence, notes=())),
        layer=origin.layer,
        phase=phase,
        kind=kind,
        call=origin.call,
        tensor="output" if phase != "backward" else "grad",
        parameter=origin.parameter,
        summary=summary,
        operation=operation(origin),
        cause=cause,
        then=None if verdict.then is None else operation(verdict.then),
    )
    return event, Repair.of(origin, code)


def _forward_and_bad(case: Case) -> Iterator[Site]:
    """Yield the places of the step at which a forward value or a loss was NaN or +Inf."""
    rows = case.rows
    for order in range(len(rows.lo)):
        site = rows.sites[order]
        if site.phase in ("forward", "loss") and rows.reading(order).kind in ("nan", "posinf"):
            yield site


def _hidden_before(origin: OpRecord, verdict: Verdict) -> OpRecord | None:
    """Give an earlier layer's record of the same fault that reached nothing which matters."""
    for record in verdict.contained:
        forward = record.phase == origin.phase == "forward"
        same = forward and record.name == origin.name and record.index < origin.index
        if same and record.layer and record.layer != origin.layer:
            return record
    return None


def _trail(
    case: Case, monitor: Monitor, layer: str | None, phase: Phase, call: int | None = None
) -> tuple[tuple[str, float | None], ...]:
    """Give what led to the bad layer, which ends it."""
    if phase not in ("forward", "backward") or case.unordered:
        return ()
    rows, upto = case.rows, case.reading.order
    if case.ends and case.replayed is not None and case.replayed.passed:  # only the ends were read
        rows = _as_rows(case.replayed.passed, rows)
        upto = len(rows.sites) - 1
    trail = monitor.trail(rows, upto, layer, phase, call)
    if trail and layer is not None and case.kind in NON_FINITE:
        trail = (*trail[:-1], (layer, None))  # what was read of it may have been hidden again
    return trail


def _as_rows(passed: list[Passed], first: Rows) -> Rows:
    """Put what a replay passed in the form of the first run's rows."""
    rows = Rows(first.step)
    for place in passed:
        rows.sites.append(
            Site(-1, place.layer, place.phase, place.tensor, "", None, math.inf, None, bound=False)
        )
        rows.calls.append(place.call)
        rows.lo.append(place.lo)
        rows.hi.append(place.hi)
    return rows


def _overwritten(case: Case) -> bool:
    """Tell whether the bad reading is of an argument that something unseen wrote into."""
    sinks = [] if case.replayed is None else case.replayed.sinks
    return any(sink.overwritten and sink.label == case.reading.site.tensor for sink in sinks)


def _event(case: Case, **said: Any) -> Event:
    """Make an event; what is not said is the reading's own."""
    reading, known = case.reading, case.evidence
    common = {
        "backend": known.backend, "kind": case.kind, "severity": "bad", "step": reading.step,
        "call": reading.call, "order": reading.order, "rank": known.rank,
        "notes": tuple(dict.fromkeys((*case.notes, *known.notes))),
    }  # fmt: skip
    return Event(**{**common, **said})


def _gave_something(case: Case) -> bool:
    """Tell whether what left the model was read: only then is it known to be finite."""
    rows = case.rows
    return any(site.phase == "forward" for site in rows.sites[: case.reading.order])


def _incoming_event(case: Case) -> Event:
    """Report what was bad outside the tracked model: the loss, or its gradient."""
    reading, rows = case.reading, case.rows
    loss = reading.phase == "loss"
    gave = (rows.reading(order) for order in range(reading.order))
    masks = [past.layer for past in gave if past.phase == "forward" and past.kind is not None]
    text = (
        "the model's outputs were finite, but the gradient that came back into it was not: the "
        "loss, or code between the model and the loss, made it"
    )
    if loss and masks:
        text = (
            f"{masks[-1] or 'the model'} gave -Inf, which may be a mask, and the loss that was "
            "made of it is not finite: code between the model and backward() made it so"
        )
    elif loss:
        text = (
            "the model's outputs were finite, but the loss that was made of them is not: code "
            "between the model and backward() made it"
        )
    return _event(
        case,
        layer=None,
        phase="loss",
        tensor="loss" if loss else "gradient of the loss",
        summary=case.evidence.summary,
        cause=Cause("outside_the_model", text, _outside_fix(case)),
        spread=Spread(case.later, place(reading.phase, reading.layer, reading.site.parameter)),
    )


def _input_event(case: Case, verdict: Verdict, label: str | None) -> Event:
    """Report bad values that came in with the batch, and what first worked with them."""
    reading, origin = case.reading, verdict.origin
    arrival = next((x for x in case.came_in if label in (None, x.reading.site.tensor)), None)
    name = label if arrival is None else arrival.reading.site.tensor
    if name in case.rows.makers:
        return _made_event(case, verdict, name, arrival)
    layer, tensor, order, kind = None, label or "input", 0, case.kind
    summary: Summary | None = None
    rows: tuple[int, ...] = ()
    if arrival is not None:
        came = arrival.reading
        layer, tensor, order, kind = came.layer, came.site.tensor, came.order, arrival.kind
        summary, rows = arrival.evidence.summary, arrival.evidence.rows
        case.notes.extend(arrival.evidence.notes)
    if summary is None and origin is not None:
        summary = next((x.summary for x in origin.operands if x.source == "input"), None)
        kind = (None if summary is None else summary.kind) or kind
    surfaced = None
    if reading.phase != "input":
        surfaced = place(reading.phase, reading.layer, reading.site.parameter)
    cause = explain(
        Situation(
            phase="input",
            kind=kind,
            layer=layer,
            tensor=tensor,
            summary=summary,
            rows=rows,
            record=origin,
        )
    )
    return _event(
        case,
        layer=layer,
        phase="input",
        kind=kind,
        order=order,
        tensor=tensor,
        summary=summary,
        operation=None if origin is None else operation(origin),
        cause=cause,
        spread=Spread(case.later, surfaced),
    )


def _made_event(case: Case, verdict: Verdict, label: str, arrival: Arrival | None) -> Event:
    """Report what another watched model gave, or what was made after that."""
    reading, origin, maker = case.reading, verdict.origin, case.rows.makers[label]
    operands = () if origin is None else origin.operands
    summary = next((item.summary for item in operands if item.source == "input"), None)
    if arrival is not None:
        summary = arrival.evidence.summary or summary
    gave = f"what {maker.name} gave in its step {maker.step}"
    if maker.certain:
        text = f"{label} is {gave}: it was bad as it left {maker.name}, which is watched, too"
        fix = f"mend {maker.name}: look at what its own tracker has of step {maker.step}"
    else:
        text = (
            f"{label} was bad as it came in; {gave} was bad, too, and what was done since is "
            "outside what is watched"
        )
        fix = (
            f"mend {maker.name} first; if this stays, track the training step function, which "
            "sees what lies between its models"
        )
    return _event(
        case,
        layer=None,
        phase="loss",
        kind=(None if summary is None else summary.kind) or case.kind,
        tensor=label,
        summary=summary,
        cause=Cause("made_by_another", text, fix, "" if summary is None else seen(summary)),
        spread=Spread(case.later, place(reading.phase, reading.layer, reading.site.parameter)),
    )


def _handed_event(case: Case, monitor: Monitor, verdict: Verdict, outside: Token) -> Event:
    """Report bad values that code between the watched layers handed to one of them."""
    reading, origin = case.reading, verdict.origin
    operands = () if origin is None else origin.operands
    summary = next((item.summary for item in operands if item.source == "handed"), None)
    layer = (reading.layer if origin is None else origin.layer) or ""
    return _between(case, monitor, layer, summary, outside.label or "input")


def _between(
    case: Case, monitor: Monitor, layer: str, summary: Summary | None, label: str
) -> Event:
    """Report what a layer was given, and between which layers it was made."""
    reading, before = case.reading, _layer_before(case, layer)
    named = layer or "the model"
    where = f"between {before} and {named}" if before else f"before {named}"
    return _event(
        case,
        layer=None,
        phase="loss",
        kind=(None if summary is None else summary.kind) or case.kind,
        tensor=f"{label} of {named}",
        summary=summary,
        cause=Cause(
            "made_between_layers",
            f"what {named} was given was bad already: it was made {where}, {_UNWATCHED}",
            _outside_fix(case),
            "" if summary is None else seen(summary),
        ),
        trail=_trail(case, monitor, layer, "forward"),
        spread=Spread(case.later, place(reading.phase, reading.layer, reading.site.parameter)),
    )


def _outside_fix(case: Case) -> str:
    """Say how to see what is outside of the model's own call."""
    if case.replayed is not None and case.replayed.inner:
        return (
            "let a second run of the step do what the first did (hand each batch to it as an "
            "argument), or track with level='operation', and the operation is named"
        )
    if not case.of_model:
        return (
            "check the loss and what it is made of with anynan.check(...), or track with "
            "level='operation', and the operation is named"
        )
    return STEP


def _layer_before(case: Case, layer: str) -> str | None:
    """Name the layer whose output was read last before this one began, if any was."""
    for order in range(case.reading.order - 1, -1, -1):
        site = case.rows.sites[order]
        inside = site.layer is not None and f"{site.layer}.".startswith(f"{layer}.")
        if site.phase == "forward" and site.layer and not inside:
            return site.layer
    return None


def _parameter_event(
    case: Case, monitor: Monitor, verdict: Verdict, outside: Token | None
) -> Event | None:
    reading = case.reading
    bad = sorted(
        case.evidence.weights(), key=lambda x: (x.buffer, x.buffer and x.summary.kind != case.kind)
    )
    if outside is None and reading.phase != "parameter":
        bad = [item for item in bad if not item.buffer or _may_have_spoilt(case, item)]
    blamed = outside is not None and outside.label
    if not bad or (blamed and all(item.name != blamed for item in bad)):
        return None
    label = outside.label if outside is not None else reading.site.parameter
    write: OpRecord | None = None
    made: OpRecord | None = None
    sink = verdict.sink
    if outside is None and sink is not None and sink.phase == "parameter":
        label, made = sink.label, verdict.origin
        if reading.step not in case.updates:  # the code itself wrote it, and no optimizer
            write = made
    chosen: BadParameter = next((item for item in bad if item.name == label), bad[0])
    known = case.clean is not None  # else it may have been bad from the beginning
    updated = known and bool(case.updates) and not chosen.buffer and chosen.held
    written = updated or write is not None
    phase: Phase = "optimizer" if written else "parameter"
    step = case.updates[-1] if updated and len(case.updates) == 1 else reading.step
    since = None if case.clean is None or write is not None else (case.clean, reading.step)
    if chosen.name in case.meant:
        since = None
        case.notes.append(
            f"{chosen.name} was bad as it was first looked at: nothing spoilt it here"
        )
    kind = chosen.summary.kind or case.kind
    situation = Situation(
        phase=phase,
        kind=kind,
        layer=chosen.layer,
        tensor=chosen.name,
        parameter=chosen.name,
        summary=chosen.summary,
        since=since,
        gradient=chosen.gradient,
        state=chosen.state,
        settings=chosen.settings,
        record=write,
        unread=case.unread,
        growth=monitor.history.curve(reading.site),
    )
    cause = explain(situation)
    if write is None and made is not None and cause.tag in PROBABLE and chosen.name == label:
        # What is known of the optimizer does not say it: its own arithmetic may.
        within = explain(replace(situation, record=made))
        if within.tag != UNKNOWN:
            write, cause = made, within
    if chosen.buffer and outside is None and reading.phase != "parameter":
        case.notes.append(_INFERRED_OF_BUFFER)
    others = sum(item.buffer <= chosen.buffer for item in bad) - 1
    if others:
        word = "parameter or buffer is" if others == 1 else "parameters and buffers are"
        case.notes.append(f"{others} more {word} bad too: {_names(bad, chosen)}")
    return _event(
        case,
        layer=chosen.layer,
        phase=phase,
        kind=kind,
        call=0,
        step=step,
        tensor=STATE if chosen.optimizer else chosen.name.rpartition(".")[2],
        parameter=chosen.name,
        summary=chosen.summary,
        operation=None if write is None else operation(write),
        cause=cause,
        trail=_trail(case, monitor, chosen.layer, reading.phase),
        spread=Spread(
            case.later,
            None
            if reading.phase == "parameter"
            else place(reading.phase, reading.layer, reading.site.parameter),
        ),
        since=since,
    )


def _may_have_spoilt(case: Case, buffer: BadParameter) -> bool:
    """Tell whether a buffer may have made a reading bad, as far as readings show.

    It is used in its own layer, so that was not read, or what it gave was bad.
    """
    reading, own = case.reading, buffer.layer
    since = case.meant.get(buffer.name)
    if since is None and not buffer.before:
        case.notes.append(f"{buffer.name} is bad now; whether it was before this is not known")
        return False
    if since is not None and since < reading.step:
        case.notes.append(messages.ALSO_BAD(names=f"{buffer.name} is bad,"))
        return False
    if reading.layer is not None and not f"{own}.".startswith(f"{reading.layer}.".lstrip(".")):
        return False
    read = (case.rows.reading(order) for order in range(reading.order, -1, -1))
    latest = next((x for x in read if x.phase == "forward" and x.layer == own), None)
    return latest is None or latest.kind is not None


def norm_event(
    finding: Finding, rows: Rows, evidence: Evidence, *, expected: str | None, bad: bool
) -> Event:
    """Report what the guard saw in the gradient norms."""
    return Event(
        backend=evidence.backend,
        layer=finding.layer,
        phase="backward",
        kind=finding.kind,
        severity="bad" if bad else "suspect",
        step=rows.step,
        order=len(rows.lo),
        tensor=NORM,
        cause=explain(
            Situation(
                phase="backward",
                kind=finding.kind,
                layer=finding.layer,
                tensor=NORM,
                growth=finding.growth,
                finding=finding,
            )
        ),
        trail=finding.layers,
        expected=expected,
        rank=evidence.rank,
    )


def contained(record: OpRecord, rows: Rows, evidence: Evidence, note: str) -> Event:
    """Tell of an operation whose bad values came to no harm that is known."""
    summary = record.output
    kind = None if summary is None else summary.kind
    return Event(
        backend=evidence.backend,
        layer=record.layer,
        phase=record.phase,
        kind=kind or "nan",
        severity="suspect",
        step=rows.step,
        call=record.call,
        order=len(rows.lo),
        summary=summary,
        operation=operation(record),
        cause=explain(
            Situation(
                phase=record.phase, kind=kind or "nan", layer=record.layer, tensor="output",
                summary=summary, record=record,
            )
        ),
        expected=record.expected,
        rank=evidence.rank,
        notes=(note,),
    )  # fmt: skip


def _names(bad: list[BadParameter], chosen: BadParameter) -> str:
    names = [x.name for x in bad if x is not chosen and x.buffer <= chosen.buffer]
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def operation(record: OpRecord) -> Operation:
    """Turn an adapter's record into the public form."""
    return Operation(
        name=record.name,
        raw=record.raw,
        inputs=tuple(item.summary for item in record.operands if item.summary is not None),
        output=record.output,
        source=record.source,
        layer=record.layer,
        phase="forward" if record.direct else record.phase,
        direct=record.direct,
    )


def place(phase: str, layer: str | None, parameter: str | None) -> str:
    """Say in a few words where a reading is."""
    if parameter is not None and phase == "backward":
        return f"gradient of {parameter}"
    if parameter is not None and phase == "optimizer":
        return f"the update of {parameter}"
    if layer is None:
        return {"loss": "the loss"}.get(phase, phase)
    return f"{phase} {layer or '(the model itself)'}"
