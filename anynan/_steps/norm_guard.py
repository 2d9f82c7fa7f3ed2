"""Judge the gradients' norms against the steps before: a jump, or next to nothing."""

from anynan._diagnosis.diagnosis import norm_event
from anynan._readings.norms import FEWEST, Guard
from anynan._readings.readings import layer_norms
from anynan._readings.step import Step
from anynan._steps import messages
from anynan._steps.failures import Failures
from anynan._steps.notes import Notes
from anynan._steps.record import Record
from anynan._steps.subject import Subject


class NormGuard:
    """Judge the norms, where a policy asks for it.

    Attributes:
        on: Whether it does.
    """

    def __init__(self, subject: Subject, record: Record, notes: Notes, failures: Failures) -> None:
        self._subject, self._record = subject, record
        self._notes, self._failures = notes, failures
        guard = self._guard = Guard(subject.options.policy)
        self._seen, self._unseen = False, 0
        self.on, self.clear = bool(guard.on), guard.clear

    def judge(self, step: Step, norm: float | None = None) -> None:
        """Judge the gradient norms read since the last time.

        Args:
            step: The open step.
            norm: L2 norm over all weights, where the step does not hold one for each; a norm
                that is not finite is judged elsewhere.

        Raises:
            AnomalyError: If the policy makes a spike or a vanishing gradient bad.
        """
        start, step.guarded = step.guarded, len(step.lo)
        judged = step.failed is not None or step.held is not None
        if not self.on or judged or self._subject.watched_by is None:
            return
        if norm is not None:
            norms, group, self._seen = {"": norm}, "", True
        else:
            readings = [step.reading(order) for order in range(start, step.guarded)]
            norms = layer_norms(readings)
            group = next((r.site.parameter or "" for r in readings if r.norm is not None), "")
            self._say_unseen(step, seen=bool(norms))
        policy = self._subject.options.policy
        for finding in self._guard.judge(step.number, norms, group):
            expected = policy.allowed(finding.kind, "backward", finding.layer)
            bad = finding.kind in policy.at(finding.layer).bad and expected is None
            if not bad and not finding.news:  # said when it began
                self._record.counts["expected" if expected else "suspect"] += 1
            elif step.failed is None:
                evidence = self._subject.evidence
                event = norm_event(finding, step, evidence, expected=expected, bad=bad)
                self._failures.refuse(event, step)

    def _say_unseen(self, step: Step, *, seen: bool) -> None:
        if seen or self._seen:
            self._seen = True
        elif any(site.phase == "backward" for site in step.sites):
            self._unseen += 1
            if self._unseen == FEWEST:
                option, why = "Policy(spike=..., vanishing=...)", "no optimizer has updated weights"
                self._notes.say(messages.NO_UPDATES(option=option, why=why))
