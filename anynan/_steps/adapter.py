"""The contract between the core and an adapter; ``adapters/README.md`` says it in prose."""

from collections.abc import Callable

from anynan._diagnosis.evidence import BadParameter
from anynan._readings.step import Step
from anynan._steps.framework import Framework
from anynan._steps.tracked import Tracked
from anynan.options import Options


class BaseAdapter(Framework):
    """Translate one framework's hooks into readings and operation records.

    Adapters never decide: they add readings to ``judge.rows()``, call ``judge.flag`` or
    ``judge.review`` when values are on the host, and ``judge.close_step`` at a boundary.

    Attributes:
        tracker: What the user holds.
    """

    def __init__(self, tracker: Tracked, options: Options | None = None) -> None:
        super().__init__(tracker.judge.options if options is None else options)
        self.tracker = tracker

    def attached(self, write: Callable[[BadParameter, Step], object]) -> None:
        """Judge the weights as tracking finds them, and note the buffers that are bad.

        Args:
            write: Write a reading of a bad weight into the rows.

        Raises:
            AnomalyError: As the tracker's action says, if one is bad.
        """
        judge = self.tracker.judge
        bad = judge.not_intended(self.bad_weights())
        if not bad:
            judge.known_clean(judge.step)
            return
        rows = judge.rows()
        try:
            write(bad[0], rows)
            judge.review(rows)
        finally:
            judge.begin_again(rows)
