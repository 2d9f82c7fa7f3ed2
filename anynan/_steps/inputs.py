"""What a step is given bad: whether another watched model made it, and whether it did harm."""

import math
from typing import Any

from anynan._diagnosis.investigation import BadInput
from anynan._readings.readings import Reading
from anynan._readings.step import Step
from anynan._steps import messages, producers
from anynan._steps.notes import Notes
from anynan._steps.opened import OpenSteps
from anynan._steps.subject import Subject
from anynan._steps.suspects import Suspects
from anynan.events import NON_FINITE, Kind

# Among the producers of what came in: of whatever of it, where its adapter knows that.
ANYTHING = ""
# What its own earlier output was made into.
BACK = "(what it gave)"


class Inputs:
    """Follow bad values from what gave them to what was given them."""

    def __init__(
        self, subject: Subject, steps: OpenSteps, suspects: Suspects, notes: Notes
    ) -> None:
        self._subject, self._steps = subject, steps
        self._suspects, self._notes = suspects, notes
        self._mentioned = False  # whether it was said that what comes in is reported elsewhere

    def look_around(self, step: Step, order: int, value: Any) -> None:
        """Remember what left the model bad, and find whether what came in left another so."""
        site = step.sites[order]
        if site.phase not in ("input", "forward", "loss"):
            return
        if value is None:
            value = step.array(order)
        memory = None if value is None else self._subject.adapter.memory(value)
        if site.phase == "input":
            found = producers.producer(self._subject, value, self._steps.since, step.number - 1)
            if found is not None:
                step.came_from(site.tensor, found)
            elif memory is not None:
                step.brought.append(memory)
        elif not any(is_of(value) for is_of in step.brought):
            makers = [step.makers.get(x.reading.site.tensor) for x in step.pending_inputs]
            own = all(maker is not None and maker.itself for maker in makers)
            producers.note(self._subject, step.number, memory, own=own, value=value)

    def handed(self, step: Step, name: str, value: Any) -> None:
        """Find whether what went into what it was given left another bad, or itself."""
        found = producers.producer(self._subject, value, math.inf)
        if found is not None:
            step.came_from(BACK if found.itself else name, found)

    def were_reported(self, step: Step, reading: Reading, kind: Kind) -> bool:
        """Tell whether a function was given what a reported step of another made bad."""
        producer = step.makers.get(ANYTHING)
        if producer is None:
            return False
        comes = "comes from" if producer.certain else "is bad, and came after"
        self._suspects.note(reading, kind, None)
        if not self._mentioned:
            self._mentioned = True
            name, made = self._subject.name, f"step {producer.step} of {producer.name}"
            self._notes.say(messages.GIVEN_BY_ANOTHER(name=name, comes=comes, maker=made))
        return True

    def came_in(self, step: Step, kind: Kind) -> list[BadInput]:
        """Say what is known of the bad values that came in."""
        if kind not in NON_FINITE:
            return []
        evidence, is_known = self._subject.adapter.evidence, self._suspects.is_known
        return [
            BadInput(
                item.reading, item.kind, evidence(item.reading, item.value()),
                harmless=is_known(item.reading, item.kind),
            )
            for item in step.pending_inputs
        ]  # fmt: skip

    def settle(self, step: Step) -> None:
        """Note what came in bad and did no harm."""
        if self._subject.watched_by is None:  # removed by the user's own callback, mid-step
            return
        if step.failed is None or step.failed.phase != "input":
            for item in step.pending_inputs:
                if item.reading.site.tensor not in step.makers:  # else noted where it was made
                    self._suspects.note(item.reading, item.kind, item.value())
