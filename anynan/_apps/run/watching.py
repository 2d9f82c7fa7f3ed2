"""Watch all that runs in one process, and tell at its end what came of it."""

import importlib
import sys
from typing import Any, NamedTuple

from anynan._apps.run.ending import Ending, Own
from anynan._apps.run.told import Heard, Told
from anynan._base import notices
from anynan._everywhere import Found, watch_everything
from anynan._reports.logs import listeners
from anynan._steps.record import numpy_met
from anynan.options import Options


class Asked(NamedTuple):
    """Hold what was asked for: the options of the command."""

    action: Any
    level: Any
    ignore: tuple[str, ...]
    report: str | None
    within: str | None

    def words(self) -> list[str]:
        """Give them to a process that tells the program, whose status they are for."""
        report = ["--report", self.report] if self.report else []
        ignored = [word for name in self.ignore for word in ("--ignore", name)]
        within = ["--within", self.within] if self.within else []
        told = ["--action", self.action, "--level", self.level]
        return [*told, *ignored, *report, *within]


class Watch:
    """Watch what this process runs, from now on.

    Args:
        asked: How.

    Attributes:
        found: What was found to watch.
        own: What hears of all events.
        errors: The context in which NumPy's errors are noted.
    """

    def __init__(self, asked: Asked) -> None:
        self._arrays: Any = importlib.import_module("anynan.arrays.program")
        self.found, self.errors = Found(), self._arrays.listen()
        self._hear()
        self._before: dict[int, tuple[int, int]] = {}
        options = Options(action=asked.action, level=asked.level, ignore=asked.ignore)
        self._end = watch_everything(options, self.found)
        notices.blanket[0] = bool(sys.warnoptions)

    def _hear(self) -> None:
        self.own = Own()
        listeners.append(self.own.hear)
        numpy_met[0] = self.errors

    def forked(self) -> None:
        """Begin anew in a fork of the process: what the parent saw, the parent tells."""
        listeners.remove(self.own.hear)
        self.errors = self._arrays.listen()
        self._hear()
        self._before = self.found.renew()

    def telling(self, folder: str, name: str) -> Told:
        """Have what is bad written down at once for the program that started this process.

        Args:
            folder: Where.
            name: Of this process.
        """
        told = Told(folder, name)
        self.found.first, self.own.then = told.begun, told.hear
        return told

    def idle(self) -> bool:
        """Tell whether nothing ran here: then nothing is left to read."""
        return not (self.found.leave(self._before) or self.own.heard or self.errors.lines)

    def close(self, error: BaseException | None, heard: Heard) -> Ending:
        """Watch no longer.

        Args:
            error: What the program ended by, if it was an exception.
            heard: What came of the processes that it started.

        Returns:
            What came of it.
        """
        self.found.ended_by = error
        notices.ended_by.append(error)
        self._end()
        notices.ended_by.clear()
        notices.blanket[0] = True
        listeners.remove(self.own.hear)
        numpy_met[0] = None
        met = self._arrays.closing(self.errors, told=bool(self.found.bad()))
        return Ending(self.found, self.own, met, error, heard)
