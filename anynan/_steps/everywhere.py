"""Watch a whole program: each adapter finds by itself what there is."""

import importlib
import os
import threading
from collections.abc import Callable
from functools import partial

from anynan._reports.overview import all_clear
from anynan._reports.run import of
from anynan._runtime.about import ADAPTERS
from anynan._runtime.imports import when_imported
from anynan._steps.tracker import Tracker
from anynan.errors import reason
from anynan.events import Event
from anynan.options import Options


class Found:
    """Hold what was found to watch, and what was seen there.

    Attributes:
        notes: What could not be watched, each said once.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._trackers: list[Tracker] = []
        self._ended: list[tuple[str, tuple[Event, ...]]] = []
        self._lock = threading.RLock()

    def add(self, tracker: Tracker) -> None:
        """Take up the tracker of what was found; it gives way to one of the user's own."""
        tracker.judge.found = True
        with self._lock:
            self._let_go()
            self._trackers.append(tracker)

    def fail(self, what: str, error: Exception) -> None:
        """Note what could not be watched: the program must not learn of it by an exception."""
        note = f"{what} is not watched: {reason(error)}"
        if note not in self.notes:
            self.notes.append(note)

    def has(self, tracker: Tracker) -> bool:
        """Tell whether this tracker was taken up here."""
        return any(tracker is known for known in self._trackers)

    def close(self) -> None:
        """End the open steps, and watch no longer."""
        with self._lock:
            for tracker in self._trackers:
                tracker.remove()
            self._let_go()

    def _let_go(self) -> None:
        """Keep no more than words and events of what is gone."""
        for tracker in list(self._trackers):
            if tracker.fn is None or tracker.judge.adapter is None:
                tracker.remove()
                self._trackers.remove(tracker)
                self._ended.append((self._line(tracker), tracker.events))

    @property
    def events(self) -> list[Event]:
        """List what was seen, each tracker's in order."""
        with self._lock:
            ended = [event for _, events in self._ended for event in events]
            return ended + [event for tracker in self._trackers for event in tracker.events]

    def bad(self) -> list[Event]:
        """List what was bad and not expected, by the step it was seen in."""
        found = [e for e in self.events if e.severity == "bad" and e.expected is None]
        return sorted(found, key=lambda event: event.step)

    def lines(self) -> list[str]:
        """Say of each that ran what came of it, and of the rest why not."""
        with self._lock:
            told = [line for line, _ in self._ended] + list(map(self._line, self._trackers))
            notes = list(self.notes)
            for tracker in self._trackers:
                notes += [note for note in tracker.notes if note not in notes]
        return [line for line in told if line] + [f"  note      {note}" for note in notes]

    @staticmethod
    def _line(tracker: Tracker) -> str:
        return all_clear(of(tracker)) if len(tracker.history) or tracker.events else ""


def watch_everything(options: Options, found: Found) -> Callable[[], None]:
    """Watch what the frameworks that are imported, now or later, are used for.

    Args:
        options: As for ``track``, for all that is found.
        found: Is given the trackers.

    Returns:
        What undoes it, and ends what was begun.
    """
    undo: list[Callable[[], None]] = []
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

    def begin(name: str) -> None:
        try:
            module = importlib.import_module(f"anynan.{name}.watchall")
            undo.append(module.watch_all(options, found))
        except Exception as error:  # noqa: BLE001  the program goes on unwatched
            found.fail(name, error)

    for name in ADAPTERS:
        if os.path.isfile(os.path.join(folder, name, "watchall.py")):
            waiting = when_imported(name, partial(begin, name))
            undo.insert(0, waiting)

    def end() -> None:
        while undo:
            undo.pop()()
        found.close()

    return end
