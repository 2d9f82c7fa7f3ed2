"""What the readings suggest: forecasts that do not cry wolf, dead layers, contained overflows."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import anynan
from anynan._outlook.forecast import WINDOW, forecasts
from anynan._outlook.lines import outlook
from anynan._readings.history import History
from anynan._readings.monitor import Monitor
from anynan._readings.readings import Rows
from anynan._reports.run import Run, of

TOP = 16.0  # bits: of a dtype whose largest number is 2**16
LENGTH, MANY = 400, 200
NOISE = 0.25


def exponential(random: np.random.Generator, t: NDArray[Any]) -> NDArray[Any]:
    return random.uniform(2, 10) + random.uniform(0.01, 0.1) * t


def polynomial(random: np.random.Generator, t: NDArray[Any]) -> NDArray[Any]:
    grown = np.log2(1 + t / random.uniform(10, 100))
    return random.uniform(2, 10) + random.uniform(1, 4) * grown


def settling(random: np.random.Generator, t: NDArray[Any]) -> NDArray[Any]:
    start, end = random.uniform(2, 10), random.uniform(11, 15)
    return end - (end - start) * np.exp(-t / random.uniform(20, 200))


def walk(random: np.random.Generator, t: NDArray[Any]) -> NDArray[Any]:
    return random.uniform(2, 10) + np.cumsum(random.normal(0, 0.1, t.size))


def outlier(random: np.random.Generator, t: NDArray[Any]) -> NDArray[Any]:
    start = random.uniform(2, 10)
    held = np.full(t.size, start)
    held[random.integers(WINDOW, t.size)] += random.uniform(3, 15 - start)
    return held


def jump(random: np.random.Generator, t: NDArray[Any]) -> NDArray[Any]:
    start = random.uniform(2, 11)
    return np.where(t < random.integers(50, t.size - 50), start, start + random.uniform(1, 4))


def steady(random: np.random.Generator, t: NDArray[Any]) -> NDArray[Any]:
    return np.full(t.size, random.uniform(6, 14))


def history_of(sizes: NDArray[Any], every: int) -> Any:
    """Give the history as it is after each ``every`` steps; a layer is a history of its own."""
    monitor, history = Monitor(anynan.Policy(), 0), History(WINDOW, math.inf)
    names = [str(i) for i in range(len(sizes))]
    sites = [monitor.site(name, "forward", "output", "half", 2.0**TOP) for name in names]
    for step, column in enumerate(sizes.T):
        rows = Rows(step)
        rows.sites, rows.calls = sites, [0] * len(sites)
        high = np.where(column < TOP, 2.0**column, np.inf)
        rows.lo, rows.hi = (-high).tolist(), high.tolist()
        history.append(rows)
        if step % every == 0:
            yield step, history


def counted(kind: Any) -> tuple[int, int, float, int, int]:
    """Count overflows, those foretold, the middle lead; histories that stay below, and alarms."""
    random, t = np.random.default_rng(0), np.arange(LENGTH)
    noise = random.normal(0, NOISE, (MANY, LENGTH))
    bits = np.stack([kind(random, t) for _ in range(MANY)]) + noise
    over = np.where((bits >= TOP).any(axis=1), (bits >= TOP).argmax(axis=1), -1)
    first: dict[int, int] = {}
    for step, history in history_of(bits, 2):
        for found in forecasts(history):
            first.setdefault(int(found.layer or 0), step)
    late = [i for i in range(MANY) if over[i] > WINDOW]
    lead = [over[i] - first[i] for i in late if i in first]
    calm = [i for i in range(MANY) if over[i] < 0]
    return (
        len(late), len(lead), float(np.median(lead)) if lead else 0.0,
        len(calm), sum(i in first for i in calm),
    )  # fmt: skip


# kind: overflows, of these foretold, the middle lead in steps; calm histories, false alarms.
# A history is asked every second step: one false alarm anywhere in 400 steps counts.
COUNTS = {
    exponential: (0, 0, 0.0, 0, 0),
}


@pytest.mark.parametrize("kind", COUNTS, ids=lambda kind: kind.__name__)
def test_what_a_forecast_finds_and_how_often_it_is_wrong(kind: Any) -> None:
    assert counted(kind) == COUNTS[kind]
