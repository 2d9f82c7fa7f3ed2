"""A failed step is run again, and what that tells."""

from typing import Any

import pytest

import anynan
from anynan._diagnosis.lineage import Replay
from anynan._steps.investigator import MAX_REPLAYS
from tests.fake_adapter import Layer, Model, adapter_of, track
from tests.fake_steps import BAD, failure, forward_only, make, tracked


def test_a_failure_that_the_replay_does_not_show_is_never_called_a_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model(Layer("mask", ("where",)), Layer("soft", ("exp",)), Layer("x", ("log",)))
    tracker = forward_only(model)
    adapter = adapter_of(tracker)
    real = adapter.replay

    def other(reading: Any) -> Replay:
        seen = real(reading)
        return Replay(seen.records[:1], seen.sinks[:1])  # the mask only

    monkeypatch.setattr(adapter, "replay", other)
    monkeypatch.setattr(adapter, "_chosen", {"mask": 1, "x": 1})
    model.layers[2].operations = ("subtract", "log")  # exp(-Inf) is 0, less the largest: < 0
    event = failure(tracker, BAD).event
    assert (event.layer, event.kind, event.severity) == ("x", "nan", "bad")
    assert any("did not reproduce" in note for note in event.notes)


# Replays.


def test_the_same_failure_is_replayed_three_times_and_then_only_counted() -> None:
    tracker = forward_only(make(), action="record")
    for _ in range(5):
        tracker(BAD)
    assert adapter_of(tracker).replays == MAX_REPLAYS == 3
    (event,) = tracker.events
    assert (event.layer, event.times, event.notes) == ("blocks.0", 5, ())
    assert event.operation is not None


def test_without_replay_the_layer_is_named_and_nothing_runs_twice() -> None:
    _, tracker = tracked(replay=False)
    event = failure(tracker, BAD).event
    assert (event.layer, event.operation) == ("blocks.0", None)
    assert adapter_of(tracker).replays == 0


def test_a_replay_that_breaks_is_said_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, tracker = tracked()

    def broken(reading: Any) -> Replay:
        raise StopIteration

    monkeypatch.setattr(adapter_of(tracker), "replay", broken)
    event = failure(tracker, BAD).event
    assert (event.layer, event.kind) == ("blocks.0", "nan")
    assert any("StopIteration" in note for note in event.notes)


def test_user_code_can_tell_that_it_is_replayed() -> None:
    model = make()
    seen: list[bool] = []

    def step(batch: Any) -> Any:
        seen.append(anynan.replaying())
        return model(batch)

    failure(track(step, model=model), BAD)
    assert seen == [False, True]
    assert not anynan.replaying()


def test_a_replay_leaves_gradients_and_history_as_they_were() -> None:
    model, tracker = tracked(action="record")
    tracker(BAD)
    assert all(layer.grad is None for layer in model.layers)
    assert tracker.history.steps() == [0]
    assert model.updates == 1
