"""The events of one tracker: listed, counted, logged and put into words."""

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from anynan._base.messages import slug_of
from anynan._base.notices import warn
from anynan._diagnosis.investigation import place
from anynan._readings.step import Step
from anynan._reports.logs import log
from anynan._reports.report import render, render_line, when_of
from anynan._steps.messages import MAY_FOLLOW
from anynan._steps.subject import Subject
from anynan.events import Event

MAX_EVENTS = 10_000
# Of the event that was told last in this process: what was tracked, and the fault that it is.
_told: list[Any] = [None, None]
# How often each fault was told in a program that is watched as a whole, by whichever tracker: its
# models may be made anew in each step. None elsewhere.
program: list[Counter[Any] | None] = [None]
# What NumPy met so far in such a program, outside of what is tracked.
numpy_met: list[Any] = [None]
# Of one origin so many are reported in a row, then each tenth, hundredth and so on.
REPORTED = 3
# What is said where no second run showed the operation.
_UNSEEN = (None, "unknown", "made_between_layers", "outside_the_model")


class Record:
    """Keep the events, those of one origin as one.

    Attributes:
        counts: How many there were of each severity, and how many that were ``"expected"``.
        listeners: What is written along, as a run's file; each takes events and ended steps.
        replaced: Called with an event and with what stands in its place from now on; held weakly.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.lock = threading.RLock()
        self.counts: Counter[str] = Counter()
        self.listeners: list[Any] = []
        self.replaced: list[weakref.WeakMethod[Callable[[Event, Event], None]]] = []
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._turns: deque[int] = deque(maxlen=MAX_EVENTS)  # of the events, among all trackers'
        # Of each origin and each place a list of one: the event that stands for all.
        self._first: dict[Any, list[Event]] = {}

    @property
    def events(self) -> tuple[Event, ...]:
        """Return the recorded events, oldest first."""
        with self.lock:
            return tuple(self._events)

    @property
    def turns(self) -> tuple[int, ...]:
        """Number the events in the order in which those of all trackers came."""
        with self.lock:
            return tuple(self._turns)

    def clear(self) -> None:
        """Forget the events."""
        with self.lock:
            for held in (self._events, self._turns, self.counts, self._first):
                held.clear()

    def add(self, event: Event) -> None:
        """Count an event and list it."""
        event = self._subject.signed(event)
        with self.lock:
            self.counts["expected" if event.expected else event.severity] += 1
        self.keep(event)

    def keep(self, event: Event) -> None:
        """List an event, log it, and have it written where the run is."""
        turn = log(event)
        with self.lock:
            self._events.append(event)
            self._turns.append(turn)
            for listener in self.listeners:
                listener.event(event)

    def replace(self, event: Event, new: Event) -> None:
        """Put a recorded event's successor in its place."""
        for ref in self.replaced:
            replaced = ref()
            if replaced is not None:
                replaced(event, new)
        with self.lock:
            for first in self._first.values():
                if first[0] is event:
                    first[0] = new
            for i in range(len(self._events) - 1, -1, -1):
                if self._events[i] is event:
                    self._events[i] = new
                    for listener in self.listeners:
                        listener.event(new, instead=event)
                    return

    def spread(self, step: Step) -> None:
        """Write into a failed step's event what turned bad after it was recorded."""
        event: Event = step.failed
        if step.spread > event.spread.count and event.step == step.number:
            step.failed = replace(event, spread=replace(event.spread, count=step.spread))
            self.replace(event, step.failed)

    def add_or_count(self, event: Event) -> Event:
        """Record an event, or count it with the one of the same origin; give what stands for it."""
        cause, operation = event.cause, event.operation
        tag = None if cause is None else cause.tag
        # Other rows of another batch are no repetition.
        held = "" if cause is None or event.phase != "input" else cause.evidence
        origin: tuple[Any, ...] = (event.phase, event.layer, event.kind, event.parameter, tag, held)
        if operation is not None:
            origin = (*origin, operation.name, operation.source)
        here = place(event.phase, event.layer, event.parameter)
        with self.lock:
            first = self._first.get(origin)
            if first is None and operation is None and tag in _UNSEEN:
                # Nothing was looked for any more.
                first = self._first.get(here) or self._first.get(event.spread.surfaced)
            if first is None:
                self.add(event)
                first = self._first[origin] = [event]
                for where in (here, event.spread.surfaced):
                    self._first.setdefault(where, first)
                return event
            self.counts[event.severity] += 1
            self.replace(first[0], replace(first[0], times=first[0].times + 1))
        log(_again(event, first[0]), again=True)
        return first[0]

    # In words.

    def text(self, event: Event) -> str:
        """Put an event into words, in full."""
        adapter = self._subject.watched_by  # it may be removed by now
        here = None if adapter is None else adapter.rank()
        return render(event, here=here, which=self._subject.among_others)

    def warn_of(self, suspect: Event) -> None:
        """Warn of a suspect in a line, unless everything is only recorded."""
        if self._subject.action != "record":
            warn(render_line(suspect, which=self._subject.among_others))

    def report(self, event: Event, first: Event, note: str = "") -> None:
        """Warn of an event: in full the first time, then in a line with a count.

        Nothing is said where so many were reported that the count alone says nothing new.

        Args:
            event: What happened.
            first: What stands for all of its origin.
            note: What was done about it.
        """
        times = first.times
        if first is event:
            follows = bool(program[0]) and may_follow(event)
            again, times = self._told_by_another(event), _counted(event)
            # Another bad batch is another fault.
            most = REPORTED if event.phase == "input" else 1
            if (follows or not _is_told(times, most)) and not note:
                return
            text = render_line(event, which=True) if again or times > 1 else self.text(event)
            warn(f"{text}\n\n  {note}" if note else text)
        elif note or _is_told(times, 1 if may_follow(event) else REPORTED):
            line = render_line(_again(event, first), which=self._subject.among_others)
            warn(f"{line}; {times} times since {when_of(first)}{note and '; '}{note}")

    def _told_by_another(self, event: Event) -> bool:
        """Tell whether another model was told of the same fault just now, as of a loss of both."""
        fault = fault_of(event)
        who, before = _told
        _told[:] = weakref.ref(self._subject), fault
        other = None if who is None else who()
        if other is None or other is self._subject or other.watched_by is None:
            return False
        return fault is not None and fault == before


def _again(event: Event, first: Event) -> Event:
    """Return what a line about the same fault shows: where it was named, and this step."""
    if event.operation is not None:
        return event
    return replace(first, times=1, step=event.step, training_step=event.training_step)


def may_follow(event: Event) -> bool:
    """Tell whether a fault may be because of one of another that is tracked."""
    if event.cause is not None and event.cause.tag == "made_by_another":
        return True
    return any(slug_of(note) == MAY_FOLLOW.slug for note in event.notes)


def fault_of(event: Event) -> tuple[Any, ...] | None:
    """Give by what a fault is known again, whatever it surfaced in; None without an operation."""
    operation, cause = event.operation, event.cause
    if operation is None:
        return None
    tag = None if cause is None else cause.tag
    return event.phase == "input", operation.name, operation.source, tag


def _is_told(times: int, most: int) -> bool:
    """Tell whether what happened so often is said once more."""
    return times <= most or set(str(times)[1:]) == {"0"}


def _counted(event: Event) -> int:
    """Count a fault of a whole program with those of other trackers; 1 where none is like it."""
    counts, fault = program[0], fault_of(event)
    if counts is None:
        return 1
    counts[fault] += 1
    return 1 if fault is None else counts[fault]
