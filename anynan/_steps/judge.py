"""Judge readings and act: everything an adapter calls while its tracker watches.

A reading goes from `triage` (what is it?) to `failures` (does it follow from one before?), to the
`investigator` (where did it begin?), and back to `failures` (raise, warn, skip). Each part knows
those that are made before it.
"""

from collections.abc import Callable

from anynan._diagnosis.evidence import BadParameter
from anynan._readings.monitor import Monitor
from anynan._readings.readings import Site
from anynan._readings.step import Step
from anynan._steps.consequences import Consequences
from anynan._steps.escalator import Escalator
from anynan._steps.failures import Failures
from anynan._steps.framework import Framework
from anynan._steps.infinite import InfiniteOutputs
from anynan._steps.inputs import Inputs
from anynan._steps.investigator import Investigator
from anynan._steps.loss_scale import LossScale
from anynan._steps.norm_guard import NormGuard
from anynan._steps.notes import Notes
from anynan._steps.opened import OpenSteps
from anynan._steps.operations import Operations
from anynan._steps.record import Record, numpy_met
from anynan._steps.subject import Subject
from anynan._steps.suspects import Suspects
from anynan._steps.triage import Triage
from anynan._steps.weights import Weights


class Judge:
    """Hold one tracker's steps, findings and actions; ``Tracked.judge`` is one."""

    def __init__(self, subject: Subject) -> None:
        self.subject, options = subject, subject.options
        self.options = options
        self.ends: list[Callable[[], object]] = []  # what is undone with the tracker
        monitor = self.monitor = Monitor(options.policy, options.history)
        record = self.record = Record(subject)
        notes = self.notes = Notes(subject)
        steps = self.steps = OpenSteps(monitor)
        weights = self.weights = Weights(subject)
        suspects = self._suspects = Suspects(subject, record)
        inputs = self._inputs = Inputs(subject, steps, suspects, notes)
        following = self.consequences = Consequences(subject, record, notes, weights, steps)
        escalator = self.escalator = Escalator(subject, following, notes)
        investigator = self.investigator = Investigator(
            subject, monitor, record, suspects, inputs, weights, escalator
        )
        failures = self.failures = Failures(subject, record, inputs, following, investigator)
        self._loss_scale = LossScale(subject, record, suspects, failures)
        self._outputs = InfiniteOutputs(subject, suspects, investigator)
        self.norms = NormGuard(subject, record, notes, failures)
        triage = self.triage = Triage(
            subject, monitor, suspects, weights, following, inputs, investigator, self._outputs,
            self._loss_scale, failures,
        )  # fmt: skip
        operations = self._operations = Operations(
            subject, monitor, record, notes, suspects, escalator, triage, failures
        )
        # What adapters call, by the names that they know.
        self.rows, self.close_step = steps.rows, steps.close
        self.flag, self.review, self.release = triage.flag, triage.review, triage.release
        self.fail, self.accept = failures.fail, failures.accept
        self.handed = inputs.handed
        self.unscaled, self.guard = self._loss_scale.unscaled, self.norms.judge
        self.say, self.remark = notes.say, notes.remark
        self.softly, self.carried_by = subject.softly, failures.carried_by
        self.known_clean, self.wants_replay = weights.known_clean, investigator.wants_replay
        self.operations, self.raised = operations.judge, operations.raised
        self.note_operation = operations.note
        self.is_corrupted, self.begin_again = following.is_corrupted, following.begin_again
        self.applied_bad_update = following.applied
        self.bad_inputs, self.remember_input = following.inputs, following.remember_input

    @property
    def adapter(self) -> Framework | None:
        """Give the adapter that watches; None before tracking begins and after it ends."""
        return self.subject.watched_by

    @adapter.setter
    def adapter(self, adapter: Framework | None) -> None:
        self.subject.watched_by = adapter

    @property
    def level(self) -> str:
        """Give the level of the step that begins: it rises where a fault was not reproduced."""
        return self.escalator.level

    @property
    def step(self) -> int:
        """Give the number of this thread's step, from 0."""
        return self.steps.number

    def settle(self, step: Step) -> None:
        """Judge what is left of an ended step, and keep its readings.

        Raises:
            AnomalyError: As the tracker's action says.
        """
        if self._is_plain(step):
            self.monitor.history.append(step)
            self.failures.streak = self._loss_scale.streak = 0
            if numpy_met[0] is not None:
                self.failures.went_well()
            return
        try:
            self.review(step)
            self.triage.settle(step)
            self._loss_scale.settle(step)
            self._outputs.settle(step)
            self.guard(step)
        finally:
            self._inputs.settle(step)
            self.escalator.settle(step)
            self.monitor.history.append(step)
            if step.failed is None:
                self.failures.went_well()
            else:
                self.record.spread(step)
            self.consequences.settle(step)
            self._write(step)

    def _is_plain(self, step: Step) -> bool:
        """Tell whether an ended step is over as it is: all of it was judged, and nothing waits."""
        busy = self.record.listeners or self.norms.on or self.escalator.left
        undecided = step.carrying or step.left or step.pending_inputs or step.pending or step.held
        after = self.consequences.corrupting or step.failed
        return not (busy or undecided or after) and step.judged == len(step.lo)

    def _write(self, step: Step) -> None:
        for listener in self.record.listeners:
            listener.step(step, self.notes.warnings, self.notes.remarks)

    def passed(self, sites: list[Site], squares: list[float]) -> bool:
        """Take a clean step at little cost; False if it is to be judged as any other.

        Args:
            sites: What was read; a list that is the same object for the same slots.
            squares: The sum of squares of each.
        """
        busy = self.record.listeners or self.escalator.left or self.consequences.corrupting
        if busy or not self.steps.pass_over(sites, squares):
            return False
        self.failures.streak = 0
        if numpy_met[0] is not None:
            self.failures.went_well()
        return True

    def came_again(self, first: Step) -> None:
        """Count a step that was given what failed an earlier one; it is not looked into."""
        step = self.rows()
        self.consequences.came_again(step, first)
        self.close_step()
        self.monitor.history.append(step)
        self._write(step)

    def updated(self, number: int) -> None:
        """Note an optimizer update; ignored if its gradients were already reported."""
        step = self.steps.failed or self.consequences.ended(number)
        if step is None:
            self.weights.updated(number)
            self.failures.updated()
        else:
            self.consequences.applied(step)

    def not_intended(self, bad: list[BadParameter]) -> list[BadParameter]:
        """Note which bad buffers may be intended as tracking begins, and give the rest."""
        return self.triage.not_intended(bad, self.step)

    def clear(self) -> None:
        """Forget events, readings and gradient norms."""
        self.monitor.history.clear()
        self.consequences.inputs.clear()
        for part in (
            self.record, self._suspects, self.investigator, self._outputs, self.norms,
            self._operations,
        ):  # fmt: skip
            part.clear()
