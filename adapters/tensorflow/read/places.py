"""What the core knows some readings by, and which calls of their layers they are."""

import functools
from operator import attrgetter
from typing import Any, Self

import numpy as np

from anynan._readings.monitor import Monitor
from anynan._readings.readings import ProbePoint, Site
from anynan._readings.step import Step
from anynan.tensorflow.read import readings

_DTYPE = attrgetter("dtype")


class Places:
    """Hold the sites of readings that come together: most steps read the same ones.

    Args:
        sites: What each of them reads, in execution order.
    """

    def __init__(self, sites: list[Site]) -> None:
        self.sites = sites
        self.counts: dict[int, int] = {}
        self.calls = self._count(self.counts)

    @classmethod
    def of(cls, points: list[ProbePoint], monitor: Monitor) -> Self:
        """Find the sites of points."""
        return cls(monitor.sites_of(points, map(_DTYPE, points)))

    def fill(
        self, rows: Step, values: Any, seen: dict[int, int], arrays: list[Any] | None = None, *,
        norms: bool,
    ) -> None:  # fmt: skip
        """Append readings to a step.

        Args:
            rows: The step.
            values: (readings, 3): what ``readings`` made.
            seen: How often each site was read in the step before; is counted on.
            arrays: What was read, where it is at hand.
            norms: True to keep the norms of weights' gradients.
        """
        low, high, there = readings.read(values)
        if not there.all():
            held = np.flatnonzero(there)
            some = Places([self.sites[i] for i in held])
            given = None if arrays is None else [arrays[i] for i in held]
            some.fill(rows, values[held], seen, given, norms=norms)
            return
        start = len(rows.lo)
        rows.extend(self.sites, self._calls(seen), low.tolist(), high.tolist())
        for i, array in enumerate(arrays or ()):
            rows.keep(start + i, functools.partial(lambda x: x, array))
        for i, site in enumerate(self.sites if norms else ()):
            if site.parameter is not None and site.phase == "backward":
                rows.add_norm(start + i, readings.norm(values[i]))

    def _calls(self, seen: dict[int, int]) -> list[int]:
        """Number the calls in a step, and count them."""
        if not seen.keys().isdisjoint(self.counts):
            return self._count(seen)
        seen.update(self.counts)
        return self.calls

    def _count(self, seen: dict[int, int]) -> list[int]:
        calls = []
        for site in self.sites:
            count = seen.get(site.index, 0)
            seen[site.index] = count + 1
            calls.append(count)
        return calls
