"""What is read in one step: the readings in order, and what is known of them."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from anynan._readings.readings import Reading, Site, known
from anynan.events import Kind


@dataclass(frozen=True, slots=True)
class DeferredFailure:
    """Keep a bad reading, or an event made of one, until every rank knows of it."""

    reading: Reading | None = None
    kind: Kind = "nan"
    value: Any = None
    replayed: Any = None
    event: Any = None


@dataclass(frozen=True, slots=True)
class DeferredInput:
    """Keep a bad reading of what came in: data may hold NaN and Inf on purpose.

    Attributes:
        reading: The reading.
        kind: What is bad in it.
        value: Give the array, None if it is gone.
    """

    reading: Reading
    kind: Kind
    value: Callable[[], Any]


class Step:
    """Collect one step's readings in execution order, in one thread.

    Adapters read the fields and write none: they call the methods. A reading whose ``lo`` is
    above its ``hi`` says that nothing is bad, and not how large it is.
    """

    __slots__ = (
        "__weakref__", "applied", "brought", "calls", "carried", "carrying", "evaluated",
        "expected", "failed", "follows", "given", "guarded", "held", "hi", "holding", "judged",
        "left", "live", "lo", "makers", "norms", "number", "pending", "pending_inputs", "scale",
        "seen", "sites", "skip", "spread", "stats", "suspect", "updates",
    )  # fmt: skip

    def __init__(self, number: int) -> None:
        self.number = number
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
        # Readings whose Inf may be meant: state and data, until something bad follows.
        self.suspect: set[int] = set()
        # Weak references to arrays that can still be looked at when their row is read later.
        self.live: dict[int, Callable[[], Any]] = {}
        # What came in bad, until something bad follows from it.
        self.pending_inputs: list[DeferredInput] = []
        # Which watched model may have made it, by the name of the input.
        self.makers: dict[str, Any] = {}
        # What tells the memory of bad input that no watched model made.
        self.brought: list[Callable[[Any], bool]] = []
        # A layer was seen handing it on.
        self.carried = False
        # What of layers was bad since, and may be because of it.
        self.carrying: list[Reading] = []
        # -Inf that the whole gave, with what was seen of it, until the step's end is known.
        self.left: list[tuple[DeferredInput, Any]] = []
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
        # True where ranks act together: what is bad waits until all of them know.
        self.holding = False
        self.held: DeferredFailure | None = None
        self.pending: Reading | None = None
        self.skip = False
        self.spread = 0
        # Tells what a watcher of operations saw of this very run, up to a bad reading of an array:
        # nothing is run again then. It gives None where the watcher was blind.
        self.seen: Callable[[Reading, Any], Any] | None = None

    # Readings, in the order of execution.

    @property
    def last(self) -> int:
        """Give the order of the last reading whose values are known."""
        return len(self.lo) - 1

    def add(self, site: Site, call: int, lo: float, hi: float) -> None:
        """Append one reading."""
        # Each needs no call: this runs for every layer and every gradient.
        self.sites += (site,)
        self.calls += (call,)
        self.lo += (lo,)
        self.hi += (hi,)

    def extend(
        self, sites: Iterable[Site], calls: Iterable[int], lo: Iterable[float], hi: Iterable[float]
    ) -> None:
        """Append several readings."""
        self.sites += sites
        self.calls += calls
        self.lo += lo
        self.hi += hi

    def add_norms(self, sites: list[Site], norms: list[float]) -> None:
        """Append readings of gradients by their norms, which bound their values."""
        self.sites += sites
        self.calls += [0] * len(sites)
        self.lo += [-norm for norm in norms]
        self.hi += norms

    def reserve(self, site: Site, call: int) -> int:
        """Append a reading whose values come later, with ``fill``; return its order."""
        self.sites += (site,)
        self.calls += (call,)
        return len(self.sites) - 1

    def fill(self, lo: Iterable[float], hi: Iterable[float]) -> None:
        """Give the values of the first readings that have none."""
        self.lo += lo
        self.hi += hi

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
        for name in ("stats", "expected", "live", "norms"):
            known = getattr(self, name)
            setattr(self, name, {order + (order >= at): x for order, x in known.items()})
        self.suspect = {order + (order >= at) for order in self.suspect}
        self.guarded += at < self.guarded

    def move_last(self, write: Callable[[], None]) -> int:
        """Have earlier readings written before the last one, and return its new order."""
        order = self.last
        row = self.sites.pop(), self.calls.pop(), self.lo.pop(), self.hi.pop()
        stats, expected = self.stats.pop(order, None), self.expected.pop(order, None)
        try:
            write()
        finally:
            self.insert(len(self.lo), *row)
            if stats is not None:
                self.stats[self.last] = stats
            if expected is not None:
                self.expected[self.last] = expected
        return self.last

    def correct(
        self, order: int, lo: float, hi: float, *, site: Site | None = None,
        norm: float | None = None,
    ) -> None:  # fmt: skip
        """Put exact values in the place of a bound or of none."""
        self.lo[order], self.hi[order] = lo, hi
        if site is not None:
            self.sites[order] = site
        if norm is not None:
            self.norms[order] = norm

    def clear_reading(self, order: int) -> None:
        """Count a reading as one that is not bad, without its values."""
        self.lo[order], self.hi[order] = 1.0, 0.0

    def add_stats(self, order: int, values: Iterable[float]) -> None:
        """Keep the extra statistics of a reading."""
        self.stats[order] = tuple(values)

    def add_norm(self, order: int, norm: float) -> None:
        """Keep the norm of a gradient that was read by its ends."""
        self.norms[order] = norm

    def mark_judged(self, upto: int | None = None) -> None:
        """Count the readings as judged, all of them or those before one."""
        self.judged = len(self.lo) if upto is None else upto

    def reading(self, order: int) -> Reading:
        """Return one row as a reading."""
        return Reading(
            self.number,
            order,
            self.calls[order],
            self.sites[order],
            *known(self.lo[order], self.hi[order]),
            self.stats.get(order, ()),
            self.hi[order] if self.sites[order].bound else self.norms.get(order),
        )

    # What is known of them.

    def expect(self, orders: Iterable[int], kinds: dict[str, str]) -> None:
        """Note which kinds the user's code expects in readings, and why."""
        self.expected.update(dict.fromkeys(orders, kinds))

    def mark_intended(self, order: int) -> None:
        """Note that an Inf may be intended: it is suspect, until something bad follows."""
        self.suspect.add(order)

    def array(self, order: int) -> Any:
        """Give what was read, where it is at hand still."""
        return self.live[order]() if order in self.live else None

    def rename(self, order: int, site: Site) -> None:
        """Say more exactly what a reading is of."""
        self.sites[order] = site

    def keep(self, order: int, look: Callable[[], Any]) -> None:
        """Keep what gives a reading's array, for as long as it is there."""
        self.live[order] = look

    def forget_arrays(self) -> None:
        """Let go of what gives the readings' arrays."""
        self.live.clear()

    def came_from(self, name: str, producer: Any) -> None:
        """Note which watched model or function made a bad input."""
        self.makers[name] = producer

    def know_input(self, look: Callable[[], tuple[Any, str | None]] | None) -> None:
        """Know what a layer was given, while its output is judged; None once it is."""
        self.given = look

    def watch_operations(self, seen: Callable[[Reading, Any], Any]) -> None:
        """Ask a watcher of this run's operations, in the place of a second run."""
        self.seen = seen

    # How it goes on.

    def hold(self) -> None:
        """Have what is bad wait until every rank knows of it."""
        self.holding = True

    def release(self) -> None:
        """Have what is bad wait no longer."""
        self.holding = False

    def fail(self, event: Any, *, elsewhere: bool) -> None:
        """Fail the step by an event; one from elsewhere has counted what follows from it."""
        self.failed, self.held = event, None
        if elsewhere:
            self.spread = 0

    def defer(self, failure: DeferredFailure | None) -> None:
        """Keep what is bad until every rank knows of it; None where another has the story."""
        self.held = failure

    def ran_under(self, scale: Any) -> None:
        """Keep the loss scale of the step."""
        self.scale = scale

    def belongs_before(self) -> None:
        """Count what is read as of the step before it, where there is one."""
        self.number = max(self.number - 1, 0)

    def update_goes_on(self, *, made: bool) -> None:
        """Note whether a loss scaler makes the update all the same."""
        self.applied = made

    def spread_by(self, count: int) -> None:
        """Count bad readings that follow from the one that failed the step."""
        self.spread += count

    def moved(self, layer: str, update: float, weights: float) -> None:
        """Note the update of a layer's weights, or of more of them.

        Args:
            layer: Layer path.
            update: L2 norm of what was added.
            weights: L2 norm of what it was added to.
        """
        before = self.updates.get(layer, (0.0, 0.0))
        self.updates[layer] = math.hypot(before[0], update), math.hypot(before[1], weights)
