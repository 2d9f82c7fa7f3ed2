"""What is only a suspect: contained origins, jumps of the gradient norm, missing values."""

from typing import Any

import pytest

import anynan
from anynan._diagnosis.lineage import Replay
from anynan._readings.readings import Reading
from anynan._steps.tracked import inside
from tests.fake_adapter import Layer, Model, adapter_of
from tests.fake_steps import BAD, INF, NAN, failure, forward_only, one, tracked

# The operation level: the watcher of a replay saw a whole step.


def seen_by_a_watcher(*operations: str, batch: Any) -> Replay:
    tracker = forward_only(one(*operations), action="record", policy=anynan.Policy(nan="suspect"))
    tracker(batch)
    adapter = adapter_of(tracker)
    site = inside(tracker).judge.monitor.site("layer", "forward", "output", "float64", None)
    return adapter.replay(Reading(0, 0, 0, site, NAN, NAN))


def test_a_contained_origin_is_shown_as_a_suspect() -> None:
    tracker = forward_only(one("copy"))
    seen = seen_by_a_watcher("log", "nan_to_num", batch=BAD)
    inside(tracker).judge.operations(inside(tracker).judge.rows(), lambda: seen)
    (event,) = tracker.events
    assert (event.severity, event.layer, event.kind) == ("suspect", "layer", "nan")
    assert event.operation.name == "log"
    assert event.cause.tag == "log_of_negative"
    assert event.notes == (
        "contained: its bad values reached no layer output, loss or gradient [contained]",
    )
    assert tracker.count("suspect") == 1


# The guard on the gradient norm.


def test_a_jump_of_the_gradient_norm_warns() -> None:
    _, tracker = tracked(one("multiply", weight=1.0), policy=anynan.Policy(spike=10))
    for _ in range(6):
        tracker([1.0])
    with pytest.warns(anynan.AnynanWarning):
        tracker([100.0])
    (event,) = tracker.events
    assert (event.kind, event.severity, event.step) == ("spike", "suspect", 6)
    assert event.cause.tag == "exploding_gradient"


def test_a_jump_that_the_policy_makes_bad_raises() -> None:
    policy = anynan.Policy(spike=10, bad=("spike",))
    model, tracker = tracked(one("multiply", weight=1.0), policy=policy)
    for _ in range(6):
        tracker([1.0])
    error = failure(tracker, [100.0])
    assert not isinstance(error, anynan.NonFiniteError)
    assert error.event.kind == "spike"
    assert model.updates == 6


# Unfit input.


# Data that holds NaN or Inf on purpose.


def test_missing_values_that_a_layer_fills_in_are_only_noted() -> None:
    _, tracker = tracked(Model(Layer("fill", ("nan_to_num",)), Layer("head", ("copy",))))
    for _ in range(3):
        tracker([1.0, NAN, INF])
    (event,) = tracker.events
    assert (event.severity, event.phase, event.kind) == ("suspect", "input", "nan")
    assert tracker.count("suspect") == 3
    assert adapter_of(tracker).replays == 0


def test_a_layer_that_hands_missing_values_on_is_not_to_blame() -> None:
    model = Model(
        Layer("scale", ("copy",)), Layer("fill", ("nan_to_num",)), Layer("head", ("copy",))
    )
    _, tracker = tracked(model)
    for _ in range(3):
        tracker([1.0, NAN])
    assert tracker.count("bad") == 0
    assert [event.phase for event in tracker.events] == ["input"]
    assert adapter_of(tracker).replays == 1


def test_data_that_a_layer_dealt_with_is_not_blamed_without_a_replay() -> None:
    model = Model(Layer("fill", ("nan_to_num",)), Layer("head", ("log",)))
    _, tracker = tracked(model, replay=False)
    event = failure(tracker, [1.0, NAN, 2.0]).event
    assert event.phase == "backward"
    assert "x came in bad, too" in event.notes[-1]


def test_a_mask_that_comes_in_is_never_blamed() -> None:
    _, tracker = tracked(one("log"), replay=False)
    event = failure(tracker, [-1.0, -INF]).event
    assert (event.layer, event.phase) == ("layer", "forward")
    assert tracker.count("suspect") == 1
