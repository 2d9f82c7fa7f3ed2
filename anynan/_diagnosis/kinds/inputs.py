"""Bad values that came in with the data."""

from typing import Any

from anynan._base.summary import Summary
from anynan._diagnosis import messages
from anynan._diagnosis.investigation import BadInput, Investigation
from anynan._diagnosis.lineage import OpRecord, Root
from anynan._diagnosis.rules.circumstance import is_label
from anynan._diagnosis.rules.evidence import seen
from anynan._diagnosis.rules.situation import Situation
from anynan.events import Cause, Event, Spread

INFERRED = messages.INFERRED(
    what="the batch",
    why="it was bad before anything else was, and no second run shows what it led to",
)

# What another watched model gave, and what was made after that.
CERTAIN = "{label} is {gave}: it was bad when it left {name}, which anynan watches too"
CERTAIN_FIX = "fix {name}: see what its own tracker recorded in step {step}"
LIKELY = (
    "{label} was bad when it came in; {gave} was bad too, and the code in between is not watched"
)
LIKELY_FIX = (
    "fix {name} first; if this stays, track the training step function, which also watches the "
    "code between its models"
)


def is_large(case: Investigation) -> BadInput | None:
    """Give an input that is too large: what is not finite waits for the harm it does."""
    if case.reading.phase != "input":
        return None
    return BadInput(case.reading, case.kind, case.evidence)


def is_handed_on(case: Investigation) -> bool:
    """Tell whether a layer was seen handing on what came in, and nothing speaks against it."""
    found = case.lineage
    handed = found.outside is not None and found.outside.source == "handed"
    return case.rows.carried and (case.incoming or found.sink is None or handed)


def behind_loss(case: Investigation) -> BadInput | None:
    """Give what came in bad before a loss that was made outside of the model."""
    return to_blame(case) if case.incoming and case.reading.phase == "loss" else None


def is_root(case: Investigation) -> Root | None:
    """Give the input that an operation was seen taking bad values from."""
    root = case.lineage.outside
    return root if root is not None and root.source == "input" else None


def was_converted(case: Investigation) -> BadInput | None:
    """Give what came in and was made into the framework's own array before it was used."""
    origin = case.lineage.origin
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


def is_all_there_is(case: Investigation) -> BadInput | None:
    """Give what came in bad, where no second run shows more; note what is not known to matter."""
    if case.lineage.sink is not None or not case.came_in:
        return None
    guilty = to_blame(case)
    if guilty is None:
        names = ", ".join(item.name for item in case.came_in)
        case.notes.append(messages.ALSO_BAD(names=f"{names} came in bad,"))
    return guilty


def to_blame(case: Investigation) -> BadInput | None:
    """Give what came in and was dealt with nowhere, as far as readings show."""
    for item in case.came_in:
        between = map(case.rows.reading, range(item.reading.order, case.reading.order))
        outputs = [reading for reading in between if reading.phase == "forward"]
        # Labels pass no layer: they meet the outputs in the loss.
        if not is_label(item.name) and any(reading.kind is None for reading in outputs):
            continue
        if not item.harmless:
            return item
    return None


def event(case: Investigation, found: BadInput | Root | bool) -> Event:
    """Report bad values that came in with the batch, and what first worked with them.

    ``found`` is the input, or what a second run says of it; True for the first one there is, and
    no operation.
    """
    origin = None if found is True else case.lineage.origin
    guilty = found if isinstance(found, BadInput) else None
    label = found.label if isinstance(found, Root) else None
    if guilty is None:
        guilty = next((item for item in case.came_in if label in (None, item.name)), None)
    name = label if guilty is None else guilty.name
    if name in case.rows.makers:
        return made_by_another(case, origin, name, guilty)
    layer, tensor, order, kind = None, label or "input", 0, case.kind
    summary: Summary | None = None
    rows: tuple[int, ...] = ()
    if guilty is not None:
        came = guilty.reading
        layer, tensor, order, kind = came.layer, came.site.tensor, came.order, guilty.kind
        summary, rows = guilty.evidence.summary, guilty.evidence.rows
        case.notes.extend(guilty.evidence.notes)
    if summary is None and origin is not None:
        summary = next((x.summary for x in origin.operands if x.source == "input"), None)
        kind = (None if summary is None else summary.kind) or kind
    came_in = {site.tensor for site in case.rows.sites if site.phase == "input"}
    situation = Situation(
        "input", kind, layer=layer, tensor=tensor, summary=summary, rows=rows, record=origin,
        sole=came_in <= {tensor, "t"},  # the time is none
    )  # fmt: skip
    spread = Spread(case.later) if case.reading.phase == "input" else case.spread
    return case.event(situation, order=order, spread=spread)


def made_by_another(
    case: Investigation, origin: OpRecord | None, label: str, guilty: BadInput | None
) -> Event:
    """Report an input that another watched model made bad."""
    maker = case.rows.makers[label]
    operands = () if origin is None else origin.operands
    summary = next((item.summary for item in operands if item.source == "input"), None)
    if guilty is not None:
        summary = guilty.evidence.summary or summary
    gave = f"what {maker.name} gave in its step {maker.step}"
    text, fix = (
        said.format(label=label, gave=gave, name=maker.name, step=maker.step)
        for said in ((CERTAIN, CERTAIN_FIX) if maker.certain else (LIKELY, LIKELY_FIX))
    )
    return case.event(
        layer=None, phase="loss", kind=(None if summary is None else summary.kind) or case.kind,
        tensor=label, summary=summary,
        cause=Cause("made_by_another", text, fix, "" if summary is None else seen(summary)),
    )  # fmt: skip
