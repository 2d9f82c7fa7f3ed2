"""The latest readings as a table: one row for each place, one column for each step."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anynan._readings.history import History
from anynan._readings.readings import Site


@dataclass(frozen=True, slots=True)
class Past:
    """Hold the ends of what was read.

    Attributes:
        sites: What each row is a reading of, in the order in which they ran.
        steps: The step of each column.
        low: Smallest values; +Inf where nothing was read.
        high: Largest values; -Inf there.
    """

    sites: tuple[Site, ...]
    steps: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    @property
    def sizes(self) -> NDArray[np.float64]:
        """Give the largest magnitudes, NaN where none is known or finite."""
        sizes = np.maximum(np.abs(self.low), np.abs(self.high))
        return np.where(np.isfinite(sizes), sizes, np.nan)


@np.errstate(all="ignore")
def past(history: History, phases: tuple[str, ...], upto: int) -> Past:
    """Gather the readings of arrays in the latest steps.

    Args:
        history: Where they are.
        phases: Those that count.
        upto: How many steps.
    """
    entries = history.entries()[-upto:]
    rows: dict[tuple[object, ...], int] = {}
    sites: list[Site] = []
    known: dict[int, tuple[NDArray[np.intp], NDArray[np.intp]]] = {}
    for entry in reversed(entries):  # the order is that of the last step
        if id(entry.sites) in known:
            continue
        orders: list[int] = []
        at: list[int] = []
        for order, site in enumerate(entry.sites):
            if site.phase in phases and not site.bound:
                row = rows.setdefault(site.place, len(rows))
                if row == len(sites):
                    sites.append(site)
                orders.append(order)
                at.append(row)
        known[id(entry.sites)] = np.asarray(orders, np.intp), np.asarray(at, np.intp)
    low = np.full((len(sites), len(entries)), np.inf)
    high = np.full((len(sites), len(entries)), -np.inf)
    for column, entry in enumerate(entries):
        chosen, into = known[id(entry.sites)]
        np.minimum.at(low[:, column], into, np.frombuffer(entry.lo)[chosen])
        np.maximum.at(high[:, column], into, np.frombuffer(entry.hi)[chosen])
    steps = np.asarray([entry.number for entry in entries], np.float64)
    unread = low > high
    low[unread], high[unread] = np.inf, -np.inf
    return Past(tuple(sites), steps, low, high)
