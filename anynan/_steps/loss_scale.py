"""Gradients that overflow while a loss scale is found are no fault, unless that does not end."""

from anynan._readings.readings import Reading
from anynan._readings.step import Step
from anynan._steps.failures import Failures
from anynan._steps.record import Record
from anynan._steps.subject import Subject
from anynan._steps.suspects import Suspects
from anynan.events import NON_FINITE, Kind

_SKIPPED = "the loss scale is being found: the scaler skips this update"
_STOPPED = "the scaled gradient overflowed and reached no weight: the scaler makes this update"


class LossScale:
    """Have bad gradients wait for what the loss scaler does.

    Attributes:
        streak: How many steps in a row overflowed.
    """

    def __init__(
        self, subject: Subject, record: Record, suspects: Suspects, failures: Failures
    ) -> None:
        self._subject, self._record = subject, record
        self._suspects, self._failures = suspects, failures
        self.streak = 0

    def defers(self, step: Step, reading: Reading, kind: Kind) -> bool:
        """Tell whether a bad gradient waits for the step's end, itself or behind another."""
        if reading.phase != "backward" or (kind not in NON_FINITE and step.pending is None):
            return False
        if step.pending is None and self._subject.adapter.loss_scale() is not None:
            step.pending = reading
        return step.pending is not None

    def unscaled(self, step: Step) -> None:
        """Judge the gradients that waited for a loss scaler: none has a part in this step.

        Raises:
            AnomalyError: As the tracker's action says.
        """
        reading, step.pending = step.pending, None
        if reading is not None:
            self._failures.fail(step, reading, reading.kind or "nan")

    def settle(self, step: Step) -> None:
        """Judge a step whose scaled gradients overflowed, once its end is known."""
        reading, step.pending = step.pending, None
        if reading is None:
            self.streak = 0
            return
        if step.failed is not None or self._subject.watched_by is None:
            return
        self.streak += 1
        now = self._subject.adapter.loss_scale()
        scale = now if step.scale is None else float(step.scale)
        policy, kind = self._subject.options.policy, reading.kind or "nan"
        floor = scale is not None and scale <= policy.scale_floor
        # What came in bad and reached the gradients is not caused by the loss scale.
        if self.streak >= policy.scale_streak or floor or step.carried:
            self._failures.fail(step, reading, kind)
            return
        self._record.counts["expected"] += 1
        expected = (_STOPPED if step.applied else _SKIPPED) + _scales(scale, now)
        self._record.keep(self._suspects.event(reading, kind, expected=expected))


def _scales(scale: float | None, now: float | None) -> str:
    if now is None or scale is None:
        return ""
    texts = [f"{x:.0f}" if x.is_integer() and x < 1e15 else f"{x:g}" for x in (scale, now)]
    return f" (scale {texts[0]}, now {texts[1]})" if scale != now else f" (scale now {texts[1]})"
