"""What the core knows some readings by, and which calls of their layers they are."""

from collections.abc import Iterable
from typing import Self

from anynan.monitor import Monitor, Site
from anynan.tensorflow.traces import Spot


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
    def of(cls, spots: Iterable[Spot], monitor: Monitor) -> Self:
        """Find the sites of spots."""
        return cls(
            [
                monitor.site(
                    spot.layer, spot.phase, spot.tensor, spot.dtype, spot.dtype_max,
                    parameter=spot.parameter,
                )
                for spot in spots
            ]
        )  # fmt: skip

    def only(self, there: Iterable[bool]) -> "Places":
        """Leave out what is not there."""
        return Places([site for site, held in zip(self.sites, there, strict=True) if held])

    def calls_after(self, seen: dict[int, int]) -> list[int]:
        """Number the calls in a step, and count them.

        Args:
            seen: How often each site was read in the step before; is counted on.
        """
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
