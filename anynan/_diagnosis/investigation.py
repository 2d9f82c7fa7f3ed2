"""What is known of one bad reading while its event is put together."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from anynan._diagnosis import messages
from anynan._diagnosis.agreement import CheckedPoint, divergence
from anynan._diagnosis.causes import explain
from anynan._diagnosis.evidence import Evidence
from anynan._diagnosis.lineage import Lineage, OpRecord, Replay, trace
from anynan._diagnosis.rules.repair import Repair
from anynan._diagnosis.rules.situation import Situation
from anynan._diagnosis.vocabulary import GRADIENTS, OPERANDS
from anynan._readings.monitor import Monitor
from anynan._readings.policy import may_mask
from anynan._readings.readings import Reading, Site
from anynan._readings.step import Step
from anynan.events import NON_FINITE, Event, Kind, Operation, Phase, Spread


@dataclass(frozen=True, slots=True)
class BadInput:
    """Hold what is known of bad values that came in with the data.

    Attributes:
        reading: Their reading.
        kind: What is bad.
        evidence: What the adapter knows of them.
        harmless: The same came in before, and nothing came of it.
    """

    reading: Reading
    kind: Kind
    evidence: Evidence
    harmless: bool = False

    @property
    def name(self) -> str:
        """Name the input."""
        return self.reading.site.tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """Say what a second run proves of a bad reading.

    Attributes:
        divergence: Where it parted from the first run, None where both saw the same.
        lineage: Where what was bad came from.
        shown: Whether it saw the fault.
    """

    divergence: str | None
    lineage: Lineage = field(default_factory=Lineage)
    shown: bool = False


@dataclass(slots=True)
class Investigation:
    """Hold what is known of one bad reading while the event is put together."""

    reading: Reading
    kind: Kind
    rows: Step
    evidence: Evidence
    monitor: Monitor
    later: int = 0
    clean: int | None = None
    updates: list[int] = field(default_factory=list)
    replayed: Replay | None = None
    verdict: Verdict | None = None  # what that run proves, once it was weighed
    seen: bool = False  # every operation of the first run itself was
    together: bool = False
    unread: str = ""
    watched: bool = False
    ends: bool = False
    came_in: list[BadInput] = field(default_factory=list)
    meant: Mapping[str, int] = field(default_factory=dict)
    trained: bool = False
    notes: list[str] = field(default_factory=list)
    repair: Repair | None = None
    unshown: bool = False  # a second run was asked for, and did not show it
    of_model: bool = True
    in_order: bool = False
    unordered: bool = False  # read together, so no trail leads there
    evidence_of: Callable[[Reading], Evidence] | None = None

    @property
    def lineage(self) -> Lineage:
        """Give where what was bad came from: nothing is known where no second run is believed."""
        return Lineage() if self.verdict is None else self.verdict.lineage

    @property
    def incoming(self) -> bool:
        """Tell whether it came into the model bad, and not as what the model itself gave."""
        if self.replayed is None or not self.replayed.incoming:
            return False
        origin = self.lineage.origin
        own = self.reading.phase in ("loss", "forward")  # a loss may be a module
        made = own and origin is not None and origin.phase == "forward"
        return not made

    def weigh(self, replayed: Replay) -> Verdict:
        """Say what a second run proves: no more than what the first run saw, too."""
        rows, reading = self.rows, self.reading
        if not self.seen:
            parted = divergence(rows, reading, replayed.passed, ends=self.ends)
            if parted is not None:
                return Verdict(parted)
        neginf = may_mask(self.kind, reading.phase)
        found = trace(replayed.records, replayed.sinks, neginf=neginf)
        shown = replayed.incoming or found.sink is not None or found.placed_only
        # A forward reading fails for -Inf only where the policy says so; a loss that is made
        # outside of the model, for the -Inf that the model gave.
        gave = reading.phase in ("loss", "forward") and replayed.incoming
        if self.came_in:
            found = self._beside_bad_input(replayed, found, neginf=gave or neginf)
        elif gave and not neginf:
            found = trace(replayed.records, replayed.sinks, neginf=True)
        return Verdict(None, found, shown)

    def _beside_bad_input(self, replayed: Replay, found: Lineage, *, neginf: bool) -> Lineage:
        """Leave out what a layer made of bad data: it does no harm if it is dealt with.

        What counts is what came out of the model, and of a layer, whether it made something bad by
        itself.
        """
        records, sinks = replayed.records, replayed.sinks
        if self.reading.layer and self.reading.phase == "forward":
            own = trace(records, sinks, neginf=neginf, past="input")
            return own if own.sink is not None else found
        left = [sink for sink in sinks if sink.phase != "forward" or not sink.layer]
        return trace(records, left or sinks, neginf=neginf)

    def say_clean(self) -> None:
        """Note that no operation of a second run, or of the watched first one, explains this."""
        replayed = self.replayed
        if replayed is None:
            return
        watched, self.watched = self.seen, self.watched or self.seen or replayed.whole
        if replayed.whole:  # its own notes say it
            return
        site, at = self.reading.site, (self.reading.phase, self.reading.layer, self.kind)
        came = any((sink.phase, sink.layer, sink.kind) == at for sink in replayed.sinks)
        said = messages.REPLAY_CLEAN
        if (watched and not self.together) or came:
            said = messages.OPERATION_UNSEEN
        elif replayed.uncompiled:
            said = messages.COMPILED_ONLY
        elif site.parameter is not None and site.phase == "backward":
            said = messages.GRADIENT_FINITE
        self.notes.append(said())

    def event(self, situation: Situation | None = None, **said: Any) -> Event:
        """Make an event; what is not said is the situation's, and the reading's own."""
        reading = self.reading
        common = {
            "kind": self.kind, "severity": "bad", "step": reading.step, "call": reading.call,
            "order": reading.order, "spread": self.spread,
            "notes": tuple(dict.fromkeys((*self.notes, *self.evidence.notes))),
        }  # fmt: skip
        return event_of(situation, self.evidence, **{**common, **said})

    @property
    def spread(self) -> Spread:
        """Say where it was seen, of an event that is about another place."""
        reading = self.reading
        return Spread(self.later, place(reading.phase, reading.layer, reading.site.parameter))

    def trail(
        self, layer: str | None, phase: Phase, call: int | None = None
    ) -> tuple[tuple[str, float | None], ...]:
        """Give what led to the bad layer, which ends it."""
        if phase not in ("forward", "backward") or self.unordered:
            return ()
        rows, upto = self.rows, self.reading.order
        if self.ends and self.replayed is not None and self.replayed.passed:  # only the ends
            rows = _as_rows(self.replayed.passed, rows)
            upto = len(rows.sites) - 1
        trail = self.monitor.trail(rows, upto, layer, phase, call)
        if trail and layer is not None and self.kind in NON_FINITE:
            trail = (*trail[:-1], (layer, None))  # what was read of it may have been hidden again
        return trail


def event_of(situation: Situation | None, evidence: Evidence, **said: Any) -> Event:
    """Make an event; what is not said is the situation's own."""
    s = situation
    if s is not None:
        said = {
            "layer": s.layer, "phase": s.phase, "tensor": s.tensor, "parameter": s.parameter,
            "summary": s.summary, "operation": operation(s.record), "then": operation(s.then),
            **said, "kind": s.kind, "cause": said.get("cause") or explain(s),
        }  # fmt: skip
    return Event(backend=evidence.backend, rank=evidence.rank, **said)


