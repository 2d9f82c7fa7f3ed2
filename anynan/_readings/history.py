"""The readings of past steps, packed and bounded."""

import math
from array import array
from collections import deque
from collections.abc import Iterator
from threading import RLock
from typing import TYPE_CHECKING, Self

import numpy as np

from anynan._notebooks.shown import Shown
from anynan._readings.readings import Reading, Rows, Site, known, layer_norms

if TYPE_CHECKING:
    from numpy.typing import NDArray

HISTORY_BYTES = 64 * 2**20


class Entry:
    """Keep one step of the ring, packed."""

    __slots__ = ("calls", "hi", "lo", "norms", "sites", "stats", "step", "updates")
    sites: list[Site]
    calls: list[int]

    def __init__(self, rows: Rows, before: "Entry | None") -> None:
        read = len(rows.lo)
        self.step = rows.step
        sites: list[Site] = rows.sites[:read]
        calls: list[int] = rows.calls[:read]
        # Most steps read the same slots: then the lists of the step before are shared.
        self.sites = before.sites if before is not None and before.sites == sites else sites
        self.calls = before.calls if before is not None and before.calls == calls else calls
        self.lo = array("d", rows.lo)
        self.hi = array("d", rows.hi)
        self.stats = rows.stats
        self.norms = rows.norms
        self.updates = rows.updates

    @classmethod
    def of_bounds(cls, step: int, sites: list[Site], bounds: list[float]) -> Self:
        """Pack a step of which nothing but bounds is known."""
        entry = cls.__new__(cls)
        entry.step, entry.sites, entry.calls = step, sites, [0] * len(sites)
        entry.lo, entry.hi = array("d", [-bound for bound in bounds]), array("d", bounds)
        entry.stats, entry.norms, entry.updates = {}, {}, {}
        return entry

    @property
    def nbytes(self) -> int:
        """Give at most the memory this takes: shared lists are counted for every step."""
        extra = len(self.stats) + len(self.norms) + len(self.updates)
        return 16 * (len(self.lo) + len(self.sites)) + 64 * extra


