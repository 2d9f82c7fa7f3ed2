"""Act on an event: raise, warn, skip the update, call back."""

import re
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from anynan._base.messages import left, slug_of
from anynan._base.notices import warn
from anynan._diagnosis.investigation import place
from anynan._readings.step import Step
from anynan._reports.logs import log
from anynan._reports.report import render, render_line
from anynan._steps.messages import PATIENCE
from anynan.errors import AnomalyError, NonFiniteError, reason
from anynan.events import NON_FINITE, Event
from anynan.options import Options, environment

if TYPE_CHECKING:
    from anynan._steps.adapter import BaseAdapter
    from anynan._steps.tracked import Tracked

MAX_EVENTS = 10_000
# Of one origin so many are told in a row, then each tenth, hundredth and so on.
TOLD = 3
# Phases of a step that takes gradients.
_TRAINING = ("loss", "backward", "parameter", "optimizer")
# What is said where no second run showed the operation.
_UNSEEN = (None, "unknown", "made_between_layers")


# What says so in the words of NumPy, SciPy, scikit-learn, PyTorch, JAX and TensorFlow.
_NAMES = re.compile(
    r"(?<!\w)(nans?|[+-]?infs?|infinity|infinities|non-?finite|not finite)(?!\w)", re.IGNORECASE
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


class Actor:
    """Record a tracker's events, and do what its options say about them."""

    def __init__(self, options: Options, tracker: "Tracked") -> None:
        self.options = options
        self._tracker = weakref.ref(tracker)  # it holds its judge
        self.adapter: BaseAdapter | None = None
        # Whether nobody asked for it by name: it gives way to a tracker of the user's own.
        self.found = False
        self.ends: list[Callable[[], object]] = []  # what is undone with the tracker
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._turns: deque[int] = deque(maxlen=MAX_EVENTS)  # of the events, among all trackers'
        self._counts: Counter[str] = Counter()
        self.followers: list[Any] = []  # files that are written step by step
        self._lock = threading.RLock()
        self._local = threading.local()
        self._streak = 0
        # Of each origin and each place a list of one: the event that stands for all.
        self._first: dict[Any, list[Event]] = {}

    def accept(self, rows: Step, event: Event) -> None:
        """Act on the event that a step failed by, be it this rank's or another's.

        Raises:
            AnomalyError: As the tracker's action says.
        """
        event = self._signed(event)
        # Before the first iteration ends it may be a program that does nothing but evaluate.
        if rows.evaluated and (rows.evaluated < rows.number or event.phase in _TRAINING):
            event = replace(event, training_step=rows.number - rows.evaluated)
        rows.failed, rows.held = event, None
        if event.rank != self._adapter.rank():
            rows.spread = 0  # the other rank has counted its own
        for follower in self.followers:
            follower.failed(rows)
        self._act(event, rows)

    @property
    def _adapter(self) -> "BaseAdapter":
        if self.adapter is None:
            msg = "this tracker was removed: track the model again to watch it"
            raise RuntimeError(msg)
        return self.adapter

    @property
    def events(self) -> tuple[Event, ...]:
        """Return the recorded events, oldest first."""
        with self._lock:
            return tuple(self._events)

    @property
    def turns(self) -> tuple[int, ...]:
        """Number the events in the order in which those of all trackers came."""
        with self._lock:
            return tuple(self._turns)

    def count(self, word: str) -> int:
        """Count events by severity (``bad``, ``suspect``) or ``expected``."""
        return self._counts[word]

    def _signed(self, event: Event) -> Event:
        """Name in an event what is tracked, and leave out the notes that are to be ignored."""
        if self.options.ignore:
            event = replace(event, notes=left(event.notes, self.options.ignore))
        tracker = self._tracker()
        return event if event.target or tracker is None else replace(event, target=tracker.target)

    def _ignores(self, text: str) -> bool:
        return slug_of(text) in self.options.ignore

    def _handle(self) -> Any:
        tracker = self._tracker()
        return None if tracker is None else tracker.handle

    @property
    def _among_others(self) -> bool:
        """Tell whether reports must say which of several tracked models they are about."""
        tracker = self._tracker()
        return tracker is not None and tracker.among_others

    def _record(self, event: Event) -> None:
        event = self._signed(event)
        with self._lock:
            self._counts["expected" if event.expected else event.severity] += 1
        self._keep(event)

    def _keep(self, event: Event) -> None:
        """List an event, log it, and have it written where the run is."""
        turn = log(event)
        with self._lock:
            self._events.append(event)
            self._turns.append(turn)
            for follower in self.followers:
                follower.event(event)

    def _exchange(self, event: Event, new: Event) -> None:
        """Put a recorded event's successor in its place."""
        with self._lock:
            for first in self._first.values():
                if first[0] is event:
                    first[0] = new
            for i in range(len(self._events) - 1, -1, -1):
                if self._events[i] is event:
                    self._events[i] = new
                    for follower in self.followers:
                        follower.event(new, instead=event)
                    return

    def _count(self, event: Event) -> Event:
        """Record an event, or count it with the one of the same origin; give what stands for it."""
        cause, operation = event.cause, event.operation
        tag = None if cause is None else cause.tag
        # Other rows of another batch are no repetition.
        held = "" if cause is None or event.phase != "input" else cause.evidence
        origin: tuple[Any, ...] = (event.phase, event.layer, event.kind, event.parameter, tag, held)
        if operation is not None:
            origin = (*origin, operation.name, operation.source)
        here = place(event.phase, event.layer, event.parameter)
        with self._lock:
            first = self._first.get(origin)
            if first is None and operation is None and tag in _UNSEEN:
                # Nothing was looked for any more.
                first = self._first.get(here) or self._first.get(event.spread.surfaced)
            if first is None:
                self._record(event)
                first = self._first[origin] = [event]
                for where in (here, event.spread.surfaced):
                    self._first.setdefault(where, first)
                return event
            self._counts[event.severity] += 1
            self._exchange(first[0], replace(first[0], times=first[0].times + 1))
        log(event if operation is not None else first[0], again=True)
        return first[0]

    def _act(self, event: Event, rows: Step) -> None:
        rows.failed = first = self._count(event)
        self._streak += 1
        carried = getattr(self._local, "carried", None)
        if carried is not None:  # an exception is on its way, which takes the report along
            carried.append(event)
            return
        softly = getattr(self._local, "softly", None)
        action: Any = environment() or self.options.action
        if softly is not None and action != "record":
            action = softly
        patient = softly is None and self._streak <= self.options.patience
        if action == "off" or (action == "record" and not patient):
            return
        if patient:
            rows.skip = True
            if action != "record":
                note = PATIENCE(n=self._streak, most=self.options.patience)
                note = "" if self._ignores(note) else note
                self._warn(self._told(event, first, note))
        elif action == "raise":
            kind = NonFiniteError if event.kind in NON_FINITE else AnomalyError
            raise kind(self._text(event), event, self._handle())
        elif action == "warn":
            self._warn(self._told(event, first))
        elif action == "skip":
            rows.skip = True
            if self._streak == 1:
                self._warn(self._told(event, first, "the update of this step is dropped"))
        elif isinstance(action, Callable):  # type: ignore[arg-type]
            action(event)

    def _warn_of(self, suspect: Event) -> None:
        """Warn of a suspect in a line, unless everything is only recorded."""
        if (environment() or self.options.action) != "record":
            warn(render_line(suspect, which=self._among_others))

    @staticmethod
    def _warn(text: str) -> None:
        if text:
            warn(text)

    def _text(self, event: Event) -> str:
        here = None if self.adapter is None else self.adapter.rank()  # it may be removed by now
        return render(event, here=here, which=self._among_others)

    def _told(self, event: Event, first: Event, note: str = "") -> str:
        """Put an event into words: in full the first time, then in a line with a count.

        Args:
            event: What happened.
            first: What stands for all of its origin.
            note: What was done about it.

        Returns:
            The words; empty where so many were told that the count alone says nothing new.
        """
        if first is event:
            text = self._text(event)
            return f"{text}\n\n  {note}" if note else text
        times = first.times
        if not note and times > TOLD and set(str(times)[1:]) != {"0"}:
            return ""
        named = event if event.operation is not None else replace(first, times=1)
        line = render_line(named, which=self._among_others)
        return f"{line}; {times} times since step {first.step}{note and '; '}{note}"

    @contextmanager
    def carried_by(
        self, error: BaseException, rows: Step | None, *, raising: bool = True
    ) -> Iterator[None]:
        """Let an exception of the program's take along the report of what is found inside.

        Args:
            error: The exception. One that only ends a loop or the program takes nothing along:
                what is found is warned about.
            rows: The open rows. What failed them before was told, and is only noted.
            raising: Whether an error may be raised from it here, as ``action="raise"`` says.

        Raises:
            AnomalyError: Of what was found inside.
        """
        if not takes_along(error):
            with self.softly():
                yield
            return
        told = None if rows is None else rows.failed
        found: list[Event] = []
        before, self._local.carried = getattr(self._local, "carried", None), found
        try:
            yield
        finally:
            self._local.carried = before
        action = environment() or self.options.action
        if action == "off" or not (found or told):
            return
        if told is not None:
            error.add_note(self._text(told))
            return
        if callable(action):
            action(found[0])
        text = self._text(found[0])
        if action == "raise" and raising:
            kind = NonFiniteError if found[0].kind in NON_FINITE else AnomalyError
            raise kind(text, found[0], self._handle()) from error
        error.add_note(text)

    def softly(self, *, on: bool = True) -> "_Softly":
        """Warn instead of raising inside, for rows that are read when nobody can catch."""
        return _Softly(self._local, on)


class _Softly:
    """Warn instead of raising, for rows that are read when nobody can catch."""

    def __init__(self, local: threading.local, on: bool) -> None:
        self._local, self._on = local, on

    def __enter__(self) -> None:
        self._before = getattr(self._local, "softly", None)
        if self._on:
            self._local.softly = "warn"

    def __exit__(self, *details: object) -> None:
        self._local.softly = self._before
