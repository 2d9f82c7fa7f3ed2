"""A tracker's dump, metrics and report."""

import math
from typing import Any

import pytest

from anynan._steps.tracked import inside
from tests.fake_adapter import Layer, Model, track
from tests.fake_steps import BAD, GOOD, forward_only, one, tracked

# Looking back.


def test_dump_filters_by_layer_and_phase() -> None:
    _, tracker = tracked()
    tracker(GOOD)
    found = tracker.history.select("blocks", "forward")
    assert [reading.layer for reading in found] == ["blocks.0", "blocks.1"]
    found = tracker.history.select("blocks.0")
    assert {reading.phase for reading in found} == {
        "forward",
        "backward",
    }
    assert len(tracker.history.select()) == len(list(tracker.history))
    assert tracker.history.select("nowhere") == []


def test_metrics_are_flat_numbers_of_the_last_step() -> None:
    _, tracker = tracked(stats=("mean", "norm"))
    tracker([1.0, 2.0])
    tracker([1.0, 4.0])
    numbers = tracker.metrics(layers=True)
    assert all(type(value) is float for value in numbers.values())
    assert numbers["anynan/step"] == 1
    weight = inside(tracker).fn.__closure__[0].cell_contents.layers[0].weight
    assert numbers["anynan/absmax/forward/embed"] == pytest.approx(4, rel=0.1)
    assert numbers["anynan/mean/forward/embed"] == pytest.approx(2.5, rel=0.1)
    assert numbers["anynan/norm/forward/embed"] == pytest.approx(17**0.5, rel=0.1)
    assert weight is not None
    assert numbers["anynan/headroom"] == pytest.approx(1022, abs=2)
    digest = tracker.metrics()
    assert {"anynan/headroom", "anynan/step", "anynan/bad"} <= set(digest)
    assert all(name.count("/") == 1 and numbers[name] == x for name, x in digest.items())
    assert (numbers["anynan/bad"], numbers["anynan/suspect"]) == (0, 0)


@pytest.mark.parametrize("first", [True, False])
def test_metrics_tell_what_was_nan_in_one_of_two_calls(first: bool) -> None:
    model = Model(Layer("a", ("log",)))

    def step(batch: Any, other: Any) -> None:
        model(batch)
        model(other)

    pair = (BAD, GOOD) if first else (GOOD, BAD)
    tracker = track(step, model=model, action="record")
    tracker(*pair)
    numbers = tracker.metrics(layers=True)
    assert math.isnan(numbers["anynan/absmax/forward/a"])
    assert math.isnan(numbers["anynan/headroom"])


def test_headroom_is_nothing_at_an_inf_and_what_a_mask_holds_is_left_out() -> None:
    tracker = forward_only(one("exp"), action="record")
    tracker([1e4])
    assert tracker.metrics()["anynan/headroom"] == 0
    mask = forward_only(Model(Layer("mask", ("log",)), Layer("out", ("exp",))), action="record")
    mask([0.0])
    assert all(map(math.isfinite, mask.metrics(layers=True).values()))
