"""Slots, readings and their history: plain numbers on the host, no array library."""

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from threading import RLock
from typing import Any

import numpy as np

from anynan._judging.policy import Policy, reading_kind
from anynan.events import Kind, Phase

HISTORY_BYTES = 64 * 2**20


@dataclass(slots=True)
class Site:
    """Name what one slot reads.

    Attributes:
        index: Position in the monitor's table.
        layer: Layer path, None outside every watched layer.
        phase: Phase of the reading.
        tensor: Which tensor (``output``, ``grad``, ``args[0]``).
        dtype: Short dtype name.
        dtype_max: The dtype's largest finite value, None where it has none.
        limit: Magnitude at which a reading needs judging.
        parameter: Name of the weight or buffer it belongs to.
        bound: True if the values only bound the tensor (a norm), so they can clear it but
            not condemn it.
    """

    index: int
    layer: str | None
    phase: Phase
    tensor: str
    dtype: str
    dtype_max: float | None
    limit: float
    parameter: str | None = None
    bound: bool = False

    @property
    def place(self) -> tuple[Any, ...]:
        """Name what is read, however it is read: by its ends or by its norm."""
        return self.layer, self.phase, self.tensor, self.parameter


@dataclass(frozen=True, slots=True)
class Reading:
    """Give one slot's values for one step.

    Attributes:
        step: Step, from 0.
        order: Position in the step.
        call: Which call of the layer in the step.
        site: What was read.
        lo: Smallest value, NaN if any value is NaN, None if it was not read how large they are.
        hi: Largest value, NaN and None likewise.
        stats: Extra statistics asked for with ``stats=``.
        norm: L2 norm of a weight's gradient, None for all else.
    """

    step: int
    order: int
    call: int
    site: Site
    lo: float | None
    hi: float | None
    stats: tuple[float, ...] = ()
    norm: float | None = None

    @property
    def layer(self) -> str | None:
        """Give the layer path."""
        return self.site.layer

    @property
    def phase(self) -> Phase:
        """Give the phase."""
        return self.site.phase

    @property
    def kind(self) -> Kind | None:
        """Name the non-finite kind, None if the values are finite."""
        return None if self.lo is None or self.hi is None else reading_kind(self.lo, self.hi)

    @property
    def absmax(self) -> float | None:
        """Give the largest magnitude, None if it was not read; a bound where it is a norm."""
        if self.lo is None or self.hi is None:
            return None
        return max(abs(self.lo), abs(self.hi)) if self.lo == self.lo else math.nan

    @property
    def headroom(self) -> float | None:
        """Give the bits left before overflow, None where that means nothing.

        Where the slot holds a norm there are at least as many.
        """
        absmax = self.absmax
        if self.site.dtype_max is None or not absmax or not math.isfinite(absmax):
            return None
        return round(math.log2(self.site.dtype_max / absmax), 6)


@dataclass(frozen=True, slots=True)
class Held:
    """Keep a bad reading, or an event made of one, until every rank knows of it."""

    reading: Reading | None = None
    kind: Kind = "nan"
    value: Any = None
    replayed: Any = None
    event: Any = None


class Rows:
    """Collect one step's readings in execution order, in one thread.

    A row whose ``lo`` is above its ``hi`` says that nothing is bad, and not how large it is.
    """

    __slots__ = (
        "__weakref__", "applied", "calls", "expected", "failed", "guarded", "held", "hi", "holding",
        "judged", "live", "lo", "norms", "pending", "scale", "sites", "skip", "spread", "stats",
        "step", "suspect",
    )  # fmt: skip

    def __init__(self, step: int) -> None:
        self.step = step
        self.sites: list[Site] = []
        self.calls: list[int] = []
        self.lo: list[float] = []
        self.hi: list[float] = []
        self.stats: dict[int, tuple[float, ...]] = {}
        # Norms of gradients that were read by their ends.
        self.norms: dict[int, float] = {}
        self.expected: dict[int, dict[str, str]] = {}
        # Rows whose Inf may be meant: state and data, until something bad follows.
        self.suspect: set[int] = set()
        # Weak references to arrays that can still be looked at when their row is read later.
        self.live: dict[int, Callable[[], Any]] = {}
        self.judged = 0
        self.guarded = 0
        # The loss scale that the step ran under, as a number or the framework's array of one.
        self.scale: Any = None
        # True if a scaler made the update all the same: no weight's gradient was bad.
        self.applied = False
        self.failed: Any = None
        # Set by an adapter whose ranks act together: what is bad waits until all of them know.
        self.holding = False
        self.held: Held | None = None
        self.pending: Reading | None = None
        self.skip = False
        self.spread = 0

    def insert(self, at: int, site: Site, call: int, lo: float, hi: float) -> None:
        """Put in a reading whose place became known after later ones were written."""
        self.sites.insert(at, site)
        self.calls.insert(at, call)
        self.lo.insert(at, lo)
        self.hi.insert(at, hi)
        self.stats = {order + (order >= at): value for order, value in self.stats.items()}
        self.expected = {order + (order >= at): why for order, why in self.expected.items()}
        self.suspect = {order + (order >= at) for order in self.suspect}
        self.live = {order + (order >= at): ref for order, ref in self.live.items()}
        self.norms = {order + (order >= at): norm for order, norm in self.norms.items()}
        self.guarded += at < self.guarded

    def reading(self, order: int) -> Reading:
        """Return one row as a reading."""
        return Reading(
            self.step,
            order,
            self.calls[order],
            self.sites[order],
            *_known(self.lo[order], self.hi[order]),
            self.stats.get(order, ()),
            self.hi[order] if self.sites[order].bound else self.norms.get(order),
        )


