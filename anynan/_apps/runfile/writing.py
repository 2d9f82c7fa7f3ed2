"""Write a tracked run, line by line, while it runs."""

import json
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from anynan._apps.runfile.messages import FILE_ENDED
from anynan._base.about import versions
from anynan._base.notices import warn
from anynan._readings.readings import Site
from anynan._readings.step import Step
from anynan._runs.run import Run, of
from anynan.errors import reason
from anynan.events import Event, plain

if TYPE_CHECKING:
    from anynan._readings.history import Packed
    from anynan._steps.tracked import Tracked

SCHEMA = 2
_REMEMBERED = 10_000


class Writer:
    """Write a run to a file: at once, or step by step as a tracker sees it.

    It never stops the program it follows: where the file cannot be written any more, that is
    said once, and the file ends there.

    Args:
        path: The file.
        every: Write one step in so many, and those with an event.
    """

    def __init__(self, path: str | os.PathLike[str], every: int = 1) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            msg = f"to_jsonl(every={every!r}): expected a whole number from 1"
            raise ValueError(msg)
        self._path, self._every = os.fspath(path), every
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._sites: dict[int, int] = {}
        self._orders: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self._latest: tuple[Any, Any, int] | None = None
        self._events: deque[Event] = deque(maxlen=_REMEMBERED)  # a line may still be replaced
        self._said: dict[tuple[str, str], None] = {}
        self._steps = self._numbered = 0
        self._file: Any = None

    def follow(self, tracker: "Tracked") -> None:
        """Write what a tracker has seen, and go on until it is removed.

        Raises:
            OSError: If the file cannot be opened.
        """
        judge = tracker.judge
        rank = None if judge.adapter is None else judge.adapter.rank()
        self._path = _of_rank(self._path, rank)
        with judge.record.lock:  # nothing is to happen in between
            self._begin(of(tracker), rank)
            if judge.adapter is None:
                self.end(tracker)
            else:
                judge.record.listeners.append(self)

    def whole(self, run: Run) -> None:
        """Write a run that is over.

        Raises:
            OSError: If the file cannot be opened.
        """
        self._begin(run, None)
        self._end(run)

    def _begin(self, run: Run, rank: int | None) -> None:
        self._file = open(self._path, "w", encoding="utf-8", newline="\n")  # noqa: SIM115
        self._write(
            "run",
            schema=SCHEMA,
            name=run.name,
            target=run.target,
            backend=run.backend,
            rank=rank,
            every=self._every,
            versions=versions(run.backend),
            allowed=list(run.allowed),
        )
        for entry in run.history.entries():
            self._entry(entry)
        for event in run.events:
            self.event(event)
        self._notes(run.notes, run.remarks)

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:  # the tracker is gone, and was not removed
            self._close()

    def step(self, rows: Step, notes: Sequence[str], remarks: Sequence[str]) -> None:
        """Write an ended step, if its turn has come or it went bad."""
        with self._safely():
            self._steps += 1
            bad = rows.failed is not None and not rows.follows
            if bad or (self._steps - 1) % self._every == 0:
                self._entry(rows)
            self._notes(notes, remarks)

    def failed(self, rows: Step) -> None:
        """Write what was read of a step that failed before its end."""
        with self._safely():
            self._entry(rows, open=True)

    def event(self, event: Event, *, instead: Event | None = None) -> None:
        """Write an event, or the successor of one that was written."""
        with self._safely():
            known = [] if instead is None else [e is instead for e in self._events]
            if any(known):
                at = known.index(True)
                number = self._numbered - len(self._events) + at
                self._events[at] = event
            else:
                number, self._numbered = self._numbered, self._numbered + 1
                self._events.append(event)
            self._write("event", number=number, event=event.to_dict())

    def end(self, tracker: "Tracked") -> None:
        """Write the last line and close the file."""
        self._end(of(tracker))

    def _end(self, run: Run) -> None:
        with self._safely():
            self._notes(run.notes, run.remarks)
            self._write(
                "end",
                counts=dict(run.counts),
                allowed=list(run.allowed),
                unseen=list(run.unseen),
                harms=list(run.harms),
            )
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # what a full disk did not take
                file.close()

    @property
    def _open(self) -> bool:
        """Tell whether there is still something to write to; a forked child writes nothing."""
        return self._file is not None and self._process == os.getpid()

    @contextmanager
    def _safely(self) -> Iterator[None]:
        """Keep what goes wrong in here from the program that is followed."""
        with self._lock:
            try:
                yield
            except Exception as error:  # noqa: BLE001
                self._close()
                warn(f"anynan: {FILE_ENDED(path=self._path, error=reason(error))}")

    def _notes(self, notes: Sequence[str], remarks: Sequence[str]) -> None:
        if len(notes) + len(remarks) == len(self._said):
            return
        for kind, texts in (("note", notes), ("remark", remarks)):
            for text in texts:
                if (kind, text) not in self._said:
                    self._said[kind, text] = None
                    self._write(kind, text=text)

    def _entry(self, entry: "Packed | Step", **more: Any) -> None:
        read = len(entry.lo)
        order = self._order(entry.sites[:read], entry.calls[:read])
        if entry.norms:
            more["norms"] = {str(at): norm for at, norm in entry.norms.items()}
        if entry.stats:
            more["stats"] = {str(at): list(values) for at, values in entry.stats.items()}
        if entry.updates:
            more["updates"] = {layer: list(norms) for layer, norms in entry.updates.items()}
        low, high = list(entry.lo), list(entry.hi)
        self._write("step", step=entry.number, order=order, low=low, high=high, **more)

    def _order(self, sites: list[Site], calls: list[int]) -> int:
        """Give the number of this order of readings; a new one is written first."""
        if self._latest is not None and (sites, calls) == self._latest[:2]:
            return self._latest[2]
        new = {id(site): site for site in sites if id(site) not in self._sites}
        if new:
            self._write("slots", slots=[_slot(site) for site in new.values()])
            for key in new:
                self._sites[key] = len(self._sites)
        key_of = tuple(self._sites[id(site)] for site in sites), tuple(calls)
        found = self._orders.get(key_of)
        if found is None:
            found = self._orders[key_of] = len(self._orders)
            self._write("order", slots=list(key_of[0]), calls=list(key_of[1]))
        self._latest = sites, calls, found
        return found

    def _write(self, kind: str, **said: Any) -> None:
        if self._open:
            self._file.write(json.dumps({"type": kind, **plain(said)}, allow_nan=False) + "\n")
            self._file.flush()


def _slot(site: Site) -> dict[str, Any]:
    return {name: x for name, x in asdict(site).items() if name not in ("index", "limit")}


def _of_rank(path: str, rank: int | None) -> str:
    if not rank:
        return path
    stem, dot = os.path.splitext(path)
    return f"{stem}.rank{rank}{dot}"
