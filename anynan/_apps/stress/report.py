"""What a hunt found."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from anynan._apps.stress.accepted import write as write_accepted
from anynan._apps.stress.edges import Margin, place
from anynan._apps.stress.inputs import Array
from anynan._apps.stress.written import Kept, Origin
from anynan._apps.stress.written import write as write_tests
from anynan._diagnosis.rules.evidence import plural
from anynan._reports.report import render, render_line
from anynan.events import Event

INSIDE, SHAPED, SLOPED, OUTSIDE = "inside", "shaped", "sloped", "outside"
_GROUPS = {
    INSIDE: "inside the example's range",
    SHAPED: "another shape, label or mask",
    SLOPED: "if its gradient is taken",
    OUTSIDE: "outside the example's range",
}
_UNKNOWN = "not known: no operation of it was seen"
_FOLDED = (SLOPED, OUTSIDE)
_SHOWN = 8


@dataclass(slots=True)
class Finding:
    """Tell of inputs that make NaN or Inf.

    Attributes:
        words: What was done to the example.
        group: ``inside`` of the example's range; ``shaped``, by another shape, label or mask;
            ``sloped``, in the gradient, which the target does not take; or ``outside`` of it.
        distance: How far the numbers are from the example's, in widths of their range.
        event: What an investigation of the run says: layer, operation, line, cause, tried fix.
        inputs: The inputs, by name.
        steps: Steps of training before it; 0 with the weights as they are, None without training.
        also: What else led to the same.
        mode: How the target was run: ``under autocast in float16``, say; empty as it is.
        reason: Why it is accepted; empty where it is not.
        numbers: What was done to the example in numbers.
    """

    words: str
    group: str
    distance: float
    event: Event
    inputs: dict[str, Array]
    steps: int | None = None
    also: list[str] = field(default_factory=list)
    mode: str = ""
    reason: str = ""
    numbers: str = ""
    again: Callable[["Finding", str], None] = field(repr=False, compare=False, kw_only=True)

    @property
    def rank(self) -> tuple[Any, ...]:
        """Order findings: the worst and nearest first."""
        late = self.event.phase in ("backward", "optimizer", "parameter")
        return ([*_GROUPS].index(self.group), bool(self.steps), late, self.distance)

    @property
    def key(self) -> tuple[Any, ...]:
        """Say what makes two findings the same."""
        operation = self.event.operation
        source = None if operation is None else operation.source
        where = place(source, self.event.layer)
        name = self.event.phase if operation is None else operation.name
        return (name, where, any(not x.size for x in self.inputs.values()))

    def add(self, *words: str) -> None:
        """Note what else led to the same."""
        more = dict.fromkeys([*self.also, *words])
        self.also = [other for other in more if other != self.words]

    @property
    def name(self) -> str:
        """Name the operation and the code it is in: what stays as lines move."""
        operation = self.event.operation
        if operation is None or operation.source is None:
            return self.words
        return f"{operation.name} in {operation.source.text}"

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Run the inputs once more, and write the failing operation as a bundle.

        Args:
            folder: Where to, as of ``tracker.save``: ``anynan replay`` runs it.

        Raises:
            FileExistsError: If something is in the folder.
            ValueError: If nothing goes bad this time.
        """
        self.again(self, os.fspath(folder))

    def __str__(self) -> str:
        measured = self.distance and self.group != SHAPED  # no range speaks of labels
        far = f", {self.distance:.2g} of its width away" if measured else ""
        return f"{self.what} ({_GROUPS[self.group]}{far})"

    @property
    def what(self) -> str:
        """Say what was done, and with which weights."""
        if not self.steps:
            return self.words if self.steps is None else f"{self.words}, with these weights"
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
        seen: Whether any operation was seen; if none was, nothing is known.
        origin: What was run on which example.
    """

    target: str
    findings: list[Finding] = field(default_factory=list)
    margins: list[Margin] = field(default_factory=list)
    tried: int = 0
    survived: int = 0
    runs: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    seen: bool = False
    origin: Origin | None = field(default=None, repr=False, compare=False)

    def count(self, *, harm: bool) -> None:
        """Count what was tried once."""
        self.tried += 1
        self.survived += not harm

    @property
    def open(self) -> list[Finding]:
        """List what is not folded in the report, and not accepted."""
        return [x for x in self.findings if x.group not in _FOLDED and not x.reason]

    @property
    def ok(self) -> bool:
        """Tell whether nothing was found inside of the example's range that is not accepted.

        A target of which no operation was seen is not: nothing is known about it.
        """
        return self.seen and not any(finding.group == INSIDE for finding in self.open)

    def accept(self, path: str | os.PathLike[str], reason: str) -> None:
        """Add what is open to a file of accepted findings, which ``accept=`` reads.

        Args:
            path: The file, which is made if it is not there.
            reason: Why they are accepted.

        Raises:
            ValueError: If there is no reason.
        """
        if not reason:
            msg = "accept(): say why these findings are accepted, in reason="
            raise ValueError(msg)
        write_accepted(os.fspath(path), self.target, [x.name for x in self.open], reason)

    def to_pytest(self, path: str | os.PathLike[str], target: str | None = None) -> None:
        """Write tests that fail as long as the faults are there.

        Each runs the target on one finding's inputs, without the hunt. What is outside of the
        range is written only where nothing else was found. Large arrays are written beside it.

        Args:
            path: The file, as ``tests/test_found.py``.
            target: ``module:name`` of what was run, where its own name does not lead to it.

        Raises:
            FileExistsError: If there is such a file.
            ValueError: If nothing was found, or the target or an argument has no name to write.
        """
        wanted = self.open or [x for x in self.findings if not x.reason]
        if not wanted or self.origin is None:
            msg = "to_pytest(): nothing was found, so there is nothing to write"
            raise ValueError(msg)
        kept = [Kept(x.what, render_line(x.event), x.inputs, x.steps or 0, x.mode) for x in wanted]
        write_tests(os.fspath(path), self.origin, kept, target)

    def __str__(self) -> str:
        known = f"{self.survived} of {self.tried} survived"
        lines = [f"stress of {self.target}: {known if self.seen else _UNKNOWN}"]
        if self.margins:
            lines += ["", "nearest edges in the example's run"]
            lines += [f"  {margin}" for margin in self.margins[:_SHOWN]]
            if len(self.margins) > _SHOWN:
                lines.append(f"  and {len(self.margins) - _SHOWN} more")
        for number, finding in enumerate(self.findings, 1):
            if finding.group not in _FOLDED and not finding.reason:
                lines += ["", f"{number}. {finding}"]
                lines += [f"   inputs   {finding.numbers}"] if finding.numbers else []
                lines += [f"   {x}".rstrip() for x in render(finding.event).splitlines()]
                lines += _also(finding)
        for group in _FOLDED:
            folded = [x for x in self.findings if x.group == group and not x.reason]
            lines += _block(_GROUPS[group], [(x.what, render_line(x.event)) for x in folded])
        lines += _block("accepted", [(x.what, x.reason) for x in self.findings if x.reason])
        if self.notes:
            lines += ["", *(f"note: {note}" for note in self.notes)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<StressReport of {self.target}: {plural(len(self.findings), 'finding')}>"


def _block(title: str, pairs: list[tuple[str, str]]) -> list[str]:
    lines = [f"  {what}\n    {said}" for what, said in pairs]
    return ["", title, *lines] if pairs else []


def _also(finding: Finding) -> list[str]:
    if not finding.also:
        return []
    more = f" and {len(finding.also) - 3} more" if len(finding.also) > 3 else ""
    return [f"   also by  {'; '.join(finding.also[:3])}{more}"]
