"""Watch a whole program: each adapter finds by itself what there is."""

import importlib
import math
import os
import re
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from anynan._base.about import ADAPTERS
from anynan._base.imports import when_imported
from anynan._base.messages import slug_of
from anynan._base.sources import user_source
from anynan._diagnosis.rules.evidence import plural
from anynan._runs.overview import CLEAN, READ, all_clear
from anynan._runs.run import Run, of
from anynan._steps import producers
from anynan._steps.messages import LAYER_UNWATCHED, WEIGHTS_BAD_SINCE
from anynan._steps.record import program
from anynan._steps.tracked import Handle, Tracked, inside
from anynan.errors import reason
from anynan.events import Event
from anynan.options import Options, environment


class Found:
    """Hold what was found to watch, and what was seen there.

    Attributes:
        notes: What could not be watched, each said once.
        harms: What was bad though no tracker read it, each said once.
        added: How many trackers were taken up.
        ended_by: The exception that ended the program, None where none did.
        first: Is called as the first tracker is taken up.
        trainers: That run now, and are watched with all they call.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.harms: list[str] = []
        self.added = 0
        self.ended_by: BaseException | None = None
        self.first: Callable[[], object] | None = None
        self.trainers: list[Any] = []
        self._unwatched: list[str] = []
        self._trackers: list[Tracked] = []
        self._minor: set[int] = set()  # of trackers that nobody asks after while all is well
        self._names: dict[int, tuple[str, str]] = {}  # what each is, and how the program calls it
        self._ended: list[_Seen] = []
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Go to another process as what is found there."""
        return _there, ()

    def add(self, taken: Handle | Tracked, *, minor: bool = False) -> None:
        """Take up the tracker of what was found; it gives way to one of the user's own.

        Args:
            taken: The tracker.
            minor: No line is given to it while all is well, as to a transform of data.
        """
        tracker: Tracked = inside(taken)
        tracker.found = True
        called = _called()
        with self._lock:
            self._let_go()
            if minor:
                self._minor.add(id(tracker))
            self._trackers.append(tracker)
            self.added += 1
            if self.added == 1 and self.first is not None:
                self.first()
            self._names[id(tracker)] = tracker.name, called
            alike = [x for x in self._trackers if self._names[id(x)][0] == tracker.name]
            for each in alike if len(alike) > 1 else ():  # of several Linears, which is which
                kind, name = self._names[id(each)]
                each.name = f"{name} ({kind})" if name else kind

    def fail(self, what: str, error: Exception) -> None:
        """Note what could not be watched: the program must not learn of it by an exception."""
        note = LAYER_UNWATCHED(what=what, error=reason(error))
        if note not in self.notes:
            self.notes.append(note)

    def unwatched(self, what: str) -> None:
        """Note what runs in the program and is not read, with what would watch it.

        The closing lines name it, so that "nothing went bad" is not taken to be said of it.

        Args:
            what: Such as ``"code between Net and backward(): anynan.torch.track(step)"``.
        """
        if what not in self._unwatched:
            self._unwatched.append(what)

    def harm(self, what: str) -> None:
        """Note something bad that no tracker read: it counts like a bad event.

        What undoes ``watch_all`` may still call this: it runs when the program is over.

        Args:
            what: Such as ``"net.weight holds NaN as the program ends"``.
        """
        if what not in self.harms:
            self.harms.append(what)

    def living(self) -> list[Tracked]:
        """List the trackers that were taken up and not yet ended."""
        with self._lock:
            return list(self._trackers)

    def has(self, tracker: Tracked) -> bool:
        """Tell whether this tracker was taken up here."""
        return any(tracker is known for known in self._trackers)

    def renew(self) -> dict[int, tuple[int, int]]:
        """Forget what came of the trackers up to now: a process that forks off tells its own.

        Returns:
            How far each tracker had come.
        """
        self._lock = threading.RLock()  # another thread may have held it, which is not here
        with self._lock:
            self.notes, self.harms, self._unwatched, self._ended = [], [], [], []
            self.added, self.ended_by = 0, None
            return {id(tracker): _mark(tracker) for tracker in self._trackers}

    def leave(self, before: dict[int, tuple[int, int]]) -> bool:
        """Let go of the trackers that have come no further, and tell whether any has."""
        with self._lock:
            self._trackers = [x for x in self._trackers if before.get(id(x)) != _mark(x)]
        return bool(self._trackers or self._ended)

    def close(self) -> None:
        """End the open steps, and watch no longer."""
        with self._lock:
            while self._trackers:
                self._end(self._trackers[0], whole=True)

    def _let_go(self) -> None:
        """Keep no more than words and events of what is gone."""
        for tracker in list(self._trackers):
            if tracker.fn is None or tracker.judge.adapter is None:
                self._end(tracker, whole=False)

    def _end(self, tracker: Tracked, *, whole: bool) -> None:
        tracker.remove()
        self._trackers.remove(tracker)
        self._ended.append(self._seen(tracker)._replace(run=of(tracker) if whole else None))
        self._names.pop(id(tracker), None)
        self._minor.discard(id(tracker))

    def _seen(self, tracker: Tracked) -> "_Seen":
        line = all_clear(of(tracker)) if len(tracker.history) or tracker.events else ""
        turns, minor = tracker.judge.record.turns, id(tracker) in self._minor
        return _Seen(line, tracker.events, turns, tracker.notes, minor=minor)

    def _all(self) -> "list[_Seen]":
        with self._lock:
            return [*self._ended, *map(self._seen, self._trackers)]

    def numbered(self) -> list[tuple[int, Event]]:
        """List what was seen in the order in which it was, with its number among all events."""
        pairs = (
            pair for seen in self._all() for pair in zip(seen.turns, seen.events, strict=False)
        )
        return sorted(pairs, key=itemgetter(0))

    @property
    def events(self) -> list[Event]:
        """List what was seen, in the order in which it was."""
        return [event for _, event in self.numbered()]

    def bad(self) -> list[Event]:
        """List what was bad and not expected, in the order in which it was seen."""
        return [event for event in self.events if is_bad(event)]

    @property
    def minor(self) -> bool:
        """Tell whether only that ran which nobody asks after while all is well."""
        ran = [seen for seen in self._all() if seen.line]
        return bool(ran) and all(seen.minor for seen in ran)

    @property
    def several(self) -> bool:
        """Tell whether more than one thing ran: words must say then which one they are about."""
        return sum(bool(seen.line) for seen in self._all()) > 1

    def runs(self) -> list[Run]:
        """List what ran and was watched to the end, what went bad first."""
        ran = [seen for seen in self._ended if seen.line and seen.run is not None]
        return [seen.run for seen in sorted(ran, key=lambda seen: seen.first) if seen.run]

    def lines(self, most: int | None = None, *, harmed: bool = False) -> list[str]:
        """Say of each that ran what came of it, and of the rest why not.

        Args:
            most: How many of those that stayed clean are listed; all by default.
            harmed: Whether the program came to harm by something that was not read.
        """
        harmed = harmed or bool(self.harms)
        clear = READ if harmed else CLEAN
        told, clean, all_ = [f"anynan: {harm}" for harm in self.harms], 0, self._all()
        same: Counter[str] = Counter()  # of what was bad: a model may be made anew in each step
        if most is not None:  # what was there to the end is worth more than what was dropped
            all_.sort(key=lambda seen: seen.run is None)
        all_ = _major(all_)
        for seen in all_:
            clean += bool(seen.line and not seen.bad)
            same[seen.line] += seen.bad and most is not None
            first = same[seen.line] < 2
            if first and seen.line and (seen.bad or most is None or clean <= most):
                told.append(seen.line.replace(CLEAN, clear, 1))
        told = [f"{x}; {same[x]} like this" if same[x] > 1 else x for x in told]
        if most is not None and clean > most:
            told.append(f"anynan: {clear} in {clean - most} more")
        return told + self._notes_of(all_)

    def _notes_of(self, all_: "list[_Seen]") -> list[str]:
        with self._lock:
            notes = list(self.notes)
        notes = list(dict.fromkeys([*notes, *(note for seen in all_ for note in seen.notes)]))
        since = [note for note in notes if slug_of(note) == WEIGHTS_BAD_SINCE.slug]
        notes = [note for note in notes if note not in since[1:]]  # the rest is no news
        unwatched = [f"  unwatched {what}" for what in self._unwatched]
        return [f"  note      {note}" for note in notes] + unwatched


