"""A replay is believed only as far as it agrees with the first run."""

import math
from typing import Any

from anynan._diagnosis.agreement import CheckedPoint, divergence
from anynan._readings.monitor import Monitor
from anynan._readings.policy import Policy
from anynan._readings.step import Step

INF, NAN = math.inf, math.nan


def first_run(*places: tuple[str, str, float]) -> Step:
    monitor, rows = Monitor(Policy(), 0), Step(0)
    for layer, phase, value in places:
        write(monitor, rows, layer, phase, value)
    return rows


def write(monitor: Monitor, rows: Step, layer: str, phase: Any, value: float) -> None:
    tensor = "output" if phase == "forward" else "grad"
    rows.sites.append(monitor.site(layer, phase, tensor, "float32", 3e38))
    rows.calls.append(0)
    rows.lo.append(value)
    rows.hi.append(value)


def place(layer: str, value: float, phase: Any = "forward", call: int = 0) -> CheckedPoint:
    tensor = "output" if phase == "forward" else "grad"
    return CheckedPoint(layer, phase, tensor, call, value, value)


def said(rows: Step, *passed: CheckedPoint, **options: Any) -> str | None:
    return divergence(rows, rows.reading(len(rows.lo) - 1), list(passed), **options)


FIRST = first_run(("a", "forward", 3.0), ("b", "forward", NAN))


def test_the_same_places_and_kinds_agree() -> None:
    assert said(FIRST, place("a", 3.0), place("b", NAN)) is None


def test_a_replay_that_says_nothing_of_its_places_is_not_compared() -> None:
    assert said(FIRST) is None


def test_another_kind_at_the_failing_place_is_a_parting() -> None:
    text = said(FIRST, place("a", 3.0), place("b", -INF))
    assert text == "the output of b was NaN and then -Inf"


def test_another_magnitude_on_the_way_is_a_parting() -> None:
    text = said(FIRST, place("a", 30.0), place("b", NAN))
    assert text == "the output of a reached 3 and then 30"


def test_kernels_may_differ_a_little() -> None:
    assert said(FIRST, place("a", 3.3), place("b", NAN)) is None


def test_what_cancels_out_may_differ_much() -> None:
    rows = first_run(("a", "forward", 3e4), ("b", "forward", 1e-4), ("c", "forward", NAN))
    assert said(rows, place("a", 3e4), place("b", 3e-3), place("c", NAN)) is None


def test_another_branch_is_a_parting() -> None:
    text = said(FIRST, place("a", 3.0), place("other", 1.0), place("b", NAN))
    assert text == "the output of other was passed in the second run only"


def test_what_comes_behind_the_failing_place_is_not_compared() -> None:
    assert said(FIRST, place("a", 3.0), place("b", NAN), place("c", NAN)) is None


def test_places_of_calls_that_are_not_run_again_are_left_out() -> None:
    rows = first_run(("a", "forward", 3.0), ("z", "forward", 7.0), ("b", "forward", NAN))
    assert said(rows, place("a", 3.0), place("b", NAN)) is None


def test_gradients_are_told_as_such() -> None:
    rows = first_run(("a", "forward", 3.0), ("a", "backward", NAN))
    text = said(rows, place("a", 3.0), place("a", INF, "backward"))
    assert text == "the gradient at a was NaN and then +Inf"


def test_a_magnitude_that_was_not_read_proves_nothing() -> None:
    unread = CheckedPoint("a", "forward", "output", 0, INF, -INF)
    assert said(FIRST, unread, place("b", NAN)) is None


def test_several_backward_passes_may_be_one_in_the_second_run() -> None:
    rows = first_run(("a", "forward", 3.0), ("a", "backward", 1.0), ("a", "backward", NAN))
    assert said(rows, place("a", 3.0), place("a", NAN, "backward")) is None
    assert said(rows, place("a", 3.0), place("a", INF, "backward")) is not None
