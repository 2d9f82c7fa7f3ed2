"""What a watcher of operations saw: of a whole step, or up to an exception."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from anynan._base import tracebacks
from anynan._base.sources import is_library
from anynan._diagnosis.agreement import divergence, same_end
from anynan._diagnosis.evidence import ReplayError
from anynan._diagnosis.kinds.operations import contained
from anynan._diagnosis.lineage import PLACING, OpRecord, Replay, Sink, trace
from anynan._diagnosis.messages import CONTAINED
from anynan._readings.monitor import Monitor
from anynan._readings.policy import may_mask
from anynan._readings.step import Step
from anynan._steps import messages
from anynan._steps.escalator import Escalator
from anynan._steps.failures import Failures, names_bad, takes_along
from anynan._steps.investigator import MAX_REPLAYS, VALUES
from anynan._steps.notes import Notes
from anynan._steps.record import Record
from anynan._steps.subject import Subject
from anynan._steps.suspects import Suspects
from anynan._steps.triage import Triage
from anynan.errors import reason


class Operations:
    """Judge operations as readings are judged."""

    def __init__(
        self, subject: Subject, monitor: Monitor, record: Record, notes: Notes,
        suspects: Suspects, escalator: Escalator, triage: Triage, failures: Failures,
    ) -> None:  # fmt: skip
        self._subject, self._monitor, self._record = subject, monitor, record
        self._notes, self._suspects, self._escalator = notes, suspects, escalator
        self._triage, self._failures = triage, failures
        self._seen: Counter[Any] = Counter()
        self.clear = self._seen.clear

    def judge(self, step: Step, look: Callable[[], Replay | None]) -> None:
        """Judge what an operation-level watcher saw of a whole step.

        Args:
            step: The step.
            look: Gives what was seen, in this run or in another; None where nothing was.

        Raises:
            AnomalyError: As the tracker's action says.
        """
        try:
            seen = look()
            if seen is None:
                return
            lineage = trace(seen.records, seen.sinks)
        except Exception as error:  # noqa: BLE001  never break the user's program
            why = str(error) if isinstance(error, ReplayError) else reason(error)
            self._notes.say(messages.STEPS_UNSEEN(why=why))
            return
        for record in () if self._escalator.left else lineage.contained:
            if record.output is None or record.output.kind is None:
                continue
            self._record.counts["expected" if record.expected else "suspect"] += 1
            key = (record.layer, record.name, record.source)
            self._seen[key] += 1
            if self._seen[key] == 1:  # listed once, counted every time
                event = contained(record, step, self._subject.evidence, CONTAINED())
                self._record.keep(self._subject.signed(event))
        if lineage.sink is not None and step.failed is None and step.held is None:
            self._surface(step, lineage.sink, seen)

    def note(self, step: Step, record: OpRecord, note: str) -> None:
        """Warn, once, of an operation that made a bad value of which no more is known.

        Args:
            step: The open step.
            record: The operation.
            note: What is known.
        """
        self._suspects.report(contained(record, step, self._subject.evidence, note))

    def raised(
        self, step: Step, error: BaseException, look: Callable[[], Replay | None],
        heard: tuple[OpRecord, str] | None = None,
    ) -> None:  # fmt: skip
        """Judge what the program raised an exception over, if that was bad.

        Args:
            step: The open step, read so far.
            error: The exception.
            look: Gives what a watcher saw up to it, in this run or in another; its last sink is
                what the program took last, if that was bad.
            heard: The one operation that the library itself noted, and what to say of it.
        """
        self._triage.review(step)
        if not takes_along(error):
            return
        self._seen[type(error)] += 1
        many = self._seen[type(error)] > MAX_REPLAYS
        if step.failed is not None or step.held is not None:
            return
        if self._subject.options.replay and not many and self._shown(step, error, look):
            return
        if not names_bad(error):
            return
        if step.pending_inputs:
            item = step.pending_inputs[0]
            self._failures.fail(step, item.reading, item.kind, item.value())
        elif heard is not None:
            event = contained(heard[0], step, self._subject.evidence, heard[1])
            self._failures.accept(step, replace(event, severity="bad"))

    def _shown(self, step: Step, error: BaseException, look: Callable[[], Replay | None]) -> bool:
        """Report what a watcher saw the program raise an exception over."""
        try:
            seen = look()
        except Exception:  # noqa: BLE001  the program's own exception is the news
            return False
        if seen is None or not same_end(error, seen.raised):
            return False
        if not seen.sinks:
            if _of_library(error):
                self._hint(step, seen)
            return False
        last = step.reading(step.last) if step.lo else None
        ends = self._subject.options.level == "step"
        if last is not None and divergence(step, last, seen.passed, ends=ends) is not None:
            return False
        if may_mask(seen.sinks[-1].kind, seen.sinks[-1].phase) and names_bad(error):
            seen.sinks = [replace(seen.sinks[-1], phase="value")]  # no mask to the program
        lineage = trace(seen.records, seen.sinks[-1:])
        origin = lineage.origin
        if origin is None or lineage.sink is None:
            return False
        if origin.name in PLACING and lineage.sink.kind != "nan":
            return False  # a mask may be looked at by anybody
        label = f"the {type(error).__name__} that the program raised"
        self._surface(step, replace(lineage.sink, label=label), seen)
        return step.failed is not None

    def _hint(self, step: Step, seen: Replay) -> None:
        """Note the first NaN of a step that a library ended: it may be because of that."""
        for record in trace(seen.records, []).contained:
            made = record.output is not None and record.output.nan and record.name not in PLACING
            if made and not record.expected:
                self.note(step, record, messages.MAY_HAVE_RAISED())
                return

    def _surface(self, step: Step, sink: Sink, seen: Replay) -> None:
        """Judge a place of harm that only a watcher of operations saw."""
        site = self._monitor.site(sink.layer, sink.phase, sink.label, "", None)
        value = VALUES.get(sink.kind, math.nan)
        step.add(site, 0, value, value)
        self._triage.flag(step, step.last, replayed=seen)


def _of_library(error: BaseException) -> bool:
    """Tell whether a library raised it, as a solver that gives up; the program knows its own."""
    last = tracebacks.frames(error)[-1:]
    return any(is_library(x.tb_frame.f_code.co_filename) for x in last)
