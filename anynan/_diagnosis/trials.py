"""Try a fix before it is told: the step once more, with the origin repaired."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from anynan._diagnosis.investigation import Investigation
from anynan._diagnosis.kinds.operations import another
from anynan._diagnosis.lineage import Lineage, Replay, Sink, trace
from anynan._diagnosis.rules.repair import Repair
from anynan._readings.policy import may_mask
from anynan.events import Event, Extent, Outcome, Trial

# Faults of one step that are told in one report, each at the cost of one more run.
MOST = 3


@dataclass(slots=True)
class Attempt:
    """Hold what an adapter saw of a run that came to its end with operations repaired.

    Attributes:
        replay: The records and sinks, as of any replay, of the whole run.
        extent: What was run.
        bad: Whether a repaired operation has made a bad gradient of its own.
        loss: The loss it ended with, None where there was none, or several.
        gradient_norm: The L2 norm over the gradients of all weights, None where there are none.
    """

    replay: Replay
    extent: Extent
    bad: bool = False
    loss: float | None = None
    gradient_norm: float | None = None


def tried(
    event: Event, case: Investigation, attempt: Callable[[Sequence[Repair]], Attempt | None],
    excused: Callable[[Sink], bool],
) -> Event:  # fmt: skip
    """Add to an event what came of its fix, and the faults that were left then.

    Args:
        event: What happened.
        case: What it was made of.
        attempt: Runs the step with these repairs; None where it cannot.
        excused: Tells whether bad values may be somewhere.
    """
    if case.repair is None:
        return event
    repairs, faults = [case.repair], [event]
    neginf = may_mask(case.kind, case.reading.phase)
    while (run := attempt(repairs)) is not None:
        lineage = trace(run.replay.records, run.replay.sinks, neginf=neginf)
        outcome = _outcome(run, lineage, repairs, excused)
        if outcome is None:
            break
        fault = None
        if outcome == "another":
            fault, repair = another(case, lineage)
            grows = not repairs[-1].expression and _same_overflow(faults[-1], fault)
            if grows or not _stays(repair, repairs, attempt, neginf=neginf):
                fault = None
        numbers = (run.loss, run.gradient_norm) if outcome == "finite" else ()
        trial = Trial(repairs[-1].expression, outcome, run.extent, *numbers)
        faults[-1] = _told(faults[-1], trial)
        if fault is None or len(faults) == MOST:
            break
        faults.append(fault)
        repairs.append(repair)
    first, *others = faults
    return replace(first, others=tuple(others))


def _outcome(
    run: Attempt, lineage: Lineage, repairs: list[Repair], excused: Callable[[Sink], bool]
) -> Outcome | None:
    """Say what a run shows, None where that is not known."""
    sink, origin = lineage.sink, lineage.origin
    if run.bad:  # which of several is not known
        return "insufficient" if len(repairs) == 1 else None
    if sink is None:
        # What is left are masks, or nobody was seen making it.
        masks = all(s.phase == "forward" and s.parents for s in run.replay.sinks)
        return "finite" if masks else None
    if origin is None or lineage.outside is not None or origin.expected or excused(sink):
        return None
    found = Repair.of(origin, "")
    same = [r for r in repairs if r.is_of(found.operation, found.source, found.layer)]
    if not any(r.phase == found.phase for r in same):
        return "another"
    return "insufficient" if same[-1] is repairs[-1] else None


def _same_overflow(first: Event, fault: Event) -> bool:
    """Tell whether what is left is the same overflow further on.

    With 0 in the place of the elements that overflowed, those beside them are as large as before.
    """
    infinite = {first.kind, fault.kind} <= {"posinf", "neginf"}
    if not infinite or first.cause is None or fault.cause is None or first.phase != fault.phase:
        return False
    return first.cause.tag == fault.cause.tag


def _stays(
    found: Repair, repairs: Sequence[Repair], attempt: Callable[[Sequence[Repair]], Attempt | None],
    *, neginf: bool,
) -> bool:  # fmt: skip
    """Tell whether a fault is one of its own, and not made by what the fix itself gives.

    A division by 1e-8 gives large values. Where 0 is in their place and the same fault is there
    all the same, it is independent of them.
    """
    if not repairs[-1].expression:
        return True
    run = attempt([replace(repair, expression="") for repair in repairs])
    if run is None or run.bad:
        return False
    origin = trace(run.replay.records, run.replay.sinks, neginf=neginf).origin
    return origin is not None and found.is_of(origin.name, origin.source, origin.layer)


def _told(event: Event, trial: Trial) -> Event:
    """Add a trial; a fix that was not enough is not advised as if it were."""
    cause = event.cause
    if trial.outcome == "insufficient" and trial.repair and cause is not None:
        cause = replace(cause, fix=f"not enough by itself: {cause.fix}")
    return replace(event, tried=trial, cause=cause)
