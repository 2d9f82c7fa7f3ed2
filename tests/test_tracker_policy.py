"""What a tracker calls bad, and when it is asked to excuse it."""

from typing import Any

import numpy as np

import anynan
from tests.fake_adapter import Layer, Model, adapter_of, track
from tests.fake_steps import BAD, failure, forward_only, make

# What is legitimate.


def test_expect_excuses_its_kind_and_is_counted() -> None:
    model = make()

    def step(batch: Any) -> Any:
        with anynan.expect(nan=True, reason="gaps in the sensor"):
            return model(batch)

    tracker = track(step, model=model)
    with anynan.expect(nan=True, reason="gaps in the sensor"):
        tracker(BAD)
        tracker(BAD)
    assert tracker.count("bad") == 0
    assert tracker.count("expected") > len(tracker.events) > 0
    assert {event.expected for event in tracker.events} == {"gaps in the sensor"}
    assert {event.severity for event in tracker.events} == {"suspect"}
    assert "gaps in the sensor" in tracker.report()


def test_a_whitelist_entry_excuses_its_layers_kind_and_phase_only() -> None:
    model = Model(Layer("a", ("log",)), Layer("b", ("nan_to_num",)))
    policy = anynan.Policy(allow=(anynan.Allow("a", "nan", "known gap", "forward"),))
    tracker = forward_only(model, policy=policy)
    tracker(BAD)
    assert [event.expected for event in tracker.events] == ["known gap"]
    assert "allowed   nan in 'a': known gap" in tracker.report()
    tracker.remove()
    elsewhere = anynan.Policy(allow=(anynan.Allow("b", "nan", "known gap"),))
    assert failure(forward_only(model, policy=elsewhere), BAD).event.layer == "a"


def test_an_override_makes_another_layer_stricter() -> None:
    model = Model(Layer("a", ("copy",)), Layer("b", ("copy",)))
    strict = anynan.Policy(large=10, bad=("large",))
    tracker = forward_only(model, policy=anynan.Policy(overrides={"b": strict}))
    error = failure(tracker, [100.0])
    assert not isinstance(error, anynan.NonFiniteError)
    assert (error.event.layer, error.event.kind) == ("b", "large")


# Suspects.


def test_a_suspect_is_recorded_once_and_never_raises() -> None:
    model = Model(Layer("mask", ("where",)), Layer("soft", ("exp",)))
    tracker = forward_only(model)
    for _ in range(3):
        tracker(BAD)
    assert [(event.layer, event.kind, event.severity) for event in tracker.events] == [
        ("mask", "neginf", "suspect")
    ]
    assert tracker.count("suspect") == 3


def test_a_suspect_becomes_the_origin_when_something_bad_follows() -> None:
    model = Model(Layer("logs", ("log",)), Layer("norm", ("multiply",), np.asarray(0.0)))
    event = failure(forward_only(model), [0.0, 1.0]).event
    assert (event.layer, event.kind) == ("logs", "neginf")
    assert event.spread.surfaced == "forward norm"
    assert event.operation.name == "log"


def test_only_placed_values_are_downgraded_and_not_replayed_again() -> None:
    tracker = forward_only(Model(Layer("mask", ("full",)), Layer("b", ("nan_to_num",))))
    for _ in range(4):
        tracker(BAD)
    assert adapter_of(tracker).replays == 1
    assert [(event.layer, event.severity) for event in tracker.events] == [("mask", "suspect")]
    assert "only placed values (a mask)" in tracker.report()


def test_a_placed_nan_that_leaves_its_layer_is_bad() -> None:
    model = Model(Layer("mask", ("masked_fill",)), Layer("b", ("nan_to_num",)))
    event = failure(forward_only(model), BAD).event
    assert (event.layer, event.phase, event.operation.name) == ("mask", "forward", "masked_fill")
