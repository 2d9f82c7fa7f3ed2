"""How readings of a program are written into the core's step."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from anynan._readings.monitor import Monitor
from anynan._readings.readings import ProbePoint, Site
from anynan._readings.step import Step
from anynan.jax.read import probes


def sites_of(points: list[ProbePoint], avals: Iterable[Any], monitor: Monitor) -> list[Site]:
    """Find what the core knows readings by."""
    return monitor.sites_of(points, map(probes.dtype, avals))


def fill(rows: Step, sites: list[Site], points: list[ProbePoint], words: Any) -> None:
    """Append readings to a step.

    Args:
        rows: The step.
        sites: What the core knows them by.
        points: What they are of.
        words: Word, smallest, largest and statistics of each.
    """
    low, high = words[:, 1].astype(float), words[:, 2].astype(float)
    for order in np.flatnonzero(words[:, 0]):
        low[order], high[order] = probes.read(words[order])
    first = len(rows.lo)
    rows.extend(sites, (point.call for point in points), low.tolist(), high.tolist())
    for i, row in enumerate(words[:, 3:].tolist() if words.shape[1] > 3 else ()):
        rows.add_stats(first + i, row)
