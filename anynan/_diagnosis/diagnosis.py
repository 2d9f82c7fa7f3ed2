"""From a bad reading to an event: an ordered table of what it may be, and who reports that."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from anynan._diagnosis import messages
from anynan._diagnosis.evidence import Evidence
from anynan._diagnosis.investigation import Investigation, event_of
from anynan._diagnosis.kinds import between, inputs, operations, outside, weights
from anynan._diagnosis.rules.situation import Situation
from anynan._readings.norms import NORM, Finding
from anynan._readings.step import Step
from anynan.errors import reason
from anynan.events import Event, Spread


class Row(NamedTuple):
    """Say what a bad reading may be.

    Attributes:
        name: What it is then.
        when: Gives what speaks for it, nothing if it is not that.
        build: Makes the event of that; None where nothing is wrong.
        note: What the report says beside it.
    """

    name: str
    when: Callable[[Investigation], Any]
    build: Callable[[Investigation, Any], Event] | None
    note: str = ""


# The first row that holds is the report. What was seen stands before what is inferred, and what
# came from outside before what the model is to blame for.
TABLE = (
    Row("an input beyond its limit", inputs.is_large, inputs.event),
    Row("a mask", operations.is_mask, None),
    Row("an input that a layer handed on", inputs.is_handed_on, inputs.event),
    Row("an input behind a bad loss", inputs.behind_loss, inputs.event, inputs.INFERRED),
    Row("a loss or gradient from outside", attrgetter("incoming"), outside.event),
    Row("an input that an operation took", inputs.is_root, inputs.event),
    Row("an input that was converted first", inputs.was_converted, inputs.event),
    Row("an input and nothing else", inputs.is_all_there_is, inputs.event, inputs.INFERRED),
    Row("code between layers, as seen", between.is_root, between.of_root),
    Row("a weight or buffer", weights.find, weights.event),
    Row("code between layers, as read", between.was_given, between.of_given),
    Row("a loss or gradient that nothing explains", outside.is_unexplained, outside.event),
    Row("an operation, or what was read", bool, operations.event),
)


def diagnose(case: Investigation) -> Event | None:
    """Find the origin of a bad reading and say what caused it.

    Returns:
        The event, or None if a replay shows that only placed values (masks) are there.
    """
    _weigh(case)
    row, found = choose(case)
    if row.note:
        case.notes.append(row.note)
    return None if row.build is None else row.build(case, found)


def choose(case: Investigation) -> tuple[Row, Any]:
    """Give the first row of the table that holds, and what speaks for it."""
    return next((row, found) for row in TABLE if (found := row.when(case)))


def _weigh(case: Investigation) -> None:
    """Believe a second run as far as it agrees with the first; say what it leaves open."""
    replayed = case.replayed
    if replayed is None or case.reading.phase == "input":
        return
    case.notes.extend(replayed.notes)
    case.verdict = case.verdict or case.weigh(replayed)
    if case.verdict.divergence is not None:
        case.replayed = None
        case.notes.append(messages.REPLAY_PARTED(parted=case.verdict.divergence))
        return
    if replayed.inner:
        case.notes.append(messages.CALL_ALONE())
    if replayed.incoming and not case.incoming and case.reading.phase == "loss":
        case.notes.append(messages.UNSEEN_TO_LOSS())


def bare(case: Investigation, error: Exception) -> Event:
    """Tell what is known of a bad reading whose report could not be put together."""
    site = case.reading.site
    note = f"the rest of this report failed inside anynan, please report it: {reason(error)}"
    return case.event(
        layer=site.layer, phase=site.phase, tensor=site.tensor, parameter=site.parameter,
        spread=Spread(case.later),
        notes=tuple(dict.fromkeys((*case.notes, *case.evidence.notes, note))),
    )  # fmt: skip


def norm_event(
    finding: Finding, rows: Step, evidence: Evidence, *, expected: str | None, bad: bool
) -> Event:
    """Report what the guard saw in the gradient norms."""
    situation = Situation(
        phase="backward", kind=finding.kind, layer=finding.layer, tensor=NORM,
        growth=finding.growth, finding=finding,
    )  # fmt: skip
    return event_of(
        situation, evidence, severity="bad" if bad else "suspect", step=rows.number,
        order=len(rows.lo), trail=finding.layers, expected=expected,
    )  # fmt: skip
