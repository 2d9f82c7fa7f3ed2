"""What another watched model gave, or what was made after that."""

from anynan._diagnosis.investigation import BadInput, Investigation
from anynan._diagnosis.lineage import OpRecord
from anynan._diagnosis.rules.evidence import seen
from anynan.events import Cause, Event

CERTAIN = "{label} is {gave}: it was bad as it left {name}, which is watched, too"
CERTAIN_FIX = "mend {name}: look at what its own tracker has of step {step}"
LIKELY = (
    "{label} was bad as it came in; {gave} was bad, too, and what was done since is outside what "
    "is watched"
)
LIKELY_FIX = (
    "mend {name} first; if this stays, track the training step function, which sees what lies "
    "between its models"
)


def event(
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
        layer=None,
        phase="loss",
        kind=(None if summary is None else summary.kind) or case.kind,
        tensor=label,
        summary=summary,
        cause=Cause("made_by_another", text, fix, "" if summary is None else seen(summary)),
    )
