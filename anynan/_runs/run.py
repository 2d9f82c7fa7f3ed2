"""What was seen of a run, and the forms it is told in."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anynan._base import products
from anynan._base.escaping import name as printed
from anynan._runs.record import Record

if TYPE_CHECKING:
    from anynan._steps.tracked import Tracked


@dataclass(frozen=True, slots=True)
class Run(Record):
    """Hold what was seen of a tracked run; ``anynan.load`` reads one from a file.

    Attributes:
        name: Name of what is tracked.
        history: The readings of its steps.
        layers: The layers that were read, in the order in which they first were.
        events: The events, oldest first.
        counts: Events by severity (``bad``, ``suspect``) and ``expected``.
        allowed: What was allowed, with the reason.
        notes: What could not be watched.
        remarks: What watching changes.
        unseen: Layers that were watched and never read.
        versions: What it ran with, by name; empty for a tracker of this process.
        damage: What of a file could not be read, or that it has no end.
        open: What was read of a step that failed before its end.
        step: The step that a tracker is in.
        evaluated: How many of its steps were calls without gradients.
        harms: What went wrong in the program although no reading was bad.
        target: What is tracked, as an event names it.
        backend: Which adapter watches it.

    Example:
        >>> import anynan
        >>> anynan.load("run.jsonl").events[0].layer  # doctest: +SKIP
        'decoder.3.norm'
    """

    def report(self) -> str:
        """Return what was seen as text: the first bad event in full, then an overview."""
        from anynan._reports.report import render
        from anynan._runs.overview import overview

        bad = [event for event in self.events if event.severity == "bad"][:1]
        return "\n\n".join([*map(render, bad), overview(self)])

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write what was seen as one page of HTML that stands alone.

        Raises:
            OSError: If it cannot be written.
        """
        products.part("page", "page").write(self, path)


def of(tracker: "Tracked") -> Run:
    """Gather what a tracker has seen so far."""
    judge = tracker.judge
    policies = (judge.options.policy, *judge.options.policy.overrides.values())
    used = {event.expected for event in tracker.events}
    given = [
        f"{e.kind} in {e.layers!r}: {e.reason}"
        + ("" if e.reason in used else " (not needed so far)")
        for policy in policies
        for e in policy.allow
    ]
    found = [
        f"{kind} in {phase} {path or '(the model itself)'}: {why}"
        for (path, phase, kind), why in judge.monitor.downgraded.items()
    ]
    layers = {site.layer: None for site in judge.monitor.sites if site.layer is not None}
    read = {site.layer for site in judge.monitor.sites if site.phase == "forward"}
    watched = [] if judge.adapter is None else judge.adapter.watched()
    return Run(
        tracker.name,
        tracker.history,
        tuple(layers),
        tracker.events,
        {word: tracker.count(word) for word in ("bad", "suspect", "expected")},
        tuple(map(printed, (*given, *found))),
        tracker.notes,
        judge.notes.remarks,
        tuple(path for path in watched if path not in read),
        open=judge.steps.failed,
        step=tracker.step,
        evaluated=judge.steps.evaluated,
        target=tracker.target,
        backend=tracker.backend_name,
    )
