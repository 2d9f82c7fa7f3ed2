"""Look closer at the next steps, where a fault was not reproduced."""

from dataclasses import replace

from anynan._readings.step import Step
from anynan._steps.consequences import Consequences
from anynan._steps.framework import Escalation
from anynan._steps.messages import WATCHED_CLOSELY, WATCHED_FOUND, WATCHED_OVER
from anynan._steps.notes import Notes
from anynan._steps.subject import Subject
from anynan.events import Event

# So often a tracker looks closer.
MOST = 3


class Escalator:
    """Have the next steps watched operation by operation, until the fault comes back.

    Attributes:
        left: How many steps are still watched so.
    """

    def __init__(self, subject: Subject, consequences: Consequences, notes: Notes) -> None:
        self._subject, self._consequences, self._notes = subject, consequences, notes
        self._what: Escalation | None = None
        # Since which step, and how often that began.
        self.left = self._since = self._times = 0

    @property
    def level(self) -> str:
        """Give the level of the step that begins.

        What follows from weights that are known to be bad is not looked into.
        """
        given = self._subject.options.level
        level = "operation" if self.left else given
        if level == "operation" and self._consequences.is_corrupted():
            return "layer" if given == "operation" else given
        return level

    def begin(self, step: Step, event: Event) -> Event:
        """Look closer from the next step on; say so in the event that was not reproduced."""
        subject = self._subject
        goes_on = subject.action not in ("raise", "off") and not subject.soft
        over = subject.fn is None  # the model is gone
        done = self.level == "operation" or over or self._times >= MOST
        what = subject.adapter.escalation() if goes_on and not done else None
        if what is None:
            return event
        self._times += 1
        self._what, self.left, self._since = what, what.steps, step.number
        note = WATCHED_CLOSELY(what=what.begins.format(steps=what.steps))
        return replace(event, notes=(*event.notes, note))

    def end(self, step: Step, event: Event) -> Event:
        """Look closer no longer, once an operation is named; say so in its event."""
        if self._what is None or not self.left or step.number <= self._since:
            return event
        self.left = 0
        note = WATCHED_FOUND(what=self._what.found.format(step=self._since + 1))
        return replace(event, notes=(*event.notes, note))

    def settle(self, step: Step) -> None:
        """Count a step that was watched operation by operation."""
        if self._what is None or not self.left or step.number <= self._since:
            return
        self.left -= 1
        if not self.left:
            steps, over = self._what.steps, self._what.over
            self._notes.mention(WATCHED_OVER(since=self._since, steps=steps, over=over))
