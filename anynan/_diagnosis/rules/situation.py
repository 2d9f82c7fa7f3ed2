"""What a rule may look at, and what a rule is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from anynan._base.summary import Summary
from anynan._diagnosis.lineage import Operand, OpRecord
from anynan._readings.norms import Finding
from anynan.events import Kind, Phase

# The phases in which an operation computes a value rather than a gradient.
FORWARD: tuple[Phase, ...] = ("forward", "loss", "parameter", "optimizer", "value")
BACKWARD: tuple[Phase, ...] = ("backward",)
BOTH: tuple[Phase, ...] = (*FORWARD, *BACKWARD)
ANY: tuple[Phase, ...] = ()

# What the argument of a function of one number is called.
SELF = ("self", "input", "x", "a")
OTHER = ("other", "divisor")


@dataclass(frozen=True, slots=True)
class Situation:
    """Hold everything a rule may look at.

    Attributes:
        phase: Phase of the event.
        kind: Kind of the event.
        layer: Layer path, None outside every watched layer.
        tensor: Which tensor is bad.
        parameter: Name of the weight or buffer, in the phases that concern one.
        summary: What the bad tensor holds.
        record: The harmful origin, None if no operation could be named.
        then: The operation that turned the origin's Inf into the first NaN.
        since: Steps ``(good, bad)`` between which a parameter went bad.
        rows: Bad rows of the batch.
        growth: (step, norm or largest magnitude) of the bad reading, oldest first.
        jump: What shows that the last update made the weights far too large; empty if none did.
        gradient: Gradient of the bad parameter.
        state: Optimizer state of the bad parameter by name.
        settings: The numbers that its optimizer works with, by name.
        scale: The loss scale, where one is in use.
        unread: Why bad gradients may have gone unseen before a weight went bad, empty if none did.
        finding: What the guard on the gradient norms saw.
        surfaced: Phase in which the harm was seen, where that is not the origin's own. A
            ``backward`` here means that the forward pass hid the bad value.
        overwritten: The bad tensor is an argument that was finite when the call began, and no
            operation was seen writing it.
        watched: Every operation was watched already, so that a second run would tell no more.
        trained: Gradients were seen, so that a learning rate may be to blame.
        sole: No other array came in beside the bad one.
    """

    phase: Phase
    kind: Kind
    layer: str | None = None
    tensor: str = "output"
    parameter: str | None = None
    summary: Summary | None = None
    record: OpRecord | None = None
    then: OpRecord | None = None
    since: tuple[int, int] | None = None
    rows: tuple[int, ...] = ()
    growth: tuple[tuple[int, float], ...] = ()
    jump: str = ""
    gradient: Summary | None = None
    state: Mapping[str, Summary] = field(default_factory=lambda: MappingProxyType({}))
    settings: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    scale: float | None = None
    unread: str = ""
    finding: Finding | None = None
    surfaced: Phase | None = None
    overwritten: bool = False
    watched: bool = False
    trained: bool = True
    sole: bool = False

    @property
    def where(self) -> Phase:
        """Give the phase the origin ran in, else the event's."""
        if self.record is None:
            return self.phase
        # What the user's own code computes in the backward pass is a value like any other.
        return "forward" if self.record.direct else self.record.phase

    @property
    def operation(self) -> str:
        """Give the origin's canonical name, empty if there is none."""
        return "" if self.record is None else self.record.name

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Give the origin's operands."""
        return () if self.record is None else self.record.operands

    @property
    def output(self) -> Summary | None:
        """Give what the origin made."""
        return None if self.record is None else self.record.output

    @property
    def line(self) -> str:
        """Give the user's line and the library frame it went through, for what they name."""
        source = None if self.record is None else self.record.source
        return "" if source is None else f"{source.text} {source.via or ''}"

    @property
    def dtype(self) -> str:
        """Give the data type the origin computed in, empty if unknown."""
        for summary in (self.output, self.summary):
            if summary is not None:
                return summary.dtype
        return ""

    def operand(self, *names: str) -> Operand | None:
        """Return the first operand with one of these names."""
        return next((item for item in self.operands if item.name in names), None)

    def summary_of(self, *names: str) -> Summary | None:
        """Return that operand's content."""
        item = self.operand(*names)
        return None if item is None else item.summary

    def value(self, *names: str) -> float | complex | None:
        """Return an operand's element at the first bad index, or the plain argument so named."""
        item = self.operand(*names)
        if item is not None:
            return item.value
        return next((v for name in names if (v := self.param(name)) is not None), None)

    def param(self, name: str) -> float | None:
        """Return a plain number among the origin's arguments."""
        found = None if self.record is None else self.record.params.get(name)
        return float(found) if isinstance(found, int | float) else None

    def made(self, *kinds: Kind) -> bool:
        """Tell whether the origin's result holds one of these kinds."""
        output = self.output
        if output is None:
            return self.kind in kinds
        counts = {"nan": output.nan, "posinf": output.posinf, "neginf": output.neginf}
        return any(counts.get(kind, 0) for kind in kinds)


class Wording(NamedTuple):
    """Say it sharper than a rule's own text and fix."""

    text: str
    fix: str


def when(holds: Callable[[Situation], object], text: str, fix: str) -> Callable[..., Any]:
    """Say it sharper where something more is known of the situation."""
    return lambda s: Wording(text, fix) if holds(s) else None


Condition = Callable[[Situation], str | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """Say when a cause applies, why it happens and what to change.

    ``text`` and ``fix`` are format strings over the names in ``evidence.facts``.

    Attributes:
        tag: Short fixed name, unique in the table.
        condition: Returns the evidence, or None if the rule does not apply.
        text: Why.
        fix: What to change.
        operations: Canonical names of the operations it is about; empty is any, and none.
        phases: Phases the operation ran in (without operations: the event's).
        sure: False if the same facts have other possible reasons; the text then says so.
        wording: A sharper text and fix for some situations, or by operation.
    """

    tag: str
    condition: Condition
    text: str
    fix: str
    operations: frozenset[str] = frozenset()
    phases: tuple[Phase, ...] = FORWARD
    sure: bool = True
    wording: Callable[[Situation], Wording | None] | Mapping[str, Wording] | None = None

    def sharper(self, s: Situation) -> Wording | None:
        """Give the text and the fix for this situation, None to keep the general ones."""
        if self.wording is None or callable(self.wording):
            return self.wording and self.wording(s)
        return self.wording.get(s.operation)
