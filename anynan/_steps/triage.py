"""Decide what a reading outside of its limits is: by design, to be decided later, or a failure."""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anynan._diagnosis.evidence import BadParameter
from anynan._diagnosis.lineage import Replay
from anynan._readings.monitor import Monitor
from anynan._readings.readings import Reading
from anynan._readings.step import DeferredInput, Step
from anynan._steps.consequences import Consequences
from anynan._steps.failures import Failures
from anynan._steps.infinite import InfiniteOutputs
from anynan._steps.inputs import Inputs
from anynan._steps.investigator import Investigator
from anynan._steps.loss_scale import LossScale
from anynan._steps.subject import Subject
from anynan._steps.suspects import Suspects
from anynan._steps.weights import Weights
from anynan.events import NON_FINITE, STATE, Event, Kind, Severity


@dataclass(frozen=True, slots=True)
class Finding:
    """Hold a reading outside of its limits, and what the policy says of it."""

    step: Step
    reading: Reading
    kind: Kind
    severity: Severity
    value: Any
    replayed: Replay | None

    def look(self, *, weak: bool) -> Callable[[], Any]:
        """Give access to the array, for as long as the program or the step lasts."""
        found = self.step.array(self.reading.order)
        found = self.value if found is None else found
        try:
            return weakref.ref(found) if weak else lambda: found
        except TypeError:
            return lambda: found