def _known(lo: float, hi: float) -> tuple[float | None, float | None]:
    return (None, None) if lo > hi else (lo, hi)


class _Entry:
    """Keep one step of the ring, packed."""

    __slots__ = ("calls", "hi", "lo", "norms", "sites", "stats", "step")
    sites: list[Site]
    calls: list[int]

    def __init__(self, rows: Rows, before: "_Entry | None") -> None:
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

    @property
    def nbytes(self) -> int:
        """Give at most the memory this takes: shared lists are counted for every step."""
        extra = len(self.stats) + len(self.norms)
        return 16 * (len(self.lo) + len(self.sites)) + 64 * extra


class History:
    """Hold the readings of the last steps, bounded in steps and in bytes.

    Iterating yields ``Reading`` objects, oldest first; ``len`` is the number of steps.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._entries: deque[_Entry] = deque()
        self._bytes = 0
        self._lock = RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Reading]:
        with self._lock:
            entries = list(self._entries)
        for entry in entries:
            yield from self._unpack(entry)

    def _unpack(self, entry: _Entry) -> Iterator[Reading]:
        pairs = zip(entry.sites, entry.calls, entry.lo, entry.hi, strict=True)
        for order, (site, call, lo, hi) in enumerate(pairs):
            stats = entry.stats.get(order, ())
            norm = hi if site.bound else entry.norms.get(order)
            yield Reading(entry.step, order, call, site, *_known(lo, hi), stats, norm)

    @property
    def nbytes(self) -> int:
        """Give the host memory that the packed readings take."""
        return self._bytes

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
            entry = _Entry(rows, self._entries[-1] if self._entries else None)
            self._entries.append(entry)
            self._bytes += entry.nbytes
            while len(self._entries) > 1 and (
                len(self._entries) > self._steps or self._bytes > HISTORY_BYTES
            ):
                self._bytes -= self._entries.popleft().nbytes

    def clear(self) -> None:
        """Forget every reading."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def curve(self, site: Site, upto: int = 50) -> tuple[tuple[int, float], ...]:
        """Give (step, absmax) of one slot over the last steps, oldest first."""
        with self._lock:
            entries = list(self._entries)[-upto:]
        points = []
        for entry in entries:
            values = [
                max(abs(lo), abs(hi))
                for at, lo, hi in zip(entry.sites, entry.lo, entry.hi, strict=True)
                if (at is site or at.place == site.place) and not lo > hi
            ]
            if values:
                points.append((entry.step, max(values)))
        return tuple(points)

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
        for entry in entries:
            norms = layer_norms(self._unpack(entry))
            if layer is not None:
                norms = {layer: norms[layer]} if layer in norms else {}
            if norms:
                points.append((entry.step, math.hypot(*norms.values())))
        return tuple(points)


def layer_norms(readings: Iterable[Reading]) -> dict[str, float]:
    """Give the gradient norm of each layer's own weights, from one step's readings."""
    # Read again in the same step (a closure, a second update), a weight counts once.
    weights = {
        reading.site.parameter: (reading.site.layer or "", reading.norm)
        for reading in readings
        if reading.norm is not None and reading.site.parameter is not None
    }
    layers: dict[str, list[float]] = {}
    for layer, norm in weights.values():
        layers.setdefault(layer, []).append(norm)
    return {layer: math.hypot(*norms) for layer, norms in layers.items()}