_here: list[Found] = []


def _there() -> Found:
    return _here[-1] if _here else Found()


def _mark(tracker: Tracked) -> tuple[int, int]:
    """Give how far a tracker has come: its step and its events."""
    return tracker.step, len(tracker.events)


class _Seen(NamedTuple):
    """Hold what came of one tracker.

    Attributes:
        line: Says it; empty where nothing ran.
        events: What was seen.
        turns: Their numbers in the order of all trackers' events.
        notes: What of it could not be watched.
        run: The whole of it, for those that were watched to the end.
        minor: No line is given to it while all is well.
    """

    line: str
    events: tuple[Event, ...]
    turns: tuple[int, ...]
    notes: tuple[str, ...]
    run: Run | None = None
    minor: bool = False

    @property
    def bad(self) -> bool:
        """Tell whether something was bad and not expected."""
        return any(map(is_bad, self.events))

    @property
    def first(self) -> float:
        """Give the number of the first bad event; it is beyond all others without any."""
        pairs = zip(self.turns, self.events, strict=False)
        return next((turn for turn, event in pairs if is_bad(event)), math.inf)


def _called() -> str:
    """Give the name by which the user's line that runs calls something, empty if it has none."""
    source = user_source(skip=3)
    code = "" if source is None else source.text[source.column or 0 : source.end_column]
    found = re.match(r"([\w.]+(\[[\w'\"]+\])?)\(", code)
    return "" if found is None else found[1].removeprefix("self.")


