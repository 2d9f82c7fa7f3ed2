"""What is noted and not acted on: suspects, and what was expected."""

from collections import Counter
from dataclasses import replace
from typing import Any

from anynan._base.notices import warn
from anynan._base.summary import Summary
from anynan._diagnosis.causes import Situation, explain
from anynan._diagnosis.rules.evidence import magnitude
from anynan._readings.readings import Reading
from anynan._steps.record import Record
from anynan._steps.subject import Subject
from anynan.events import NON_FINITE, STATE, Event, Kind


class Suspects:
    """List each the first time, and count it every time."""

    def __init__(self, subject: Subject, record: Record) -> None:
        self._subject, self._record = subject, record
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self.clear = self._seen.clear

    def is_known(self, reading: Reading, kind: Kind) -> bool:
        """Tell whether the same was noted before."""
        return self._seen[_key(reading, kind)] > 0

    def count(self, reading: Reading, kind: Kind) -> None:
        """Count a reading as noted: another event is about it."""
        self._seen[_key(reading, kind)] += 1

    def note(
        self, reading: Reading, kind: Kind, value: Any, *, expected: str | None = None
    ) -> None:
        """Note a suspect or an expected reading."""
        self._record.counts["expected" if expected else "suspect"] += 1
        self.count(reading, kind)
        if self._seen[_key(reading, kind)] > 1:
            return
        summary, cause = self._measured(value), None
        if reading.site.tensor == STATE and summary is not None:
            parts = (reading.site.parameter or "").split(".")
            state = dict.fromkeys(parts, summary)
            cause = explain(Situation("optimizer", kind, tensor=STATE, state=state))
        event = self.event(reading, kind, summary=summary, expected=expected, cause=cause)
        self._record.keep(event)
        if kind not in NON_FINITE and expected is None:
            self._record.warn_of(event)

    def event(self, reading: Reading, kind: Kind, **said: Any) -> Event:
        """Make the event of a reading that does not act."""
        if kind == "large":
            said["notes"] = (self._beyond(reading), *said.get("notes", ()))
        adapter = self._subject.adapter
        event = Event(
            backend=adapter.backend, layer=reading.layer, phase=reading.phase, kind=kind,
            severity="suspect", step=reading.step, call=reading.call, order=reading.order,
            tensor=reading.site.tensor, parameter=reading.site.parameter, rank=adapter.rank(),
            **said,
        )  # fmt: skip
        return self._subject.signed(event)

    def report(self, event: Event) -> None:
        """Record a suspect with its operation, and warn of it; one seen before is only counted."""
        event = self._subject.signed(replace(event, severity="suspect"))
        self._seen["reported", event.operation] += 1
        if self._seen["reported", event.operation] > 1:
            self._record.counts["suspect"] += 1
            return
        self._record.add(event)
        if self._subject.action not in ("record", "off"):
            warn(self._record.text(event))

    def _beyond(self, reading: Reading) -> str:
        """Say how large a reading is, and beyond which limit."""
        site, policy = reading.site, self._subject.options.policy.at(reading.layer)
        limit = policy.limit(site.layer, site.dtype_max)
        option = "large" if limit == policy.large else f"headroom={policy.headroom:g}"
        return f"{magnitude(reading.absmax or 0.0)} is beyond {magnitude(limit)} ({option})"

    def _measured(self, value: Any) -> Summary | None:
        try:
            known = value is None or isinstance(value, Summary)
            return value if known else self._subject.adapter.measure(value)
        except Exception:  # noqa: BLE001  an array that cannot be summarised was still seen
            return None


def _key(reading: Reading, kind: Kind) -> tuple[Any, ...]:
    return reading.layer, reading.phase, kind, reading.site.tensor
