"""The readings of past steps, packed and bounded."""

import math
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from operator import neg
from threading import RLock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from anynan._base.shown import Shown
from anynan._base.tables import table
from anynan._readings.readings import Reading, Site, known
from anynan._readings.step import Step
from anynan.events import PHASES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Extreme = tuple[NDArray[np.float64], NDArray[np.intp]]

HISTORY_BYTES = 64 * 2**20
# So far back the last steps go, and what of them is no gradient.
_LAST, _VALUES = 3, ("input", "forward", "loss")


class Entry:
    """Keep one step of the ring, packed."""

    __slots__ = ("calls", "hi", "lo", "nbytes", "norms", "number", "sites", "stats", "updates")
    sites: list[Site]
    calls: list[int]
    nbytes: int  # at most: shared lists are counted for every step

    def __init__(self, rows: Step, before: "Packed | None") -> None:
        read = len(rows.lo)
        self.number = rows.number
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
        extra = len(self.stats) + len(self.norms) + len(self.updates)
        self.nbytes = 16 * (len(self.lo) + len(self.sites)) + 64 * extra


class Cleared:
    """Keep one step of which nothing is known but that sums of squares were finite.

    Args:
        number: Of the step.
        sites: What was read, each once; the list is shared by the steps.
        squares: The sum of squares of each, whose root none of its values exceeds.
    """

    __slots__ = ("nbytes", "number", "sites", "squares")
    stats: Mapping[int, tuple[float, ...]] = MappingProxyType({})
    norms: Mapping[int, float] = MappingProxyType({})
    updates: Mapping[str, tuple[float, float]] = MappingProxyType({})

    def __init__(self, number: int, sites: list[Site], squares: list[float]) -> None:
        self.number, self.sites, self.squares = number, sites, squares
        self.nbytes = 128 + 32 * len(squares)

    @property
    def calls(self) -> list[int]:
        return [0] * len(self.sites)

    @property
    def hi(self) -> "array[float]":
        return array("d", map(math.sqrt, self.squares))

    @property
    def lo(self) -> "array[float]":
        return array("d", map(neg, self.hi))


Packed = Entry | Cleared


