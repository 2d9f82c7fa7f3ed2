"""What a process writes down for the program that started it, and how that tells it."""

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from anynan._base.escaping import name as printed
from anynan._diagnosis.rules.evidence import plural
from anynan._everywhere import is_bad
from anynan._reports.report import folded
from anynan._runs.overview import READ
from anynan.events import Event

SHOWN = 10


class Told:
    """Write down what comes of this process: others may end it at any time.

    Args:
        folder: Where; each process has a file there from the first thing that is watched.
        name: Of this process.
    """

    def __init__(self, folder: str, name: str) -> None:
        self._file, self._name = Path(folder) / f"{os.getpid()}.json", printed(name)
        self._bad: list[Event] = []

    def begun(self) -> None:
        """Say that something runs here, and what was bad so far."""
        came = f"{len(self._bad)} bad" if self._bad else READ
        events = [f"  event     {line}" for line in folded(self._bad)[:SHOWN]]
        self.ended([f"anynan: {came}; its end was not seen", *events], harmed=bool(self._bad))

    def hear(self, event: Event) -> None:
        """Take up an event."""
        if is_bad(event):
            self._bad.append(event)
            self.begun()

    def ended(self, lines: Sequence[str], *, harmed: bool) -> None:
        """Say how it ended.

        Args:
            lines: What the program is to tell; none where this process told it.
            harmed: Whether something was bad.
        """
        told = {"name": self._name, "lines": lines, "harmed": harmed}
        with contextlib.suppress(OSError):  # the program may be gone, and its folder with it
            self._file.write_text(json.dumps(told), "utf-8")


class Heard(NamedTuple):
    """Hold what the processes of a program told.

    Attributes:
        any: Whether anything ran in one of them.
        harmed: Whether something was bad in one of them.
        lines: What came of each.
    """

    any: bool
    harmed: bool
    lines: list[str]


NOBODY = Heard(any=False, harmed=False, lines=[])
SILENT = NOBODY._replace(any=True)


def heard(folder: str) -> Heard:
    """Read what the processes of a program wrote down."""
    told = []
    for path in sorted(Path(folder).glob("*.json"), key=os.path.getmtime):
        with contextlib.suppress(OSError, ValueError):  # it was ended as it wrote
            told.append(json.loads(path.read_text("utf-8")))
    lines: list[str] = []
    alike: dict[tuple[str, ...], list[str]] = {}  # the names of those that say the same
    for each in told:
        alike.setdefault(tuple(each["lines"]), []).append(each["name"])
    for said, names in list(alike.items())[:SHOWN]:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines += [x.replace("anynan: ", f"anynan: {names[0]}{more}: ", 1) for x in said]
    if len(alike) > SHOWN:
        lines.append(f"anynan: {plural(len(alike) - SHOWN, 'process', 'processes')} more")
    return Heard(bool(told), any(each["harmed"] for each in told), lines)
