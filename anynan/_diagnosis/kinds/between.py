"""What code between two watched layers made, and handed to one of them."""

from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from anynan._base.summary import Summary
from anynan._diagnosis.investigation import Investigation
from anynan._diagnosis.kinds import inputs, outside
from anynan._diagnosis.lineage import Root
from anynan._diagnosis.rules.evidence import seen
from anynan.events import NON_FINITE, Cause, Event

TAKEN = "{op}{at} was given a bad value, made outside what is watched"
TEXT = "{layer} received a bad input, made {where}, {around}"
UNWATCHED = "outside what is watched"
FIX = "wrap what is computed there in anynan.check(...), or track with level='operation'"


class Given(NamedTuple):
    """Hold what a layer was given that is bad, and the path of the model whose code gave it."""

    summary: Summary
    model: str | None


def is_root(case: Investigation) -> Root | None:
    """Give what a layer was seen taking that no operation in a layer made."""
    root = case.lineage.outside
    return root if root is not None and root.source == "handed" else None


def of_root(case: Investigation, root: Root) -> Event:
    """Report what a second run saw a layer take."""
    origin = case.lineage.origin
    if root.label in case.rows.makers:
        return inputs.made_by_another(case, origin, root.label, None)
    operands = () if origin is None else origin.operands
    summary = next((item.summary for item in operands if item.source == "handed"), None)
    layer = (case.reading.layer if origin is None else origin.layer) or ""
    if origin is not None and origin.layer is None:  # no layer took it
        line = origin.source
        at = "" if line is None else f" at {line.place}"
        text = TAKEN.format(op=origin.name, at=at)
        return _outside(case, summary, f"input of {origin.name}", text)
    return _event(case, layer, summary, root.label or "input")


def was_given(case: Investigation) -> Given | None:
    """Give what a layer was given, where that was bad and no operation is known to have made it.

    Between two layers runs the code of what holds both.
    """
    reading = case.reading
    if case.lineage.sink is not None or reading.phase != "forward" or case.rows.given is None:
        return None
    summary, model = case.rows.given()
    bad = summary is not None and bool(reading.layer) and case.kind in NON_FINITE
    return Given(summary, model) if bad else None


def of_given(case: Investigation, given: Given) -> Event:
    """Report what the first run saw a layer take."""
    summary, model = given
    layer = case.reading.layer or ""
    if model is None:
        return _event(case, layer, summary, "input")
    names = zip(layer.split("."), (_layer_before(case, layer) or "").split("."), strict=False)
    around = ".".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], names))
    around = around if len(around) > len(model) else model
    where = "in the model's own code" if not around else f"in the code of {around}"
    found = _event(case, layer, summary, "input", where, FIX)
    return replace(found, layer=around, phase="forward")


def _event(
    case: Investigation, layer: str, summary: Summary | None, label: str,
    around: str = UNWATCHED, fix: str | None = None,
) -> Event:  # fmt: skip
    """Report what a layer was given, and between which layers it was made."""
    before, named = _layer_before(case, layer), layer or "the model"
    where = f"between {before} and {named}" if before else f"before {named}"
    text = TEXT.format(layer=named, where=where, around=around)
    found = _outside(case, summary, f"{label} of {named}", text, fix)
    return replace(found, trail=case.trail(layer, "forward"))


def _outside(
    case: Investigation, summary: Summary | None, tensor: str, text: str, fix: str | None = None
) -> Event:
    """Report what was bad as it was taken."""
    held = "" if summary is None else seen(summary)
    return case.event(
        layer=None, phase="loss", kind=(None if summary is None else summary.kind) or case.kind,
        tensor=tensor, summary=summary,
        cause=Cause("made_between_layers", text, fix or outside.fix(case), held),
    )  # fmt: skip


def _layer_before(case: Investigation, layer: str) -> str | None:
    """Name the layer whose output was read last before this one began, if any was."""
    for order in range(case.reading.order - 1, -1, -1):
        site = case.rows.sites[order]
        inside = site.layer is not None and f"{site.layer}.".startswith(f"{layer}.")
        if site.phase == "forward" and site.layer and not inside:
            return site.layer
    return None
