"""A weight or a buffer that is bad."""

from dataclasses import replace
from typing import NamedTuple

from anynan._diagnosis import messages
from anynan._diagnosis.causes import UNKNOWN, explain
from anynan._diagnosis.evidence import BadParameter
from anynan._diagnosis.investigation import Investigation, operation
from anynan._diagnosis.lineage import OpRecord, Root, is_mask
from anynan._diagnosis.rules.circumstance import PROBABLE
from anynan._diagnosis.rules.overflow import WRITTEN
from anynan._diagnosis.rules.situation import Situation
from anynan.events import STATE, Cause, Event, Phase, Spread

OF_BUFFER = messages.INFERRED(
    what="this buffer",
    why="it was bad before, nothing that its layer computed was finite, and no second run shows "
    "what it led to",
)
OF_INFINITE = messages.INFERRED(
    what="this weight",
    why="it was infinite before anything else was bad, and a result computed from Inf may be "
    "finite, such as 0",
)
OF_CHOICE = messages.INFERRED(
    what="this weight",
    why="the code wrote the bad value itself, perhaps because of what this weight led to",
)


class BadWeights(NamedTuple):
    """Hold the weights and buffers that may be to blame, and the one that a second run named."""

    bad: list[BadParameter]
    root: Root | None


def find(case: Investigation) -> BadWeights | None:
    """Give what is bad, where a second run named it, it was read, or nothing else explains it."""
    root = case.lineage.outside
    if root is not None and root.source in ("parameter", "buffer"):
        return _to_blame(case, root)
    unexplained = case.lineage.sink is None and not _came_of_it(case)
    return _to_blame(case, None) if unexplained or case.reading.phase == "parameter" else None


def _came_of_it(case: Investigation) -> bool:
    """Tell whether what is bad in the weights may have come of this very reading.

    An update wrote them since. Or a weight's gradient went bad in a step whose forward pass was
    finite: the weight was good then.
    """
    reading, rows = case.reading, case.rows
    if any(step >= reading.step for step in case.updates):
        return True
    if reading.phase != "backward" or reading.site.parameter is None:
        return False
    forward = [i for i in range(reading.order) if rows.sites[i].phase in ("forward", "loss")]
    return bool(forward) and all(rows.reading(i).kind is None for i in forward)


def _to_blame(case: Investigation, root: Root | None) -> BadWeights | None:
    bad = sorted(
        case.evidence.weights(), key=lambda x: (x.buffer, x.buffer and x.summary.kind != case.kind)
    )
    if root is None and case.reading.phase != "parameter":
        bad = [item for item in bad if not item.buffer or _may_have_spoilt(case, item)]
    blamed = root is not None and root.label
    if not bad or (blamed and all(item.name != blamed for item in bad)):
        return None
    return BadWeights(bad, root)


def _may_have_spoilt(case: Investigation, buffer: BadParameter) -> bool:
    """Tell whether a buffer may have made a reading bad, as far as readings show.

    It is used in its own layer, so that was not read, or what it gave was bad.
    """
    reading, own = case.reading, buffer.layer
    since = case.meant.get(buffer.name)
    if since is None and not buffer.before:
        case.notes.append(messages.BUFFER_NOW(name=buffer.name))
        return False
    if since is not None and since < reading.step:
        case.notes.append(messages.ALSO_BAD(names=f"{buffer.name} is bad,"))
        return False
    if reading.layer is not None and not f"{own}.".startswith(f"{reading.layer}.".lstrip(".")):
        return False
    read = map(case.rows.reading, range(reading.order, -1, -1))
    latest = next((x for x in read if x.phase == "forward" and x.layer == own), None)
    return latest is None or latest.kind is not None


def event(case: Investigation, found: BadWeights) -> Event:
    """Report the weight that is to blame."""
    reading, lineage, (bad, root) = case.reading, case.lineage, found
    label = reading.site.parameter if root is None else root.label
    made: OpRecord | None = None
    if root is None and lineage.sink is not None and lineage.sink.phase == "parameter":
        label, made = lineage.sink.label, lineage.origin
    # Without an update the code itself wrote it, and no optimizer.
    write = None if reading.step in case.updates else made
    chosen: BadParameter = next((item for item in bad if item.name == label), bad[0])
    situation = _situation(case, chosen, write)
    cause = explain(situation)
    if write is None and made is not None and cause.tag in PROBABLE and chosen.name == label:
        # What is known of the optimizer does not say it: its own arithmetic may.
        within = explain(replace(situation, record=made))
        if within.tag != UNKNOWN:
            write, cause = made, within
    if chosen.buffer and root is None and reading.phase != "parameter":
        case.notes.append(OF_BUFFER)
    _note_others(case, bad, chosen)
    return _event(case, chosen, situation, write, cause)