class History(Shown):
    """Show the readings of the last steps.

    Iterating yields ``Reading`` objects, oldest first; ``len`` is the number of steps; printed,
    it is a table of layers.

    Example:
        >>> import anynan, numpy
        >>> log = anynan.track(numpy.log)
        >>> _ = log(numpy.array([1.0, 4.0]))
        >>> print(log.history)
        1 step, from step 0
        phase    layer  smallest  largest
        input    -             1        4
        forward  -             0     1.39
    """

    _entries: "deque[Packed]"
    _bytes: int
    _lock: Any

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Reading]:
        with self._lock:
            entries = list(self._entries)
        for entry in entries:
            yield from self._unpack(entry)

    def _unpack(self, entry: Packed) -> Iterator[Reading]:
        for order in range(len(entry.sites)):
            yield self._reading(entry, order)

    @staticmethod
    def _reading(entry: Packed, order: int) -> Reading:
        site, lo, hi = entry.sites[order], entry.lo[order], entry.hi[order]
        stats = entry.stats.get(order, ())
        norm = hi if site.bound else entry.norms.get(order)
        return Reading(entry.number, order, entry.calls[order], site, *known(lo, hi), stats, norm)

    @property
    def nbytes(self) -> int:
        """Give the host memory that the packed readings take."""
        return self._bytes

    def select(self, layer: str = "", phase: str | None = None) -> list[Reading]:
        """Return the readings whose layer path contains a string, in one phase or all.

        Raises:
            ValueError: If there is no such phase.
        """
        if phase is not None and phase not in PHASES:
            msg = f"phase={phase!r} is unknown; choose from {', '.join(PHASES)}"
            raise ValueError(msg)
        return [
            reading
            for reading in self
            if layer in (reading.layer or "") and phase in (None, reading.phase)
        ]

    def __str__(self) -> str:
        steps = self.steps()
        if not steps:
            return "no steps"
        rows: dict[tuple[str, ...], list[Reading]] = {}
        for reading in self:
            place = reading.phase, reading.site.parameter or reading.layer or "-"
            rows.setdefault(place, []).append(reading)
        cells: list[tuple[str, ...]] = [("phase", "layer", "smallest", "largest")]
        cells += [(*place, *_range(readings)) for place, readings in rows.items()]
        said = f"{len(steps)} step{'s' * (len(steps) > 1)}, from step {steps[0]}"
        return "\n".join([said, *table(cells, right=(2, 3))])

    def extremes(self) -> "Iterator[tuple[list[Packed], Extreme, Extreme]]":
        """Give the steps of each list of slots, and where each slot was largest and smallest.

        Both are finite magnitudes with places in the list of steps, the oldest of several: -1
        where none was read, Inf where none was above zero.
        """
        by_sites: dict[int, list[Packed]] = {}
        for entry in self.entries():
            by_sites.setdefault(id(entry.sites), []).append(entry)
        for entries in by_sites.values():
            count = len(entries[0].lo)
            largest = np.full(count, -1.0), np.zeros(count, np.intp)
            smallest = np.full(count, np.inf), np.zeros(count, np.intp)
            for number, entry in enumerate(entries):
                low, high = np.frombuffer(entry.lo), np.frombuffer(entry.hi)
                with np.errstate(all="ignore"):
                    sizes = np.maximum(np.abs(low), np.abs(high))
                told = np.isfinite(sizes) & (low <= high)
                for (held, at), better in (
                    (largest, told & (sizes > largest[0])),
                    (smallest, told & (sizes > 0) & (sizes < smallest[0])),
                ):
                    held[better], at[better] = sizes[better], number
            yield entries, largest, smallest

    def largest(self) -> Iterator[Reading]:
        """Give each slot's reading of the largest finite magnitude, the oldest of several."""
        for entries, (most, at), _ in self.extremes():
            for order in np.flatnonzero(most >= 0).tolist():
                yield self._reading(entries[at[order]], order)

    def first(self, site: Site) -> Reading | None:
        """Give the oldest reading of what a slot reads, None if there is none."""
        without: set[int] = set()  # most steps share their list of slots
        for entry in self.entries():
            if id(entry.sites) in without:
                continue
            for order, other in enumerate(entry.sites):
                if other is site or other.place == site.place:
                    return self._reading(entry, order)
            without.add(id(entry.sites))
        return None

    def entries(self) -> list[Packed]:
        """Return the steps held, packed, oldest first."""
        with self._lock:
            return list(self._entries)

    def steps(self) -> list[int]:
        """List the steps held, oldest first."""
        with self._lock:
            return [entry.number for entry in self._entries]

    def last(self) -> list[Reading]:
        """Return the newest step's readings."""
        with self._lock:
            entry = self._entries[-1] if self._entries else None
        return [] if entry is None else list(self._unpack(entry))

    def calmest(self, step: int) -> tuple[float, int] | None:
        """Give the smallest of what the last steps before one came to at most, and which it was.

        Gradients do not count; None where nothing finite was read.
        """
        most = []
        for entry in [x for x in self.entries() if x.number < step][-_LAST:]:
            rows = zip(entry.sites, entry.lo, entry.hi, strict=True)
            sizes = [max(abs(lo), abs(hi)) for site, lo, hi in rows if site.phase in _VALUES]
            if sizes and all(map(math.isfinite, sizes)):
                most.append((max(sizes), entry.number))
        return min(most, default=None)

    def curve(self, site: Site, upto: int = 50) -> tuple[tuple[int, float], ...]:
        """Give (step, absmax) of one slot over the last steps, oldest first.

        Where most steps have a bound on what an array holds, those alone are given: beside them
        what others hold exactly would look small.
        """
        with self._lock:
            entries = list(self._entries)[-upto:]
        points: list[tuple[bool, int, float]] = []
        where: dict[int, list[int]] = {}  # most steps share their list of slots
        for entry in entries:
            sites, lo, hi = entry.sites, entry.lo, entry.hi
            if id(sites) not in where:
                place = site.place
                where[id(sites)] = [i for i, at in enumerate(sites) if at.place == place]
            found = [
                (sites[i].bound, max(abs(lo[i]), abs(hi[i])))
                for i in where[id(sites)]
                if not lo[i] > hi[i]
            ]
            if found:
                largest = max(value for _, value in found)
                points.append((found[0][0], entry.number, largest))
        bounds = sum(bound for bound, _, _ in points)
        if site.parameter is None and bounds:
            points = [point for point in points if point[0] == (2 * bounds > len(points))]
        return tuple((step, value) for _, step, value in points)

    def trains(self, sites: list[Site]) -> bool:
        """Tell whether gradients or updates of weights were read here, or in the last steps."""
        read = [sites, *(entry.sites for entry in self.entries()[-50:])]
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
        points = []
        weights = _Weights([], {}, layer)
        for entry in self.entries():
            if not weights.fit(entry):
                weights = _Weights(entry.sites, entry.norms, layer)
            norms = weights.norms(entry)
            if norms:
                points.append((entry.number, math.hypot(*norms)))
        return tuple(points)

    def updates(self, layer: str | None = None) -> tuple[tuple[int, float, float], ...]:
        """Give (step, L2 norm of the update, of the weights before it), oldest first.

        There are some where ``updates=`` asked for them.

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
                points.append((entry.number, moved, size))
        return tuple(points)


def _range(readings: list[Reading]) -> tuple[str, str]:
    """Say what the smallest and largest value were; NaN beside either, where there was one."""
    exact = [reading for reading in readings if not reading.site.bound]
    spans = [(x.lo, x.hi) for x in exact or readings if x.lo is not None and x.hi is not None]
    finite = [(lo, hi) for lo, hi in spans if lo <= hi]
    if not finite:
        return ("NaN", "NaN") if spans else ("-", "-")
    lo, hi = min(lo for lo, _ in finite), max(hi for _, hi in finite)
    mark = " NaN" if len(finite) < len(spans) else ""
    # A bound on what an array holds is no more than that.
    return f"{'' if exact else '>='}{lo:.3g}", f"{'' if exact else '<='}{hi:.3g}{mark}"


class Ring(History):
    """Hold the readings of the last steps, bounded in steps and in bytes."""

    def __init__(self, steps: int, nbytes: float | None = None) -> None:
        self._steps = steps
        self._most = nbytes
        self._entries = deque()
        self._bytes = 0
        self._lock = RLock()

    def append(self, rows: Step) -> None:
        """Pack one finished step, and drop the oldest beyond the bounds."""
        if self._steps:
            with self._lock:
                self.add(Entry(rows, self._entries[-1] if self._entries else None))

    def add(self, entry: Packed) -> None:
        """Keep one packed step, and drop the oldest beyond the bounds."""
        entries = self._entries
        with self._lock:
            entries.append(entry)
            self._bytes += entry.nbytes
            most = HISTORY_BYTES if self._most is None else self._most
            while entries and (
                len(entries) > self._steps or (self._bytes > most and len(entries) > 1)
            ):
                self._bytes -= entries.popleft().nbytes

    def clear(self) -> None:
        """Forget every reading."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0


class _Weights:
    """Find the readings of a step that tell the norms of weights' gradients."""

    def __init__(self, sites: list[Site], norms: Mapping[int, float], layer: str | None) -> None:
        self._sites, self._norms = sites, norms.keys()
        # Read again in the same step, a weight counts once.
        last: dict[str, int] = {}
        for order, site in enumerate(sites):
            if site.parameter is not None and (site.bound or order in norms):
                last[site.parameter] = order
        chosen = [x for x in last.values() if layer is None or (sites[x].layer or "") == layer]
        self._bound = [order for order in chosen if sites[order].bound]
        self._read = [order for order in chosen if not sites[order].bound]

    def fit(self, entry: Packed) -> bool:
        """Tell whether a step reads the same weights in the same way, as most do."""
        return entry.sites is self._sites and entry.norms.keys() == self._norms

    def norms(self, entry: Packed) -> list[float]:
        return [*map(entry.hi.__getitem__, self._bound), *map(entry.norms.__getitem__, self._read)]
