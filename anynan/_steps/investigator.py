"""From a bad reading to an event: the second run, what it proves, and a try of the fix."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from anynan._diagnosis.diagnosis import bare, diagnose
from anynan._diagnosis.evidence import ReplayError
from anynan._diagnosis.investigation import Investigation
from anynan._diagnosis.lineage import Replay, Sink
from anynan._diagnosis.trials import tried
from anynan._readings.monitor import Monitor
from anynan._readings.readings import Reading
from anynan._readings.step import Step
from anynan._steps import messages
from anynan._steps.escalator import Escalator
from anynan._steps.inputs import Inputs
from anynan._steps.record import Record
from anynan._steps.subject import Subject
from anynan._steps.suspects import Suspects
from anynan._steps.weights import Weights
from anynan.errors import reason
from anynan.events import NON_FINITE, Event, Kind

MAX_REPLAYS = 3
VALUES = {"posinf": math.inf, "neginf": -math.inf}
_ESCALATED = ("forward", "loss", "backward")


class Investigator:
    """Find what bad readings came from.

    Attributes:
        carriers: Layers that hand on what came in, and whether a second run has shown it.
        found: Called with each bad reading and its event; gives notes for it, as where a bundle
            was saved.
    """

    def __init__(
        self, subject: Subject, monitor: Monitor, record: Record, suspects: Suspects,
        inputs: Inputs, weights: Weights, escalator: Escalator,
    ) -> None:  # fmt: skip
        self._subject, self._monitor, self._record = subject, monitor, record
        self._suspects, self._inputs, self._weights = suspects, inputs, weights
        self._escalator = escalator
        self._looked: Counter[tuple[Any, ...]] = Counter()
        self.carriers: dict[tuple[Any, ...], bool] = {}
        self.found: list[Callable[[Reading, Event], tuple[str, ...]]] = []

    def clear(self) -> None:
        """Forget what was looked into."""
        self._looked.clear()
        self.carriers.clear()

    def wants_replay(self, reading: Reading, kind: Kind, *, now: bool = False) -> bool:
        """Tell whether a bad reading is worth a replay, or ``now`` that it has been counted."""
        looked = self._looked[reading.key(kind)]
        return self._subject.options.replay and looked < MAX_REPLAYS + now

    def find(
        self, step: Step, reading: Reading, kind: Kind, value: Any = None, *, later: int = 0,
        replayed: Replay | None = None,
    ) -> Event | None:  # fmt: skip
        """Find what a bad reading came from; None if it is a mask or was expected."""
        key = reading.key(kind)
        self._looked[key] += 1
        event, case = self.investigate(step, reading, kind, value, later, replayed)
        if event is None:
            self._monitor.downgraded[key] = "only placed values (a mask)"
            self._suspects.note(reading, kind, value)
            return None
        inside = reading.phase == "forward" and bool(reading.layer)
        if event.phase == "input" and inside and step.pending_inputs:
            shown = case.replayed is not None
            handed = (item.key(item.kind) for item in step.carrying)
            self.carriers.update(dict.fromkeys([key, *handed], shown))
            step.carried = step.carried or shown
            step.spread += 1
            return None
        corrupts = reading.site.parameter is not None or reading.phase in ("loss", "optimizer")
        if event.expected is not None and not corrupts:
            self._monitor.downgraded[key] = event.expected
            self._record.add(replace(event, severity="suspect"))
            return None
        if event.expected is not None:
            note = messages.EXPECTED_HARM(why=event.expected)
            event = replace(event, expected=None, notes=(*event.notes, note))
        if reading.phase == "backward" and isinstance(self._subject.options.read, int):
            self._weights.corrupted = step.number
        return self._finished(step, event, case)

    def _finished(self, step: Step, event: Event, case: Investigation) -> Event:
        """Add what is known beside the cause: the fix, what is done next, where it was."""
        event = self._tried(event, case)
        if case.unshown and event.operation is None and event.phase in _ESCALATED:
            event = self._escalator.begin(step, event)
        elif event.operation is not None:
            event = self._escalator.end(step, event)
        where = str(self._subject.where)
        if where:
            event = replace(event, notes=(*event.notes, where))
        for found in self.found:
            event = replace(event, notes=(*event.notes, *found(case.reading, event)))
        return event

    def investigate(
        self, step: Step, reading: Reading, kind: Kind, value: Any, later: int,
        replayed: Replay | None,
    ) -> tuple[Event | None, Investigation]:  # fmt: skip
        """Put together what is known of a bad reading, with a second run where one is wanted."""
        subject, weights = self._subject, self._weights
        options, adapter = subject.options, subject.adapter
        if value is None:
            value = step.array(reading.order)
        together = replayed is not None  # all ranks ran it again
        if replayed is None and step.seen is not None:
            replayed = step.seen(reading, value)
        case = Investigation(
            reading, kind, step, adapter.evidence(reading, value), self._monitor, later,
            clean=weights.clean, updates=list(weights.updates), replayed=replayed,
            seen=replayed is not None, together=together, unread=weights.unread,
            watched=step.seen is not None or options.level == "operation",
            ends=options.level == "step", came_in=self._inputs.came_in(step, kind),
            of_model=subject.of_model,
            in_order=adapter.in_order,
            evidence_of=lambda other: adapter.evidence(other, step.array(other.order)),
            meant=weights.intended,
            trained=weights.trained or not (options.backward and adapter.sees_training),
        )  # fmt: skip
        if replayed is None and self.wants_replay(reading, kind, now=True):
            self._run_again(case)
        elif replayed is None and options.replay:
            case.notes.append(messages.NOT_REPLAYED_AGAIN(n=MAX_REPLAYS))
        try:
            return diagnose(case), case
        except Exception as error:  # noqa: BLE001  never break the user's program
            return bare(case, error), case

    def _run_again(self, case: Investigation) -> None:
        """Have the step replayed, where that can tell more."""
        if case.reading.phase in ("parameter", "input") or case.kind not in NON_FINITE:
            return
        notes: list[str] = []
        adapter = self._subject.adapter
        for again in (adapter.replay, adapter.replay_call):
            try:
                replayed = again(case.reading)
                verdict = None if replayed is None else case.weigh(replayed)
            except ReplayError as error:
                if again == adapter.replay:
                    self._looked[case.reading.key(case.kind)] -= 1  # it may be possible then
                notes.append(error.note)
            except Exception as error:  # noqa: BLE001  what was found must not be lost
                notes.append(messages.REPLAY_FAILED(error=reason(error)))
            else:
                shown = verdict is not None and verdict.shown
                if shown and case.replayed is not None:
                    notes += case.replayed.notes
                if shown or case.replayed is None:
                    case.replayed, case.verdict = replayed, verdict
                if shown:
                    break
        else:
            case.unshown = True
        case.notes += notes

    def _tried(self, event: Event, case: Investigation) -> Event:
        """Add what came of the fix, where a second run may be made for it."""
        options, seen = self._subject.options, case.replayed
        again = options.replay and options.level != "operation"
        if not again or seen is None or seen.notes or seen.inner:
            return event
        adapter, reading = self._subject.adapter, case.reading
        try:
            return tried(
                event, case, lambda repairs: adapter.attempt(reading, repairs), self._excused
            )
        except Exception:  # noqa: BLE001  nothing is claimed of what could not be tried
            return event

    def _excused(self, sink: Sink) -> bool:
        """Tell whether bad values may be there by policy, or by what was said where they arose."""
        value, policy = VALUES.get(sink.kind, math.nan), self._subject.options.policy
        judged = policy.judge(sink.phase, value, value, layer=sink.layer, dtype_max=None)
        if judged is None or judged[1] != "bad":
            return True
        key = (sink.layer, sink.phase, judged[0])
        allowed = policy.allowed(judged[0], sink.phase, sink.layer)
        return allowed is not None or key in self._monitor.downgraded