class Monitor:
    """Keep the table of slots, judge readings against the policy, remember what passed."""

    def __init__(self, policy: Policy, history: int) -> None:
        self.policy = policy
        self.sites: list[Site] = []
        self.history = History(history)
        self.downgraded: dict[tuple[str | None, str, str], str] = {}
        self._table: dict[tuple[Any, ...], Site] = {}
        self._lock = RLock()

    def site(
        self,
        layer: str | None,
        phase: Phase,
        tensor: str,
        dtype: str,
        dtype_max: float | None,
        *,
        parameter: str | None = None,
        bound: bool = False,
    ) -> Site:
        """Return the slot for this tensor, made once."""
        key = (layer, phase, tensor, dtype, parameter, bound)
        found = self._table.get(key)
        if found is None:
            with self._lock:
                found = self._table.get(key)
                if found is None:
                    limit = self.policy.limit(layer, dtype_max)
                    found = Site(
                        len(self.sites), layer, phase, tensor, dtype, dtype_max, limit,
                        parameter, bound,
                    )  # fmt: skip
                    self.sites.append(found)
                    self._table[key] = found
        return found

    def flagged(self, rows: Rows) -> list[int]:
        """List the rows not judged yet whose values leave their slot's limits, in order."""
        start, rows.judged = rows.judged, len(rows.lo)
        if start == rows.judged:
            return []
        lo = np.asarray(rows.lo[start:])
        hi = np.asarray(rows.hi[start:])
        limit = np.fromiter((site.limit for site in rows.sites[start:]), np.float64, len(lo))
        inside = (lo >= -limit) & (hi <= limit)
        return [int(i) + start for i in np.flatnonzero(~inside)]

    def trail(
        self,
        rows: Rows,
        upto: int,
        layer: str | None,
        phase: Phase = "forward",
        call: int | None = None,
    ) -> tuple[tuple[str, float | None], ...]:
        """Give what led to a bad layer in the same pass, with magnitudes; the layer comes last.

        Shown are the layers beside the failing one and beside each layer around it: what a
        reader would follow from the input to the failure, or in a backward pass from the loss.

        Args:
            rows: The step's readings.
            upto: Order of the reading that failed.
            layer: The layer it began in.
            phase: Which pass, ``forward`` or ``backward``.
            call: Which call of the layer; None for the last there is.
        """
        if layer is None:
            return ()
        parts = layer.split(".")
        around = {".".join(parts[:depth]) for depth in range(len(parts) + 1)}
        orders = [
            order
            for order, site in enumerate(rows.sites[: min(upto + 1, len(rows.lo))])
            if site.phase == phase and site.layer is not None and not site.bound
        ]
        # Where no gradient of an output is read, those of the weights tell the way.
        outputs = [order for order in orders if rows.sites[order].parameter is None]
        orders = outputs or orders
        own = [
            order
            for order in orders
            if rows.sites[order].layer == layer and call in (None, rows.calls[order])
        ]
        if not own:  # what failed is bad because of it, and comes after it
            orders = [order for order in orders if order != upto]
        shown: dict[str, tuple[int, float | None]] = {}
        # Layers whose call is over, going forward, or begins, going backward: what was inside
        # of it before belongs to another call.
        over: set[str] = set()
        for order in orders:
            path = rows.sites[order].layer or ""
            for outer in [outer for outer in over if _inside(path, outer)]:
                shown = {name: held for name, held in shown.items() if not _inside(name, outer)}
                over.discard(outer)
            if path in around and path != layer:
                over.add(path)
            value = rows.reading(order).absmax
            within = bool(layer) and _inside(path, layer)
            beside = path.rpartition(".")[0] in around and not within
            told = path == layer or (beside and path not in around)
            if told and value is not None:
                before = shown.pop(path, None)
                size = value if math.isfinite(value) else None
                if before is not None and before[0] == rows.calls[order]:
                    size = None if None in (size, before[1]) else max(value, before[1] or 0.0)
                shown[path] = rows.calls[order], size
            if own and order == own[-1]:
                break
        if shown and not own:  # it had not ended yet
            shown.pop(layer, None)
            shown[layer] = 0, None
        return tuple((name, value) for name, (_, value) in shown.items())


def _inside(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))
