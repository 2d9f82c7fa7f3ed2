"""What fails a step, and what is done about it: raise, warn, skip the update, call back."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from anynan._base.context import but
from anynan._diagnosis.causes import UNKNOWN, Situation, explain
from anynan._diagnosis.investigation import operation
from anynan._diagnosis.lineage import OpRecord, Replay, trace
from anynan._diagnosis.rules.circumstance import PROBABLE
from anynan._readings.readings import Reading
from anynan._readings.step import DeferredFailure, Step
from anynan._steps.consequences import Consequences
from anynan._steps.inputs import Inputs
from anynan._steps.investigator import Investigator
from anynan._steps.messages import MADE_BEFORE, NUMPY_BEFORE, PATIENCE
from anynan._steps.record import Record, numpy_met
from anynan._steps.subject import Subject
from anynan.errors import AnomalyError, NonFiniteError, reason
from anynan.events import NON_FINITE, Event, Kind

# Phases of a step that takes gradients.
_TRAINING = ("loss", "backward", "parameter", "optimizer")


# What says so in the words of NumPy, SciPy, scikit-learn, PyTorch, JAX and TensorFlow.
_NAMES = re.compile(
    r"(?<!\w)(nans?|[+-]?infs?|infinity|infinities|non-?finite|not finite|invalid numeric)(?!\w)",
    re.IGNORECASE,
)
_QUOTED = re.compile(r"(?<!\w)(['\"])[^'\"\n]*\1(?!\w)")
# These speak of names and files.
_OF_NAMES = (ImportError, OSError, LookupError, NameError, AttributeError, SyntaxError)


def names_bad(error: BaseException) -> bool:
    """Tell whether an exception names NaN or Inf."""
    if isinstance(error, _OF_NAMES):
        return False
    text = reason(error)
    if isinstance(error, FloatingPointError):
        return "underflow" not in text
    return _NAMES.search(_QUOTED.sub("", text)) is not None


def takes_along(error: BaseException) -> bool:
    """Tell whether an exception may be because of a bad value: no end of a loop or a program is."""
    passing = StopIteration, StopAsyncIteration, AnomalyError
    return isinstance(error, Exception) and not isinstance(error, passing)


# Causes of a fault that code made which nobody watches.
_CAME = ("bad_input", "bad_label", "bad_parameter", "written_constant", "unknown")


class Failures:
    """Investigate a failure, and act on it as the options say, unless it follows from one before.

    Attributes:
        streak: How many steps in a row were bad.
    """

    def __init__(
        self, subject: Subject, record: Record, inputs: Inputs, consequences: Consequences,
        investigator: Investigator,
    ) -> None:  # fmt: skip
        self._subject, self._record, self._inputs = subject, record, inputs
        self._consequences, self._investigator = consequences, investigator
        self._local = threading.local()
        self.streak = self._met = 0

    def went_well(self) -> None:
        """Note that a step is over in which nothing was bad."""
        self.streak, watching = 0, self._subject.watched_by
        if watching is not None and not watching.sees_training:
            self.updated()

    def updated(self) -> None:
        """Note that what NumPy met by now came to nothing: all of it went into a good update."""
        self._met = len(numpy_met[0] or ())

    def fail(
        self, step: Step, reading: Reading, kind: Kind, value: Any = None, *, later: int = 0,
        replayed: Replay | None = None,
    ) -> None:  # fmt: skip
        """Investigate a bad reading and act on the event; defer it where ranks act together.

        Raises:
            AnomalyError: As the tracker's action says.
        """
        consequences = self._consequences
        if consequences.explain(step, reading, kind, later):
            return
        if self._inputs.were_reported(step, reading, kind):
            return
        if step.holding:
            step.defer(step.held or DeferredFailure(reading, kind, value, replayed))
            return
        event = self._investigator.find(step, reading, kind, value, later=later, replayed=replayed)
        if event is not None and not consequences.explain_event(step, event, reading.key(kind)):
            self.accept(step, event)

    def accept(self, step: Step, event: Event) -> None:
        """Fail a step by an event, be it this rank's or another's.

        Raises:
            AnomalyError: As the tracker's action says.
        """
        event = self._consequences.begin(step, event)
        event = self._subject.signed(self._with_maker(event))
        # Before the first iteration ends it may be a program that does nothing but evaluate.
        if step.evaluated and (step.evaluated < step.number or event.phase in _TRAINING):
            event = replace(event, training_step=step.number - step.evaluated)
        step.fail(event, elsewhere=event.rank != self._subject.adapter.rank())
        for listener in self._record.listeners:
            listener.failed(step)
        step.failed = first = self._record.add_or_count(event)
        self.streak += 1
        carried = getattr(self._local, "carried", None)
        if carried is not None:  # an exception is on its way, which takes the report along
            carried.append(event)
            return
        self._act(event, first, step)

    def _with_maker(self, event: Event) -> Event:
        """Name in an event of what came in bad what made it before the step, or may have."""
        errors, taker = numpy_met[0], event.operation
        if event.cause is None or event.cause.tag not in (*_CAME, *PROBABLE):
            return event
        made, kind, what = self._made_before(event, event.cause.tag)
        if made is None:
            notes = [NUMPY_BEFORE(errors=errors)] if errors else []
            return replace(event, notes=(*event.notes, *notes))
        source, found = taker and taker.source, operation(made)
        took = f"; {taker.name} at {source.place} took it in" if taker and source else ""
        if found is not None and event.phase in ("input", "parameter"):
            found = replace(found, phase=event.phase)
        cause = explain(Situation("forward", kind, record=made))
        note = MADE_BEFORE(what=what + took)
        return replace(event, operation=found, cause=cause, notes=(*event.notes, note))

    def _made_before(self, event: Event, tag: str) -> tuple[OpRecord | None, Kind, str]:
        """Give what made what came in before the step, of which kind, and how that shows."""
        taker, held = event.operation, event.summary
        taken = [x for x in (taker.inputs if taker else ()) if x.bad]
        if taker and tag == UNKNOWN and not taken:
            return None, event.kind, ""
        taken += [held] if held is not None and held.bad else []
        kind = (taken and taken[0].kind) or event.kind
        with suppress(Exception):  # nothing is claimed of what could not be looked at
            found = self._subject.adapter.made_before(replace(event, kind=kind), taken)
            made = found and trace(found.records, found.sinks, neginf=True).origin
            if made and made.output:
                return made, made.output.kind or kind, "nothing else had made NaN or Inf by then"
        met = None if tag in PROBABLE else numpy_met[0]
        what = "NumPy met this alone since the last update that went well"
        return met.told(0, kind, self._met) if met else None, kind, what

    def refuse(self, event: Event, step: Step) -> None:
        """Act on an event that is about no single reading, as a jump of the gradients."""
        event = self._subject.signed(event)
        if event.severity != "bad":
            self._record.add(event)
            if event.expected is None:
                self._record.warn_of(event)
        elif step.holding:
            step.defer(step.held or DeferredFailure(event=event))
        else:
            self.accept(step, event)

    def _act(self, event: Event, first: Event, step: Step) -> None:
        action, record, soft = self._subject.action, self._record, self._subject.soft
        if soft and action != "record":
            action = "warn"
        patience = self._subject.options.patience
        patient = not soft and self.streak <= patience
        if action == "off" or (action == "record" and not patient):
            return
        if patient:
            step.skip = True
            if action != "record":
                note = PATIENCE(n=self.streak, most=patience)
                record.report(event, first, "" if self._subject.ignores(note) else note)
        elif action == "raise":
            kind = NonFiniteError if event.kind in NON_FINITE else AnomalyError
            raise kind(record.text(event), event, self._subject.handle)
        elif action == "warn":
            record.report(event, first)
        elif action == "skip":
            step.skip = True
            if self.streak == 1:
                record.report(event, first, "the update of this step is dropped")
        elif isinstance(action, Callable):  # type: ignore[arg-type]
            action(event)

    @contextmanager
    def carried_by(
        self, error: BaseException, step: Step | None, *, raising: bool = True
    ) -> Iterator[None]:
        """Let an exception of the program's take along the report of what is found inside.

        Args:
            error: The exception. One that only ends a loop or the program takes nothing along:
                what is found is warned about.
            step: The open step. What failed it before was told, and is only noted.
            raising: Whether an error may be raised from it here, as ``action="raise"`` says.

        Raises:
            AnomalyError: Of what was found inside.
        """
        if not takes_along(error):
            with self._subject.softly():
                yield
            return
        reported = None if step is None else step.failed
        found: list[Event] = []
        with but(self._local, carried=found):
            yield
        action = self._subject.action
        if action == "off" or not (found or reported):
            return
        if reported is not None:
            error.add_note(self._record.text(reported))
            return
        if callable(action):
            action(found[0])
        text = self._record.text(found[0])
        if action == "raise" and raising:
            kind = NonFiniteError if found[0].kind in NON_FINITE else AnomalyError
            raise kind(text, found[0], self._subject.handle) from error
        error.add_note(text)
