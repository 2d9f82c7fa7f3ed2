"""Layers that do nothing, and overflows that left no trace: nothing bad, and worth a line."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from anynan._readings.history import History
from anynan._readings.readings import Site
from anynan._runs.past import past

if TYPE_CHECKING:
    from numpy.typing import NDArray

FEWEST = 8  # steps, or a layer may only look dead
_WINDOW = 64


@dataclass(frozen=True, slots=True)
class Dead:
    """Name a layer all of whose outputs were one number.

    Attributes:
        layer: Layer path.
        value: The number.
        steps: In so many steps, the latest.
    """

    layer: str
    value: float
    steps: int


@dataclass(frozen=True, slots=True)
class Contained:
    """Name a layer that gave zeros only, right after something whose square overflows.

    Attributes:
        layer: Layer path.
        before: The layer whose output came before it; None for what came in.
        size: The largest magnitude there.
        dtype: Its dtype.
        step: The first step in which that was seen.
        steps: In how many.
    """

    layer: str
    before: str | None
    size: float
    dtype: str
    step: int
    steps: int = 1


def dead(history: History) -> list[Dead]:
    """List the layers that gave one and the same number throughout, in the latest steps."""
    seen = past(history, ("forward",), _WINDOW)
    if seen.steps.size < FEWEST or not len(seen.sites):
        return []
    first = seen.low[:, :1]
    same = ((seen.low == first) & (seen.high == first) & np.isfinite(first)).all(axis=1)
    found: dict[str, Dead] = {}
    alive: set[str] = set()
    for row, site in enumerate(seen.sites):
        if site.layer is None:
            continue
        if not same[row]:
            alive.add(site.layer)
        elif site.layer not in found:
            found[site.layer] = Dead(site.layer, float(seen.low[row, 0]) + 0.0, seen.steps.size)
    return [each for each in found.values() if each.layer not in alive]


@np.errstate(all="ignore")
def contained(history: History) -> list[Contained]:
    """List the layers in which an overflow seems to have ended as zeros.

    A norm of numbers whose squares overflow is infinite, and what is divided by it is zero:
    the layer's output is finite, and says nothing any more.
    """
    found: dict[str, Contained] = {}
    orders: dict[int, tuple[list[Site], NDArray[np.intp], NDArray[np.float64]]] = {}
    for entry in history.entries():
        known = orders.get(id(entry.sites))
        if known is None:
            chosen = [
                (order, site)
                for order, site in enumerate(entry.sites)
                if site.phase in ("input", "forward") and not site.bound
            ]
            roots = np.asarray([math.sqrt(site.dtype_max or math.inf) for _, site in chosen])
            places = np.asarray([order for order, _ in chosen], np.intp)
            known = orders[id(entry.sites)] = [site for _, site in chosen], places, roots
        sites, at, roots = known
        low, high = np.frombuffer(entry.lo)[at], np.frombuffer(entry.hi)[at]
        sizes = np.maximum(np.abs(low), np.abs(high))
        large = (sizes[:-1] > roots[:-1]) & np.isfinite(sizes[:-1])
        for order in np.flatnonzero(large & (low[1:] == 0) & (high[1:] == 0)).tolist():
            layer, source = sites[order + 1].layer, sites[order]
            if layer is None or sites[order + 1].phase == "input":
                continue
            if layer in found:
                found[layer] = replace(found[layer], steps=found[layer].steps + 1)
            else:
                before = None if source.phase == "input" else source.layer
                size = float(sizes[order])
                found[layer] = Contained(layer, before, size, source.dtype, entry.number)
    return list(found.values())
