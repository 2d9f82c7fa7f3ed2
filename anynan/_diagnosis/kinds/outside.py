"""What was bad outside the tracked model: the loss, or its gradient."""

from anynan._diagnosis.causes import STEP
from anynan._diagnosis.investigation import Investigation
from anynan.events import NON_FINITE, Cause, Event

GRADIENT = (
    "the model's outputs were finite, but the gradient that came back into it was not: the loss, "
    "or code between the model and the loss, made it"
)
LOSS = (
    "the model's outputs were finite, but the loss that was made of them is not: code between the "
    "model and backward() made it"
)
MASKED = (
    "{layer} gave -Inf, which may be a mask, and the loss that was made of it is not finite: code "
    "between the model and backward() made it so"
)
SAME_STEP = (
    "let a second run of the step do what the first did (pass each batch as an argument), "
    "or track with level='operation': the report then names the operation"
)
CHECKED = (
    "check the loss and what it is made of with anynan.check(...), or track with "
    "level='operation': the report then names the operation"
)


def is_unexplained(case: Investigation) -> bool:
    """Tell whether it was bad as it came in, as far as readings show."""
    return case.lineage.sink is None and (_is_made_outside(case) or _arrived_bad(case))


def _is_made_outside(case: Investigation) -> bool:
    """Tell whether a loss was made outside of a model that is tracked alone.

    That is not known of one whose second run, of which no more is known, was of a step of its
    framework's own.
    """
    parted = case.verdict is not None and case.verdict.divergence is not None
    if case.reading.phase != "loss" or not case.of_model or parted:
        return False
    # Only if what left the model was read, it is known to be finite.
    gave = any(site.phase == "forward" for site in case.rows.sites[: case.reading.order])
    return gave and (case.replayed is None or case.together)


def _arrived_bad(case: Investigation) -> bool:
    """Tell whether the first gradient that was read of a backward pass was bad already."""
    reading, rows = case.reading, case.rows
    if reading.phase != "backward" or reading.site.parameter is not None:
        return False
    if not case.in_order or case.kind not in NON_FINITE:
        return False
    if case.replayed is not None and case.replayed.uncompiled:
        return False
    return not reading.order or rows.sites[reading.order - 1].phase != "backward"


def event(case: Investigation, _: bool) -> Event:
    """Report the loss, or its gradient, and what a second run did not show."""
    if not case.incoming:
        case.say_clean()
    reading = case.reading
    loss = reading.phase == "loss"
    gave = map(case.rows.reading, range(reading.order))
    masks = [past.layer for past in gave if past.phase == "forward" and past.kind is not None]
    text = LOSS if loss else GRADIENT
    if loss and masks:
        text = MASKED.format(layer=masks[-1] or "the model")
    return case.event(
        layer=None, phase="loss", tensor="loss" if loss else "gradient of the loss",
        summary=case.evidence.summary, cause=Cause("outside_the_model", text, fix(case)),
    )  # fmt: skip


def fix(case: Investigation) -> str:
    """Say how to see what is outside of the model's own call."""
    if case.replayed is not None and case.replayed.inner:
        return SAME_STEP
    return STEP if case.of_model else CHECKED
