"""-Inf that the whole model or function gives: a mask, unless an operation computed it."""

from collections import Counter
from typing import Any

from anynan._diagnosis.lineage import Replay
from anynan._readings.readings import Reading
from anynan._readings.step import DeferredInput, Step
from anynan._steps.investigator import MAX_REPLAYS, Investigator
from anynan._steps.subject import Subject
from anynan._steps.suspects import Suspects
from anynan.events import Kind


class InfiniteOutputs:
    """Look into -Inf that is given, at the step's end, where nothing failed."""

    def __init__(self, subject: Subject, suspects: Suspects, investigator: Investigator) -> None:
        self._subject, self._suspects = subject, suspects
        self._investigator = investigator
        self._looked: Counter[Any] = Counter()
        self._reported: set[Any] = set()

    def clear(self) -> None:
        """Forget what was looked into."""
        self._looked.clear()
        self._reported.clear()

    def may_be(self, step: Step, reading: Reading, kind: Kind) -> bool:
        """Tell whether a reading is to be looked into."""
        site = reading.site
        end = kind == "neginf" and site.phase == "forward" and not site.layer
        reported = (site.layer, site.tensor) in self._reported
        return end and self._subject.options.replay and not (reported or step.holding)

    def settle(self, step: Step) -> None:
        """Report -Inf that was given, unless the step failed by it: that is reported already."""
        for item, replayed in step.left:
            if self._subject.watched_by is None:  # removed by the user's own callback, mid-step
                return
            alone = step.failed is None and self.may_be(step, item.reading, item.kind)
            if not (alone and self._report(step, item, replayed)):
                self._suspects.note(item.reading, item.kind, item.value())

    def _report(self, step: Step, item: DeferredInput, replayed: Replay | None) -> bool:
        """Warn, once, of -Inf that arithmetic made.

        Returns:
            False where it may be a mask: nothing shows that an operation computed it.
        """
        reading, kind = item.reading, item.kind
        if self._looked[reading.layer] >= MAX_REPLAYS:
            return False
        self._looked[reading.layer] += 1
        event, _ = self._investigator.investigate(step, reading, kind, item.value(), 0, replayed)
        if event is None or event.expected is not None:
            return False
        if event.operation is None and event.phase != "input":
            return False
        self._reported.add((reading.layer, reading.site.tensor))
        self._suspects.count(reading, kind)
        self._suspects.report(event)
        return True