class History(Shown):
    """Hold the readings of the last steps, bounded in steps and in bytes.

    Iterating yields ``Reading`` objects, oldest first; ``len`` is the number of steps.
    """

    def __init__(self, steps: int, nbytes: float | None = None) -> None:
        self._steps = steps
        self._most = nbytes
        self._entries: deque[Entry] = deque()
        self._bytes = 0
        self._lock = RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Reading]:
        with self._lock:
            entries = list(self._entries)
        for entry in entries:
            yield from self._unpack(entry)

    def _unpack(self, entry: Entry) -> Iterator[Reading]:
        for order in range(len(entry.sites)):
            yield self._reading(entry, order)

    @staticmethod
    def _reading(entry: Entry, order: int) -> Reading:
        site, lo, hi = entry.sites[order], entry.lo[order], entry.hi[order]
        stats = entry.stats.get(order, ())
        norm = hi if site.bound else entry.norms.get(order)
        return Reading(entry.step, order, entry.calls[order], site, *known(lo, hi), stats, norm)

    @property
    def nbytes(self) -> int:
        """Give the host memory that the packed readings take."""
        return self._bytes

    def largest(self) -> Iterator[Reading]:
        """Give each slot's reading of the largest finite magnitude, the oldest of several."""
        entries = self.entries()
        best: dict[int, tuple[NDArray[np.float64], NDArray[np.intp]]] = {}
        for number, entry in enumerate(entries):
            with np.errstate(all="ignore"):
                low, high = np.frombuffer(entry.lo), np.frombuffer(entry.hi)
                size = np.maximum(np.abs(low), np.abs(high))
            size[~np.isfinite(size) | (low > high)] = -1.0
            most, at = best.setdefault(
                id(entry.sites), (np.full(len(size), -1.0), np.zeros(len(size), np.intp))
            )
            better = size > most
            most[better], at[better] = size[better], number
        for most, at in best.values():
            for order in np.flatnonzero(most >= 0).tolist():
                yield self._reading(entries[at[order]], order)

    def entries(self) -> list[Entry]:
        """Return the steps held, packed, oldest first."""
        with self._lock:
            return list(self._entries)

    def steps(self) -> list[int]:
        """List the steps held, oldest first."""
        with self._lock:
            return [entry.step for entry in self._entries]

    def last(self) -> list[Reading]:
        """Return the newest step's readings."""
        with self._lock:
            entry = self._entries[-1] if self._entries else None
        return [] if entry is None else list(self._unpack(entry))

    def append(self, rows: Rows) -> None:
        """Pack one finished step, and drop the oldest beyond the bounds."""
        if not self._steps:
            return
        with self._lock:
            self._add(Entry(rows, self._entries[-1] if self._entries else None))

    def add(self, step: int, sites: list[Site], bounds: list[float]) -> None:
        """Pack one step of which nothing but bounds is known.

        Args:
            step: The step.
            sites: What was read, each once; the list is kept, and shared by the steps.
            bounds: What none of its values exceeds, for each.
        """
        if self._steps:
            with self._lock:
                self._add(Entry.of_bounds(step, sites, bounds))

    def _add(self, entry: Entry) -> None:
        entries = self._entries
        entries.append(entry)
        self._bytes += entry.nbytes
        most = HISTORY_BYTES if self._most is None else self._most
        while len(entries) > 1 and (len(entries) > self._steps or self._bytes > most):
            self._bytes -= entries.popleft().nbytes

    def clear(self) -> None:
        """Forget every reading."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def curve(self, site: Site, upto: int = 50) -> tuple[tuple[int, float], ...]:
        """Give (step, absmax) of one slot over the last steps, oldest first.

        Where most steps have a bound on what an array holds, those alone are given: beside them
        what others hold exactly would look small.
        """
        with self._lock:
            entries = list(self._entries)[-upto:]
        points: list[tuple[bool, int, float]] = []
        for entry in entries:
            found = [
                (at.bound, max(abs(lo), abs(hi)))
                for at, lo, hi in zip(entry.sites, entry.lo, entry.hi, strict=True)
                if (at is site or at.place == site.place) and not lo > hi
            ]
            if found:
                largest = max(value for _, value in found)
                points.append((found[0][0], entry.step, largest))
        bounds = sum(bound for bound, _, _ in points)
        if site.parameter is None and bounds:
            points = [point for point in points if point[0] == (2 * bounds > len(points))]
        return tuple((step, value) for _, step, value in points)

    def trains(self, sites: list[Site], upto: int = 50) -> bool:
        """Tell whether gradients or updates of weights were read in the last steps.

        Args:
            sites: What was read in the open step.
            upto: How many steps are looked at.
        """
        with self._lock:
            read = [sites, *(entry.sites for entry in list(self._entries)[-upto:])]
        return any(
            site.phase == "backward" or (site.phase == "optimizer" and not site.buffer)
            for step in read
            for site in step
        )

    def norms(self, layer: str | None = None) -> tuple[tuple[int, float], ...]:
        """Give (step, L2 norm of the weights' gradients), oldest first.

        Args:
            layer: Only the weights of this layer itself; None for all weights together.

        Example:
            >>> import anynan
            >>> tracker.history.norms("encoder.0")  # doctest: +SKIP
            ((0, 0.71), (1, 0.69))
        """
        with self._lock:
            entries = list(self._entries)
        points = []
        bound: dict[int, bool] = {}  # most steps share their list of slots
        for entry in entries:
            key = id(entry.sites)
            if key not in bound:
                bound[key] = any(site.bound for site in entry.sites)
            if not entry.norms and not bound[key]:
                continue
            norms = layer_norms(self._unpack(entry))
            if layer is not None:
                norms = {layer: norms[layer]} if layer in norms else {}
            if norms:
                points.append((entry.step, math.hypot(*norms.values())))
        return tuple(points)

    def updates(self, layer: str | None = None) -> tuple[tuple[int, float, float], ...]:
        """Give (step, L2 norm of the update, of the weights before it), oldest first.

        There are some where they were asked for, as by ``updates=`` in ``anynan.torch.track``.

        Args:
            layer: Only the weights of this layer itself; None for all weights together.

        Example:
            >>> import anynan
            >>> tracker.history.updates()  # doctest: +SKIP
            ((0, 0.021, 14.2), (100, 0.019, 14.9))
        """
        points = []
        for entry in self.entries():
            held = entry.updates
            if layer is not None:
                held = {layer: held[layer]} if layer in held else {}
            if held:
                moved, size = (math.hypot(*norms) for norms in zip(*held.values(), strict=True))
                points.append((entry.step, moved, size))
        return tuple(points)
