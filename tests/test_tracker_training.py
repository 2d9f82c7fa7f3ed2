"""Threads, loss scales, updates and weights of a tracked training."""

import threading
from contextvars import copy_context
from typing import Any

import numpy as np
import pytest

import anynan
from anynan._diagnosis.lineage import Replay, Sink
from anynan._steps.record import numpy_met
from anynan.arrays.errorlog import ErrorLog
from tests.fake_adapter import adapter_of, track
from tests.fake_steps import BAD, GOOD, INF, NAN, failure, forward_only, make, one, rooted, tracked

# Threads.


def test_each_thread_counts_its_own_steps_and_shares_the_events() -> None:
    model = make()
    tracker = track(model.__call__, model=model, action="record")
    tracker(GOOD)
    tracker(GOOD)
    barrier = threading.Barrier(3)
    problems: list[BaseException] = []

    def work() -> None:
        try:
            barrier.wait(5)
            for _ in range(20):
                tracker(GOOD)
            tracker(BAD)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert problems == []
    assert [(event.step, event.times) for event in tracker.events] == [(20, 3)]
    assert tracker.step == 2
    assert len(tracker.history) == 2 + 3 * 21


# A loss scale.


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
    event = failure(tracker, [0.0, 1.0]).event
    assert (event.layer, event.phase, event.operation.name) == ("norm", "backward", "sqrt")
    assert tracker.count("expected") == 2


def test_an_overflow_at_the_floor_of_the_scale_is_bad_at_once() -> None:
    _, tracker = scaled(1.0)
    event = failure(tracker, [0.0, 1.0]).event
    assert (event.layer, event.phase) == ("norm", "backward")


# Weights.


def test_a_weight_that_an_update_spoiled_is_an_optimizer_failure_with_its_range() -> None:
    model, tracker = tracked()
    tracker(GOOD)
    tracker(GOOD)
    model.layers[3].weight = np.asarray(NAN)
    event = failure(tracker, GOOD).event
    assert (event.phase, event.layer, event.parameter) == ("optimizer", "head", "head.weight")
    assert event.since == (0, 2)
    assert event.kind == "nan"
    assert event.spread.surfaced == "forward head"


def test_a_weight_that_was_bad_before_any_update_is_a_parameter_failure() -> None:
    model = make()
    tracker = forward_only(model)
    tracker(GOOD)
    model.layers[3].weight = np.asarray(NAN)
    event = failure(tracker, GOOD).event
    assert (event.phase, event.parameter, event.since) == ("parameter", "head.weight", (0, 1))


@pytest.mark.parametrize("how", ["replay=False", "no replay possible"])
def test_a_bad_weight_is_found_without_a_replay_too(how: str) -> None:
    model = make()
    tracker = forward_only(model, replay=how != "replay=False")
    adapter_of(tracker).refusal = "cannot"
    model.layers[3].weight = np.asarray(INF)
    event = failure(tracker, GOOD).event
    assert (event.phase, event.parameter, event.kind) == ("parameter", "head.weight", "posinf")


def test_a_weight_is_not_blamed_for_a_step_that_its_own_bad_update_came_from() -> None:
    _, tracker = tracked(rooted(), read=2)
    adapter_of(tracker).refusal = "the step was over"
    tracker([0.0, 1.0])
    event = failure(tracker, [1.0, 1.0]).event
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

    def nothing(reading: Any) -> Replay:
        return Replay([], [Sink("forward", "layer", "output", (), "nan")])

    adapter_of(tracker).replay = nothing  # type: ignore[method-assign]
    model.layers[0].weight = np.asarray(NAN)
    event = failure(tracker, BAD).event
    assert (event.phase, event.parameter) == ("parameter", "layer.weight")


# What ran before a step.


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
    event = failure(tracker, [-1.0, 1.0]).event
    assert (event.layer, event.phase) == ("norm", "forward")