def _as_rows(passed: list[CheckedPoint], first: Step) -> Step:
    """Put what a replay passed in the form of the first run's rows."""
    rows = Step(first.number)
    for point in passed:
        site = Site(-1, point.layer, point.phase, point.tensor, "", None, math.inf)
        rows.add(site, point.call, point.lo, point.hi)
    return rows


def operation(record: OpRecord | None) -> Operation | None:
    """Turn an adapter's record into the public form."""
    if record is None:
        return None
    held = [item for item in record.operands if item.summary is not None]
    words = OPERANDS.get(record.name, {})
    if record.phase == "backward" and not record.direct:
        words = {item.name: GRADIENTS.get(item.name.rstrip("0123456789"), "") for item in held}
    # Frameworks have them in orders of their own.
    elif all(item.name in words for item in held):
        held.sort(key=lambda item: list(words).index(item.name))
    else:
        words = {}
    return Operation(
        name=record.name,
        raw=record.raw,
        inputs=tuple(item.summary for item in held if item.summary is not None),
        output=record.output,
        source=record.source,
        layer=record.layer,
        phase="forward" if record.direct else record.phase,
        direct=record.direct,
        operands=tuple(words[item.name] for item in held) if any(words.values()) else (),
    )


def place(phase: str, layer: str | None, parameter: str | None) -> str:
    """Say in a few words where a reading is."""
    if parameter is not None and phase == "backward":
        return f"gradient of {parameter}"
    if parameter is not None and phase == "optimizer":
        return f"the update of {parameter}"
    if layer is None:
        return {"loss": "the loss"}.get(phase, phase)
    return f"{phase} {layer or '(the model itself)'}"
