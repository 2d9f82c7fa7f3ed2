"""What fails a step: a bad reading that nothing excuses, or an event that an adapter makes."""

from typing import Any

from anynan._diagnosis.lineage import Replay
from anynan._readings.readings import Reading
from anynan._readings.step import DeferredFailure, Step
from anynan._steps.actions import Actions
from anynan._steps.consequences import Consequences
from anynan._steps.inputs import Inputs
from anynan._steps.investigator import Investigator
from anynan._steps.record import Record
from anynan._steps.subject import Subject
from anynan.events import Event, Kind


class Failures:
    """Investigate a failure and act on it, unless it follows from one before."""

    def __init__(
        self, subject: Subject, record: Record, inputs: Inputs, consequences: Consequences,
        investigator: Investigator, actions: Actions,
    ) -> None:  # fmt: skip
        self._subject, self._record, self._inputs = subject, record, inputs
        self._consequences, self._investigator = consequences, investigator
        self._actions = actions

    def fail(
        self, step: Step, reading: Reading, kind: Kind, value: Any = None, *, later: int = 0,
        replayed: Replay | None = None,
    ) -> None:  # fmt: skip
        """Investigate a bad reading and act on the event; defer it where ranks act together.

        Raises:
            AnomalyError: As the tracker's action says.
        """
        consequences = self._consequences
        if consequences.explain(step, reading, kind, later):
            return
        if self._inputs.were_reported(step, reading, kind):
            return
        if step.holding:
            step.defer(step.held or DeferredFailure(reading, kind, value, replayed))
            return
        event = self._investigator.find(step, reading, kind, value, later=later, replayed=replayed)
        if event is not None and not consequences.explain_event(step, event, reading.key(kind)):
            self.accept(step, event)

    def accept(self, step: Step, event: Event) -> None:
        """Fail a step by an event; what comes of bad weights is none of its own.

        Raises:
            AnomalyError: As the tracker's action says.
        """
        self._actions.fail(step, self._consequences.begin(step, event))

    def refuse(self, event: Event, step: Step) -> None:
        """Act on an event that is about no single reading, as a jump of the gradients."""
        event = self._subject.signed(event)
        if event.severity != "bad":
            self._record.add(event)
            if event.expected is None:
                self._record.warn_of(event)
        elif step.holding:
            step.defer(step.held or DeferredFailure(event=event))
        else:
            self.accept(step, event)