def _situation(case: Investigation, chosen: BadParameter, write: OpRecord | None) -> Situation:
    """Say what is known of a weight, and since when it is bad."""
    known = case.clean is not None  # else it may have been bad from the beginning
    updated = known and bool(case.updates) and _is_written(chosen)
    phase: Phase = "optimizer" if updated or write is not None else "parameter"
    since = None if case.clean is None or write is not None else (case.clean, case.reading.step)
    if chosen.name in case.meant:
        since = None
        case.notes.append(messages.FIRST_LOOK(name=chosen.name))
    return Situation(
        phase, chosen.summary.kind or case.kind, layer=chosen.layer, tensor=chosen.name,
        parameter=chosen.name, summary=chosen.summary, since=since, gradient=chosen.gradient,
        state=chosen.state, settings=chosen.settings, record=write, unread=case.unread,
        growth=case.monitor.history.curve(case.reading.site),
    )  # fmt: skip


def _is_written(item: BadParameter) -> bool:
    """Tell whether what updates it is known, so that an update may be said to have spoilt it."""
    return item.held and not (item.buffer or item.lost)


def _note_others(case: Investigation, bad: list[BadParameter], chosen: BadParameter) -> None:
    beside = [x.name for x in bad if x is not chosen and x.buffer <= chosen.buffer]
    if beside:
        word = "parameter or buffer is" if len(beside) == 1 else "parameters and buffers are"
        names = ", ".join(beside[:3]) + (", ..." if len(beside) > 3 else "")
        case.notes.append(messages.MORE_WEIGHTS(count=len(beside), word=word, names=names))


def _event(
    case: Investigation, chosen: BadParameter, s: Situation, write: OpRecord | None, cause: Cause
) -> Event:
    reading, updates = case.reading, case.updates
    updated = case.clean is not None and _is_written(chosen) and len(updates) == 1
    return case.event(
        s, call=0, step=updates[-1] if updated else reading.step,
        tensor=STATE if chosen.optimizer else chosen.name.rpartition(".")[2],
        operation=operation(write), cause=cause, trail=case.trail(s.layer, reading.phase),
        spread=Spread(case.later) if reading.phase == "parameter" else case.spread, since=s.since,
    )  # fmt: skip


def behind(case: Investigation, told: Event) -> Event | None:
    """Report a weight whose NaN was computed with in a step that wrote a bad value itself.

    Code that chooses what to write (a solver that takes back its step, an ``if``) hands no value
    on, so no way leads from the weight to what was written.
    """
    if case.replayed is None or told.cause is None or case.lineage.outside is not None:
        return None
    label, note = _infinite(case), OF_INFINITE
    if told.cause.tag == WRITTEN.tag:
        operands = (item for record in case.replayed.records for item in record.operands)
        used = (item for item in operands if item.source == "parameter")
        nan = (item.label for item in used if item.summary is not None and item.summary.nan)
        label, note = next(nan, None), OF_CHOICE
    found = None if label is None else _to_blame(case, Root(0, source="parameter", label=label))
    if found is None:
        return None
    found_event = event(case, found)
    case.repair = None
    return replace(found_event, notes=(*found_event.notes, note))


def _infinite(case: Investigation) -> str | None:
    """Give the name of a weight that held Inf before anything went bad.

    Its values may have become finite ones, as a sigmoid of -Inf is 0, and these an Inf again.
    """
    origin = case.lineage.origin
    if origin is None or any(step >= case.reading.step for step in case.updates):
        return None
    if origin.layer is None and case.reading.phase == "forward" and case.of_model:
        return None  # it ran before the model did, and may have written the weight
    for item in case.evidence.weights():
        x = item.summary
        aside = item.buffer or item.optimizer or not item.held or item.name in case.meant
        aside = aside or item.after
        mask = is_mask(x) and x.zero
        if not aside and not mask and not x.nan and x.posinf + x.neginf:
            return item.name
    return None
