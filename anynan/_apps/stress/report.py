"""What a hunt found."""

from dataclasses import dataclass, field
from typing import Any

from anynan._apps.stress.edges import Margin, place
from anynan._apps.stress.inputs import Array
from anynan._diagnosis.rules.evidence import plural
from anynan._reports.report import render, render_line
from anynan.events import Event

INSIDE, SHAPED, OUTSIDE = "inside", "shaped", "outside"
_GROUPS = (INSIDE, SHAPED, OUTSIDE)
_SHOWN = 8


@dataclass(slots=True)
class Finding:
    """Tell of inputs that make NaN or Inf.

    Attributes:
        words: What was done to the example.
        group: ``inside`` of the example's range; ``shaped``, by another shape, label or mask; or
            ``outside`` of the range.
        distance: How far the numbers are from the example's, in widths of their range.
        event: What an investigation of the run says: layer, operation, line, cause, tried fix.
        inputs: The inputs, by name.
        steps: Steps of training before it; 0 with the weights as they are.
        also: What else led to the same.
    """

    words: str
    group: str
    distance: float
    event: Event
    inputs: dict[str, Array]
    steps: int = 0
    also: list[str] = field(default_factory=list)

    @property
    def rank(self) -> tuple[Any, ...]:
        """Order findings: the worst and nearest first."""
        late = self.event.phase in ("backward", "optimizer", "parameter")
        return (_GROUPS.index(self.group), self.steps > 0, late, self.distance)

    @property
    def key(self) -> tuple[Any, ...]:
        """Say what makes two findings the same."""
        operation = self.event.operation
        source = None if operation is None else operation.source
        where = place(source, self.event.layer)
        name = self.event.phase if operation is None else operation.name
        return (name, where)

    def add(self, *words: str) -> None:
        """Note what else led to the same."""
        more = dict.fromkeys([*self.also, *words])
        self.also = [other for other in more if other != self.words]

    def __str__(self) -> str:
        where = {
            INSIDE: "inside the example's range",
            SHAPED: "another shape, label or mask",
            OUTSIDE: "outside the example's range",
        }[self.group]
        far = f", {self.distance:.2g} of its width away" if self.distance else ""
        return f"{self.what} ({where}{far})"

    @property
    def what(self) -> str:
        """Say what was done, and with which weights."""
        if not self.steps:
            return self.words
        return f"{self.words}, after training on for {plural(self.steps, 'step')}"


@dataclass(slots=True)
class StressReport:
    """Hold what a hunt found: ``print`` it.

    Attributes:
        target: What was run.
        findings: Each fault once, the worst and nearest first.
        margins: How far the example's run stays from each edge, the nearest first.
        tried: How many attacks there were: one for each edge that was sought, and each rule.
        survived: How many of them did no harm.
        runs: How often the target ran.
        seconds: How long it took.
        notes: What was not tried, and why.
    """

    target: str
    findings: list[Finding] = field(default_factory=list)
    margins: list[Margin] = field(default_factory=list)
    tried: int = 0
    survived: int = 0
    runs: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Tell whether nothing was found inside of the example's range."""
        return not any(finding.group == INSIDE for finding in self.findings)

    def __str__(self) -> str:
        lines = [f"stress of {self.target}: {self.survived} of {self.tried} survived"]
        if self.margins:
            lines += ["", "nearest edges in the example's run"]
            lines += [f"  {margin}" for margin in self.margins[:_SHOWN]]
            if len(self.margins) > _SHOWN:
                lines.append(f"  and {len(self.margins) - _SHOWN} more")
        folded = [finding for finding in self.findings if finding.group == OUTSIDE]
        for number, finding in enumerate(self.findings, 1):
            if finding.group != OUTSIDE:
                lines += ["", f"{number}. {finding}"]
                lines += [f"   {x}".rstrip() for x in render(finding.event).splitlines()]
                lines += _also(finding)
        if folded:
            lines += ["", "outside the example's range"]
        for finding in folded:
            lines += [f"  {finding.what}", f"    {render_line(finding.event)}"]
        if self.notes:
            lines += ["", *(f"note: {note}" for note in self.notes)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<StressReport of {self.target}: {plural(len(self.findings), 'finding')}>"


def _also(finding: Finding) -> list[str]:
    if not finding.also:
        return []
    more = f" and {len(finding.also) - 3} more" if len(finding.also) > 3 else ""
    return [f"   also by  {'; '.join(finding.also[:3])}{more}"]