class Triage:
    """Judge readings in execution order."""

    def __init__(
        self, subject: Subject, monitor: Monitor, suspects: Suspects, weights: Weights,
        consequences: Consequences, inputs: Inputs, investigator: Investigator,
        outputs: InfiniteOutputs, loss_scale: LossScale, failures: Failures,
    ) -> None:  # fmt: skip
        self._subject, self._monitor = subject, monitor
        self._suspects, self._weights, self._consequences = suspects, weights, consequences
        self._inputs, self._investigator, self._outputs = inputs, investigator, outputs
        self._loss_scale, self._failures = loss_scale, failures

    def review(self, step: Step) -> None:
        """Judge every reading that was not judged yet, in execution order."""
        if step.judged == len(step.lo):
            return
        if step.follows:
            step.judged = len(step.lo)
            return
        flagged = self._monitor.flagged(step)
        # What follows from weights that are bad is not counted one by one.
        corrupted = bool(flagged) and self._consequences.is_corrupted(step)
        bad = [not corrupted and self.is_bad(step, order) for order in flagged]
        later = sum(bad)
        for order, counts in zip(flagged, bad, strict=True):
            later -= counts
            self.flag(step, order, later=later)

    def flag(
        self, step: Step, order: int, value: Any = None, *, later: int = 0,
        replayed: Replay | None = None,
    ) -> None:  # fmt: skip
        """Judge one reading that left its slot's limits, and act.

        Args:
            step: The open step.
            order: Which of its readings.
            value: The framework's array, when it is at hand.
            later: How many later readings are bad too.
            replayed: What an operation watcher saw already, instead of a replay.

        Raises:
            AnomalyError: As the tracker's action says.
        """
        step.judged = max(step.judged, order + 1)
        if self._subject.watched_by is None:  # removed by the user's own callback, mid-step
            return
        if step.follows:
            if step.sites[order].phase in ("forward", "loss"):  # another model may be given it
                self._inputs.look_around(step, order, value)
            return
        judged = self._judged(step, order)
        if judged is None:
            return
        kind, severity = judged
        if kind in NON_FINITE:
            self._inputs.look_around(step, order, value)
        if step.failed is not None or step.held is not None:
            step.spread += self.is_bad(step, order)
            return
        reading = step.reading(order)
        finding = Finding(step, reading, kind, severity, value, replayed)
        # The first that takes it decides it.
        deciding = (
            self._is_expected, self._is_input, self._is_buffer, self._is_suspect,
            self._is_handed_on, self._is_scaled,
        )  # fmt: skip
        if not any(decides(finding) for decides in deciding):
            self._failures.fail(step, reading, kind, value, later=later, replayed=replayed)

    def _judged(self, step: Step, order: int) -> tuple[Kind, Severity] | None:
        site = step.sites[order]
        return self._subject.options.policy.judge(
            site.phase, step.lo[order], step.hi[order], layer=site.layer, dtype_max=site.dtype_max
        )

    def is_bad(self, step: Step, order: int) -> bool:
        """Tell whether a reading is bad by itself: no suspect, and not excused."""
        judged, site = self._judged(step, order), step.sites[order]
        intended = order in step.suspect or (site.buffer and site.phase == "parameter")
        if judged is None or judged[1] != "bad" or intended:
            return False
        reading = step.reading(order)
        return not (
            self._is_mask(reading, judged[0]) or self._excuse(step, reading, judged[0]) is not None
        )

    def _is_mask(self, reading: Reading, kind: Kind) -> bool:
        return reading.site.parameter is None and reading.key(kind) in self._monitor.downgraded

    def _excuse(self, step: Step, reading: Reading, kind: Kind) -> str | None:
        expected = step.expected.get(reading.order)
        if expected is not None and kind in expected:
            return expected[kind]
        return self._subject.options.policy.allowed(kind, reading.phase, reading.layer)

    # What may be decided of a finding.

    def _is_expected(self, finding: Finding) -> bool:
        """Take what the user expects."""
        excuse = self._excuse(finding.step, finding.reading, finding.kind)
        if excuse is not None:
            self._suspects.note(finding.reading, finding.kind, finding.value, expected=excuse)
        return excuse is not None

    def _is_input(self, finding: Finding) -> bool:
        """Take a bad input: it is decided by what follows from it."""
        reading, kind = finding.reading, finding.kind
        if reading.phase != "input" or finding.severity != "bad" or kind not in NON_FINITE:
            return False
        look = finding.look(weak=self._suspects.is_known(reading, kind))
        finding.step.pending_inputs.append(DeferredInput(reading, kind, look))
        return True

    def _is_buffer(self, finding: Finding) -> bool:
        """Take a bad buffer: it may be intended."""
        site = finding.reading.site
        if not site.buffer or site.phase != "parameter" or finding.kind not in NON_FINITE:
            return False
        self._note_buffer(finding.reading, finding.kind, finding.value)
        return True

    def _note_buffer(self, reading: Reading, kind: Kind, value: Any) -> None:
        name, intended = reading.site.parameter or "", self._weights.intended
        # Else a failed step before it may have corrupted it.
        if self._consequences.continued is None or name in intended:
            intended.setdefault(name, reading.step)
            if kind != "neginf":  # a mask
                self._suspects.note(reading, kind, value)

    def _is_suspect(self, finding: Finding) -> bool:
        """Take what may be intended; -Inf that the whole gives is decided at the step's end."""
        step, reading, kind = finding.step, finding.reading, finding.kind
        intended = self._is_mask(reading, kind) or reading.order in step.suspect
        if finding.severity != "suspect" and not intended:
            return False
        if reading.phase == "input" and reading.site.tensor in step.makers:
            return True  # noted where it was made
        value = finding.value
        if value is None and reading.site.tensor == STATE:
            value = step.array(reading.order)
        if not intended and self._outputs.may_be(step, reading, kind):
            left = DeferredInput(reading, kind, finding.look(weak=False))
            step.left.append((left, finding.replayed))
        else:
            self._suspects.note(reading, kind, value)
        return True

    def _is_handed_on(self, finding: Finding) -> bool:
        """Take what a layer made of bad input: it may be dealt with before it leaves the model."""
        step, reading = finding.step, finding.reading
        inside = reading.phase == "forward" and bool(reading.layer) and finding.replayed is None
        if not (step.pending_inputs and inside and finding.kind in NON_FINITE):
            return False
        carriers = self._investigator.carriers
        step.carried = step.carried or carriers.get(reading.key(finding.kind), False)
        step.carrying.append(reading)
        step.spread += 1
        return True

    def _is_scaled(self, finding: Finding) -> bool:
        """Take a gradient that waits for what a loss scaler does."""
        return self._loss_scale.defers(finding.step, finding.reading, finding.kind)

    # What was put off.

    def settle(self, step: Step) -> None:
        """Look at layers that were bad beside bad data, where nothing that left the model was."""
        carriers = self._investigator.carriers
        new = [reading for reading in step.carrying if reading.key(reading.kind) not in carriers]
        told = step.failed is not None or step.held is not None
        if new and not told and self._subject.watched_by is not None:
            step.spread -= 1  # it is what is reported
            self._failures.fail(step, new[-1], new[-1].kind or "nan")

    def release(self, step: Step) -> Event | None:
        """Investigate what is held; if that is None it was no failure, and the rest is judged."""
        held = step.held
        step.defer(None)
        if held is None or held.reading is None:
            return None if held is None else held.event
        event = self._investigator.find(
            step, held.reading, held.kind, held.value, later=step.spread, replayed=held.replayed
        )
        if event is None:
            self.go_on(step, held.reading)
        return event

    def go_on(self, step: Step, reading: Reading) -> None:
        """Judge what comes after a reading that was no failure."""
        step.judged, step.spread = reading.order + 1, 0
        self.review(step)

    def not_intended(self, bad: list[BadParameter], step: int) -> list[BadParameter]:
        """Note what of the bad weights and buffers may be intended, and give the rest.

        Args:
            bad: What tracking finds as it begins.
            step: In which step that is.
        """
        for item in bad:
            if item.buffer:
                local, dtype = item.name.rpartition(".")[2], item.summary.dtype
                site = self._monitor.site(
                    item.layer, "parameter", local, dtype, None, parameter=item.name, buffer=True
                )
                reading = Reading(step, 0, 0, site, math.nan, math.nan)
                self._note_buffer(reading, item.summary.kind or "nan", item.summary)
        return [item for item in bad if not item.buffer]
