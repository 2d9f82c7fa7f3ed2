"""Threads, loss scales, updates, weights and second runs of a tracked training."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import numpy as np
import pytest

import anynan
from anynan._diagnosis.lineage import Replay, Sink
from anynan._steps.investigator import MAX_REPLAYS
from anynan._steps.record import numpy_met
from anynan.arrays.errorlog import ErrorLog
from tests.fake_adapter import Layer, Model, adapter_of, track
from tests.fake_steps import BAD, GOOD, INF, NAN, event_of, forward_only, make, one, rooted, tracked


def test_each_thread_counts_its_own_steps_and_shares_the_events() -> None:
    model = make()
    tracker = track(model.__call__, model=model, action="record")
    tracker(GOOD)
    tracker(GOOD)
    barrier = threading.Barrier(3)

    def work(_: int) -> None:
        barrier.wait(5)
        for _ in range(20):
            tracker(GOOD)
        tracker(BAD)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert [(event.step, event.times) for event in tracker.events] == [(20, 3)]
    assert tracker.step == 2
    assert len(tracker.history) == 2 + 3 * 21


def scaled(scale: float, **options: Any) -> tuple[Any, Any]:
    model, tracker = tracked(rooted(), **options)
    adapter_of(tracker).scale = scale
    return model, tracker


def test_an_overflow_while_the_scale_is_found_is_expected_and_counted() -> None:
    model, tracker = scaled(65536.0)
    tracker([0.0, 1.0])
    (event,) = tracker.events
    assert (event.severity, event.phase) == ("suspect", "backward")
    assert event.expected is not None
    assert "scale now 65536" in event.expected
    assert (tracker.count("expected"), tracker.count("bad"), model.updates) == (1, 0, 0)


def test_a_streak_of_skipped_steps_is_bad_with_its_origin() -> None:
    _, tracker = scaled(65536.0, policy=anynan.Policy(scale_streak=3))
    tracker([0.0, 1.0])
    tracker([0.0, 1.0])
    event = event_of(tracker, [0.0, 1.0])
    assert (event.layer, event.phase, event.operation.name) == ("norm", "backward", "sqrt")
    assert tracker.count("expected") == 2


def test_an_overflow_at_the_floor_of_the_scale_is_bad_at_once() -> None:
    _, tracker = scaled(1.0)
    event = event_of(tracker, [0.0, 1.0])
    assert (event.layer, event.phase) == ("norm", "backward")


def test_a_weight_that_an_update_spoiled_is_an_optimizer_failure_with_its_range() -> None:
    model, tracker = tracked()
    tracker(GOOD)
    tracker(GOOD)
    model.layers[3].weight = np.asarray(NAN)
    event = event_of(tracker, GOOD)
    assert (event.phase, event.layer, event.parameter) == ("optimizer", "head", "head.weight")
    assert event.since == (0, 2)
    assert event.kind == "nan"
    assert event.spread.surfaced == "forward head"


def test_a_weight_that_was_bad_before_any_update_is_a_parameter_failure() -> None:
    model = make()
    tracker = forward_only(model)
    tracker(GOOD)
    model.layers[3].weight = np.asarray(NAN)
    event = event_of(tracker, GOOD)
    assert (event.phase, event.parameter, event.since) == ("parameter", "head.weight", (0, 1))


@pytest.mark.parametrize("replay", [True, False])
def test_a_bad_weight_is_found_without_a_replay_too(replay: bool) -> None:
    model = make()
    tracker = forward_only(model, replay=replay)
    adapter_of(tracker).refusal = "cannot"
    model.layers[3].weight = np.asarray(INF)
    event = event_of(tracker, GOOD)
    assert (event.phase, event.parameter, event.kind) == ("parameter", "head.weight", "posinf")


def test_a_weight_is_not_blamed_for_a_step_that_its_own_bad_update_came_from() -> None:
    _, tracker = tracked(rooted(), read=2)
    adapter_of(tracker).refusal = "the step was over"
    tracker([0.0, 1.0])
    event = event_of(tracker, [1.0, 1.0])
    assert (event.step, event.phase) == (0, "backward")
    assert event.notes == ("the step was over [no-second-run]",)


def test_an_update_from_gradients_known_to_be_bad_is_not_blamed_on_the_optimizer() -> None:
    _, tracker = tracked(rooted(), action="record")
    tracker([0.0, 1.0])
    tracker([1.0, 1.0])
    first, second = tracker.events
    assert (first.phase, first.step) == ("backward", 0)
    assert (second.phase, second.parameter, second.step) == ("parameter", "embed.weight", 1)


def test_a_bad_weight_that_a_layer_gives_out_unchanged_is_named() -> None:
    model = one("log", weight=1.0)
    tracker = forward_only(model)
    nothing = Replay([], [Sink("forward", "layer", "output", (), "nan")])
    adapter_of(tracker).replay = lambda reading: nothing  # type: ignore[method-assign]
    model.layers[0].weight = np.asarray(NAN)
    event = event_of(tracker, BAD)
    assert (event.phase, event.parameter) == ("parameter", "layer.weight")


@pytest.mark.parametrize("places", [1, 2])
def test_what_numpy_alone_met_since_a_good_update_made_what_came_in(places: int) -> None:
    _, tracker = tracked(action="record")
    with np.errstate(all="ignore"):
        log = numpy_met[0] = ErrorLog(copy_context())
    try:
        with log:
            np.log(np.zeros(1))
            tracker(GOOD)  # so this came to nothing
            batch = np.ones(2) / np.zeros(2)
            for _ in range(places - 1):
                np.exp(np.full(1, 1e6))
        tracker(batch)
    finally:
        numpy_met[0] = None
    (event,) = tracker.events
    assert (event.operation is not None and event.operation.raw == "numpy.divide") == (places == 1)
    alone, before = "NumPy met this alone", "NumPy met before this"
    assert [word in event.notes[-1] for word in (alone, before)] == [places == 1, places == 2]
    assert "used by " not in str(event)


def test_a_bad_forward_pass_is_not_excused_by_a_loss_scale() -> None:
    _, tracker = scaled(65536.0)
    event = event_of(tracker, [-1.0, 1.0])
    assert (event.layer, event.phase) == ("norm", "forward")


def test_a_failure_that_the_replay_does_not_show_is_never_called_a_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model(Layer("mask", ("where",)), Layer("soft", ("exp",)), Layer("x", ("log",)))
    tracker = forward_only(model)
    adapter = adapter_of(tracker)
    real = adapter.replay

    def the_mask(reading: Any) -> Replay:
        seen = real(reading)
        return Replay(seen.records[:1], seen.sinks[:1])

    monkeypatch.setattr(adapter, "replay", the_mask)
    monkeypatch.setattr(adapter, "_chosen", {"mask": 1, "x": 1})
    model.layers[2].operations = ("subtract", "log")  # exp(-Inf) is 0, less the largest: < 0
    event = event_of(tracker, BAD)
    assert (event.layer, event.kind, event.severity) == ("x", "nan", "bad")
    assert any("did not reproduce" in note for note in event.notes)


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
    event = event_of(tracker, BAD)
    assert (event.layer, event.operation, adapter_of(tracker).replays) == ("blocks.0", None, 0)


def test_a_replay_that_breaks_is_said_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, tracker = tracked()

    def broken(reading: Any) -> Replay:
        raise StopIteration

    monkeypatch.setattr(adapter_of(tracker), "replay", broken)
    event = event_of(tracker, BAD)
    assert (event.layer, event.kind) == ("blocks.0", "nan")
    assert any("StopIteration" in note for note in event.notes)
