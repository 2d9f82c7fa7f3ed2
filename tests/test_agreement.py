"""A replay is believed only as far as it agrees with the first run."""

import math
from typing import Any

import pytest

from anynan._diagnosis.agreement import CheckedPoint, divergence
from anynan._readings.monitor import Monitor
from anynan._readings.policy import Policy
from anynan._readings.step import Step
from tests.steps import step_of

INF, NAN = math.inf, math.nan


TENSOR = {"forward": "output", "backward": "grad"}


def first_run(*places: tuple[str, Any, float]) -> Step:
    monitor = Monitor(Policy(), 0)
    sites = [monitor.site(layer, at, TENSOR[at], "float32", 3e38) for layer, at, _ in places]
    return step_of(0, *((site, x, x) for site, (_, _, x) in zip(sites, places, strict=True)))


def place(layer: str, value: float, phase: Any = "forward") -> CheckedPoint:
    return CheckedPoint(layer, phase, TENSOR[phase], 0, value, value)


FIRST = first_run(("a", "forward", 3.0), ("b", "forward", NAN))
A, B = place("a", 3.0), place("b", NAN)
# What the first run saw, what the second passed, and where they part.
CASES: dict[str, tuple[Step, list[CheckedPoint], str | None]] = {
    "another kind at the failing place is a parting": (
        FIRST, [A, place("b", -INF)], "the output of b was NaN and then -Inf",
    ),
    "another magnitude on the way is a parting": (
        FIRST, [place("a", 30.0), B], "the output of a reached 3 and then 30",
    ),
    "kernels may differ a little": (FIRST, [place("a", 3.3), B], None),
    "what cancels out may differ much": (
        first_run(("a", "forward", 3e4), ("b", "forward", 1e-4), ("c", "forward", NAN)),
        [place("a", 3e4), place("b", 3e-3), place("c", NAN)], None,
    ),
    "another branch is a parting": (
        FIRST, [A, place("other", 1.0), B], "the output of other was passed in the second run only",
    ),
    "what comes behind the failing place is not compared": (FIRST, [A, B, place("c", NAN)], None),
    "places of calls that are not run again are left out": (
        first_run(("a", "forward", 3.0), ("z", "forward", 7.0), ("b", "forward", NAN)),
        [A, B], None,
    ),
    "gradients are told as such": (
        first_run(("a", "forward", 3.0), ("a", "backward", NAN)),
        [A, place("a", INF, "backward")], "the gradient at a was NaN and then +Inf",
    ),
    "a magnitude that was not read proves nothing": (
        FIRST, [CheckedPoint("a", "forward", "output", 0, INF, -INF), B], None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_two_runs_part_where_they_differ(case: str) -> None:
    rows, passed, text = CASES[case]
    assert divergence(rows, rows.reading(len(rows.lo) - 1), passed) == text