def spoiled(tracker: Tracked, found: Found) -> None:
    """Note the weights that are bad as the program ends, where no event has told why."""
    adapter = tracker.judge.adapter
    if adapter is None or tracker.count("bad"):
        return
    try:
        bad = [item for item in adapter.bad_weights() if not item.buffer]
        names, following = [item.name for item in bad], tracker.judge.consequences
        if names and not following.inherited:
            following.inherit(bad)
    except Exception:  # noqa: BLE001  what cannot be read then is not told
        return
    if names:
        more = len(names) - 1
        rest = f" and {plural(more, 'more weight')} hold" if more else " holds"
        why = following.inherited
        ends = f"as the program ends{why and ': '}{why}"
        found.harm(f"{tracker.name}: {names[0]}{rest} NaN or Inf {ends}")


def is_bad(event: Event) -> bool:
    """Tell whether an event is bad and was not expected."""
    return event.severity == "bad" and event.expected is None


def watch_everything(options: Options, found: Found) -> Callable[[], None]:
    """Watch what the frameworks that are imported, now or later, are used for.

    Args:
        options: As for ``track``, for all that is found.
        found: Is given the trackers.

    Returns:
        What undoes it, and ends what was begun.
    """
    undo: list[Callable[[], None]] = []
    program[0] = Counter()
    producers.began[:] = producers.upcoming
    _here.append(found)
    folder = os.path.dirname(os.path.abspath(__file__))

    def begin(name: str) -> None:
        try:
            module = importlib.import_module(f"anynan.{name}.watchall")
            undo.append(module.watch_all(options, found))
        except Exception as error:  # noqa: BLE001  the program goes on unwatched
            found.fail(name, error)

    for name in ADAPTERS if environment() != "off" else ():
        if os.path.isfile(os.path.join(folder, name, "watchall.py")):
            waiting = when_imported(name, partial(begin, name))
            undo.insert(0, waiting)

    def end() -> None:
        while undo:
            undo.pop()()
        found.close()
        if found in _here:  # it is safe to call twice
            _here.remove(found)
        program[0] = None

    return end


def _major(all_: list[_Seen]) -> list[_Seen]:
    """Leave out what is minor and clean, where anything else is told."""
    told = any(seen.line and not seen.minor for seen in all_)
    return [seen for seen in all_ if seen.bad or not (told and seen.minor)]
