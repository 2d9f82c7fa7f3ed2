"""The contract between the core and an adapter; ``adapters/README.md`` says it in prose."""

import math
from collections.abc import Mapping

from anynan._diagnosis.evidence import BadParameter
from anynan._diagnosis.lineage import Replay
from anynan._readings.readings import Reading
from anynan._steps.framework import Framework
from anynan._steps.messages import METRIC_BAD
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

    def attached(self, found: list[BadParameter] | None = None) -> None:
        """Judge the weights as tracking finds them, and note the buffers that are bad.

        Args:
            found: Those that are bad; by default what ``bad_weights`` lists.

        Raises:
            AnomalyError: As the tracker's action says, if one is bad.
        """
        judge = self.tracker.judge
        bad = judge.not_intended(self.bad_weights() if found is None else found)
        if not bad:
            judge.known_clean(judge.step)
            return
        if judge.consequences.inherit(bad):
            return
        rows, first = judge.rows(), bad[0]
        site = judge.monitor.site(
            first.layer, "parameter", first.name.rpartition(".")[2], first.summary.dtype, None,
            parameter=first.name,
        )  # fmt: skip
        low, high = first.summary.low or 0.0, first.summary.high or 0.0
        rows.add(site, 0, *((math.nan, math.nan) if first.summary.nan else (low, high)))
        try:
            seen = self.written(rows.reading(rows.last), bad)
            judge.flag(rows, rows.last, replayed=seen)
        finally:
            judge.begin_again(rows)

    def shown(self, metrics: Mapping[str, object]) -> None:
        """Say which metrics a trainer shows are bad, where nothing that was read explains it."""
        judge = self.tracker.judge
        for name, value in metrics.items():
            bad = isinstance(value, float) and not math.isfinite(value)
            if bad and not any(judge.record.counts.values()):
                judge.say(METRIC_BAD(name=name, value=value))

    def written(self, reading: Reading, bad: list[BadParameter]) -> Replay | None:  # noqa: ARG002
        """Tell what made weights bad before tracking began, where that is known.

        Args:
            reading: Of the first of them.
            bad: All of them.
        """
        return None
