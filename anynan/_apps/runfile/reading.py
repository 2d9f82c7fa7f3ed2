"""Read a run back from its lines."""

import json
import math
import os
from collections import Counter
from typing import Any

from anynan._apps.runfile.messages import FILE_WITHOUT_END, LINE_CUT_OFF, LINES_UNREADABLE
from anynan._apps.runfile.writing import SCHEMA
from anynan._readings.history import Ring
from anynan._readings.readings import Site
from anynan._readings.step import Step
from anynan._runs.run import Run
from anynan.events import Event, numbers

_LISTED = 5  # unreadable lines that are named


def load(path: str | os.PathLike[str]) -> Run:
    """Read the run that ``Tracker.to_jsonl`` wrote.

    A file that ends in the middle of a line, because the run was killed or is not over, is
    read up to there. ``Run.damage`` says what was left out.

    Args:
        path: The file.

    Raises:
        ValueError: If it is no such file, or was written by another anynan in another schema.
        OSError: If it cannot be opened.
    """
    run = _Reader(os.fspath(path))
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            run.line(number, line)
    return run.whole()


class _Reader:
    """Collect what the lines say."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.head: dict[str, Any] | None = None
        self.end: dict[str, Any] = {}
        self.slots: list[Site] = []
        self.orders: list[tuple[list[Site], list[int]]] = []
        self.history = Ring(2**62, math.inf)
        self.events: dict[int, Event] = {}
        self.notes: list[str] = []
        self.remarks: list[str] = []
        self.open: Step | None = None
        self.damaged: list[int] = []
        self.cut = False

    def line(self, number: int, text: str) -> None:
        if not text.strip():
            return
        try:
            said = json.loads(text)
            kind = said["type"]
        except (ValueError, TypeError, KeyError, RecursionError):
            said, kind = {}, ""
        if self.head is None:
            self._begin(said if kind == "run" else {})
            return
        try:
            self._take(kind, said)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            if not text.endswith("\n"):
                self.cut = True
            else:
                self.damaged.append(number)

    def _begin(self, said: dict[str, Any]) -> None:
        schema = said.get("schema")
        if not isinstance(schema, int):
            msg = f"{self.path} is no run that to_jsonl() wrote: its first line does not say so"
            raise ValueError(msg)  # noqa: TRY004  it is the file that is wrong
        if schema != SCHEMA:
            age = "a newer" if schema > SCHEMA else "an older"
            msg = (
                f"{self.path} was written by {age} anynan, in schema {schema}; this one reads "
                f"schema {SCHEMA}"
            )
            raise ValueError(msg)
        self.head = said

    def _take(self, kind: Any, said: dict[str, Any]) -> None:
        """Take what a line says; a kind that is not known was added later, and can be left out."""
        match kind:
            case "slots":
                for slot in said["slots"]:
                    self.slots.append(Site(index=len(self.slots), limit=math.inf, **slot))
            case "order":
                sites = [self.slots[i] for i in said["slots"]]
                self.orders.append((sites, list(map(int, said["calls"]))))
            case "step":
                self._step(said)
            case "event":
                self.events[int(said["number"])] = Event.from_dict(said["event"])
            case "note":
                self.notes.append(str(said["text"]))
            case "remark":
                self.remarks.append(str(said["text"]))
            case "end":
                self.end = said
            case _ if not kind:
                raise ValueError(kind)

    def _step(self, said: dict[str, Any]) -> None:
        rows = Step(int(said["step"]))
        rows.sites, rows.calls = self.orders[said["order"]]
        rows.lo, rows.hi = numbers(said["low"]), numbers(said["high"])
        if not len(rows.lo) == len(rows.hi) == len(rows.sites) == len(rows.calls):
            raise ValueError(said["step"])
        rows.norms = {int(at): float(norm) for at, norm in said.get("norms", {}).items()}
        rows.stats = {int(at): tuple(numbers(x)) for at, x in said.get("stats", {}).items()}
        for layer, (update, size) in said.get("updates", {}).items():
            rows.moved(layer, *numbers([update, size]))
        if said.get("open"):
            self.open = rows
        else:
            self.history.append(rows)
            self.open = None

    def whole(self) -> Run:
        if self.head is None:
            msg = f"{self.path} is empty"
            raise ValueError(msg)
        events = tuple(event for _, event in sorted(self.events.items()))
        counts = Counter("expected" if e.expected else e.severity for e in events)
        damage = []
        if self.cut:
            damage.append(LINE_CUT_OFF())
        if self.damaged:
            more = ", ..." if len(self.damaged) > _LISTED else ""
            lines = ", ".join(map(str, self.damaged[:_LISTED]))
            damage.append(LINES_UNREADABLE(lines=lines + more))
        if not self.end:
            damage.append(FILE_WITHOUT_END())
        return Run(
            str(self.head.get("name")),
            self.history,
            tuple({site.layer: None for site in self.slots if site.layer is not None}),
            events,
            Counter(self.end.get("counts", counts)),
            tuple(self.end.get("allowed", self.head.get("allowed", ()))),
            tuple(self.notes),
            tuple(self.remarks),
            tuple(self.end.get("unseen", ())),
            self.head.get("versions", {}),
            tuple(damage),
            self.open,
            harms=tuple(self.end.get("harms", ())),
            target=str(self.head.get("target") or ""),
            backend=self.head.get("backend"),
        )
