"""What the core knows readings by, and how they are written into its rows."""

from typing import Any

import numpy as np

from anynan._readings.monitor import Monitor
from anynan._readings.readings import Site
from anynan._readings.step import Step
from anynan.jax.read import probes
from anynan.jax.read.spots import Spot


def sites_of(spots: list[Spot], avals: list[Any], monitor: Monitor) -> list[Site]:
    """Find the sites of spots."""
    return [
        monitor.site(
            spot.layer, spot.phase, spot.tensor, probes.dtype_name(aval),
            probes.dtype_max(aval), parameter=spot.parameter, buffer=spot.buffer,
        )
        for spot, aval in zip(spots, avals, strict=True)
    ]  # fmt: skip


def fill(rows: Step, sites: list[Site], spots: list[Spot], words: Any) -> None:
    """Append readings to a step.

    Args:
        rows: The step.
        sites: What the core knows them by.
        spots: What they are of.
        words: Word, smallest, largest and statistics of each.
    """
    low, high = words[:, 1].astype(float), words[:, 2].astype(float)
    for order in np.flatnonzero(words[:, 0]):
        low[order], high[order] = probes.read(words[order])
    first = len(rows.lo)
    rows.extend(sites, (spot.call for spot in spots), low.tolist(), high.tolist())
    for i, row in enumerate(words[:, 3:].tolist() if words.shape[1] > 3 else ()):
        rows.add_stats(first + i, row)
