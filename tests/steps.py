"""Steps and runs whose readings are written by hand."""

import math
from collections.abc import Iterable, Sequence

import anynan
from anynan._readings.history import Ring
from anynan._readings.monitor import Monitor
from anynan._readings.readings import Site
from anynan._readings.step import Step
from anynan._runs.run import Run


def step_of(number: int, *readings: tuple[Site, float, float], calls: Sequence[int] = ()) -> Step:
    """Give a step of readings: where each was taken, and its two ends."""
    rows = Step(number)
    for site, lo, hi in readings:
        rows.sites.append(site)
        rows.lo.append(lo)
        rows.hi.append(hi)
    rows.calls.extend(calls or [0] * len(readings))
    return rows


def sites_of(layers: Iterable[str], top: float = 65504.0) -> list[Site]:
    """Give the places where the outputs of layers are read."""
    monitor = Monitor(anynan.Policy(), 0)
    return [monitor.site(layer, "forward", "output", "float16", top) for layer in layers]


def run_of(layers: Sequence[str], steps: Iterable[Step]) -> Run:
    """Give a run of these steps, with nothing bad in it."""
    history = Ring(1000, math.inf)
    for step in steps:
        history.append(step)
    return Run("Net", history, tuple(layers), counts={"bad": 0, "suspect": 0, "expected": 0})
