"""Slots and readings of one step: plain numbers on the host, no array library."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from anynan._readings.policy import reading_kind
from anynan.events import Kind, Phase


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
        buffer: True for what no optimizer trains: it may hold NaN and Inf on purpose.
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
    buffer: bool = False

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
        return round(math.log2(self.site.dtype_max) - math.log2(absmax), 6)


@dataclass(frozen=True, slots=True)
class Held:
    """Keep a bad reading, or an event made of one, until every rank knows of it."""

    reading: Reading | None = None
    kind: Kind = "nan"
    value: Any = None
    replayed: Any = None
    event: Any = None


@dataclass(frozen=True, slots=True)
class Doubt:
    """Keep a bad reading of what came in: data may hold NaN and Inf on purpose.

    Attributes:
        reading: The reading.
        kind: What is bad in it.
        value: Give the array, None if it is gone.
    """

    reading: Reading
    kind: Kind
    value: Callable[[], Any]


class Rows:
    """Collect one step's readings in execution order, in one thread.

    A row whose ``lo`` is above its ``hi`` says that nothing is bad, and not how large it is.
    """

    __slots__ = (
        "__weakref__", "applied", "brought", "calls", "carried", "carrying", "doubts", "evaluated",
        "expected", "failed", "follows", "given", "guarded", "held", "hi", "holding", "judged",
        "left", "live", "lo", "makers", "norms", "pending", "scale", "seen", "sites", "skip",
        "spread", "stats", "step", "suspect", "updates",
    )  # fmt: skip

    def __init__(self, step: int) -> None:
        self.step = step
        # How many steps before it, of its thread, took no gradients.
        self.evaluated = 0
        self.sites: list[Site] = []
        self.calls: list[int] = []
        self.lo: list[float] = []
        self.hi: list[float] = []
        self.stats: dict[int, tuple[float, ...]] = {}
        # Norms of gradients that were read by their ends.
        self.norms: dict[int, float] = {}
        # How far the update moved each layer's own weights, and how large they were: norms.
        self.updates: dict[str, tuple[float, float]] = {}
        self.expected: dict[int, dict[str, str]] = {}
        # Rows whose Inf may be meant: state and data, until something bad follows.
        self.suspect: set[int] = set()
        # Weak references to arrays that can still be looked at when their row is read later.
        self.live: dict[int, Callable[[], Any]] = {}
        # What came in bad, until something bad follows from it.
        self.doubts: list[Doubt] = []
        # Which watched model may have made it, by the name of the input.
        self.makers: dict[str, Any] = {}
        # What tells the memory of bad input that no watched model made.
        self.brought: list[Callable[[Any], bool]] = []
        # A layer was seen handing it on.
        self.carried = False
        # What of layers was bad since, and may be because of it.
        self.carrying: list[Reading] = []
        # -Inf that the whole gave, with what was seen of it, until the step's end is known.
        self.left: list[tuple[Doubt, Any]] = []
        # While a layer's output is judged: gives what the layer was given that is bad, and the
        # path of the model around it, None where code outside of every layer called it.
        self.given: Callable[[], tuple[Any, str | None]] | None = None
        self.judged = 0
        self.guarded = 0
        # The loss scale that the step ran under, as a number or the framework's array of one.
        self.scale: Any = None
        # True if a scaler made the update all the same: no weight's gradient was bad.
        self.applied = False
        self.failed: Any = None
        # True if that is the event of an earlier step, of which this one's fault came.
        self.follows = False
        # Set by an adapter whose ranks act together: what is bad waits until all of them know.
        self.holding = False
        self.held: Held | None = None
        self.pending: Reading | None = None
        self.skip = False
        self.spread = 0
        # Tells what a watcher of operations saw of this very run, up to a bad reading of an array:
        # nothing is run again then. It gives None where the watcher was blind.
        self.seen: Callable[[Reading, Any], Any] | None = None

    def keep_whole(self, waiting: int) -> bool:
        """Drop the readings that an interrupt left half written; tell whether there were some.

        Args:
            waiting: How many were written whose values are to come.
        """
        columns: tuple[list[Any], ...] = self.sites, self.calls, self.lo, self.hi
        sites, calls, lo, hi = map(len, columns)
        if lo == hi and sites == calls == lo + waiting:
            return False
        whole = min(sites, calls, lo, hi)
        for column in columns:
            del column[whole:]
        return True

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

    def moved(self, layer: str, update: float, weights: float) -> None:
        """Note the update of a layer's weights, or of more of them.

        Args:
            layer: Layer path.
            update: L2 norm of what was added.
            weights: L2 norm of what it was added to.
        """
        before = self.updates.get(layer, (0.0, 0.0))
        self.updates[layer] = math.hypot(before[0], update), math.hypot(before[1], weights)

    def reading(self, order: int) -> Reading:
        """Return one row as a reading."""
        return Reading(
            self.step,
            order,
            self.calls[order],
            self.sites[order],
            *known(self.lo[order], self.hi[order]),
            self.stats.get(order, ()),
            self.hi[order] if self.sites[order].bound else self.norms.get(order),
        )


def known(lo: float, hi: float) -> tuple[float | None, float | None]:
    return (None, None) if lo > hi else (lo, hi)


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
