"""A tracker's history, counts and numbers are bounded and can be read."""

from typing import Any

import pytest

import anynan
from anynan._readings import history as monitor_room
from anynan._steps import record as recording
from tests.fake_adapter import Layer, Model, adapter_of, track
from tests.fake_steps import BAD, GOOD, failure, forward_only, lent_operations, silence, tracked

# Steps and what is kept.


def test_history_is_bounded_in_steps() -> None:
    _, tracker = tracked(history=3)
    for _ in range(5):
        tracker(GOOD)
    assert tracker.history.steps() == [2, 3, 4]
    assert len(tracker.history) == 3
    assert {reading.step for reading in tracker.history} == {2, 3, 4}


def test_history_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    _, tracker = tracked()
    tracker(GOOD)
    size = tracker.history.nbytes
    monkeypatch.setattr(monitor_room, "HISTORY_BYTES", 2 * size)
    for _ in range(5):
        tracker(GOOD)
    assert tracker.history.steps() == [4, 5]
    assert tracker.history.nbytes == 2 * size


def test_events_are_bounded_and_still_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_EVENTS", 3)
    layers = [Layer(str(number), ("copy",)) for number in range(5)]
    tracker = forward_only(Model(*layers), action="record")
    for layer in layers:
        with lent_operations(layer, ("log",)):
            tracker(BAD)
    assert [event.layer for event in tracker.events] == ["2", "3", "4"]
    assert tracker.count("bad") == 5


def test_a_layer_called_twice_is_told_apart_by_call() -> None:
    model = Model(Layer("a", ("log",)))

    def step(batch: Any) -> Any:
        first = model(batch)
        return model(first.value)

    def count(name: str, x: Any) -> None:
        """Keep counting calls over root calls of one step."""

    tracker = track(step, model=model)
    adapter_of(tracker).entered = count  # type: ignore[method-assign]
    event = failure(tracker, [0.5, 2.0]).event
    assert (event.layer, event.kind) == ("a", "nan")
    last = tracker.history.last()
    assert [reading.call for reading in last if reading.layer == "a"] == [0, 1]


@pytest.mark.parametrize("action", ["record", "warn", "skip", print])
@pytest.mark.parametrize("read", ["auto", "end"])
def test_spread_counts_the_later_bad_readings(read: Any, action: Any) -> None:
    _, tracker = tracked(read=read, action=action, backward=False)
    with silence():
        tracker(BAD)
    (event,) = tracker.events
    # blocks.1, head, the gradient of head's weight and the loss.
    assert event.spread.count == 4


def test_spread_does_not_count_masks_and_what_is_expected() -> None:
    model = Model(Layer("log", ("log",)), Layer("fix", ("nan_to_num",)), Layer("m", ("where",)))
    policy = anynan.Policy(allow=(anynan.Allow("m", "nan", "known"),))
    tracker = track(
        model.__call__, model=model, policy=policy, advanced=anynan.Advanced(read="end")
    )
    event = failure(tracker, [-1.0, 0.5]).event
    assert [r.kind for r in tracker.history.last()] == [None, "nan", None, "neginf", "neginf"]
    assert event.layer == "log"
    assert event.spread.count == 1  # the loss holds -Inf; the layer's own -Inf is a mask
