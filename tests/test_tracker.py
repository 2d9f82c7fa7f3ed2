"""What a tracker does with readings, shown on a toy framework that the core knows nothing of."""

import functools
import inspect
import math
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import anynan
from anynan._diagnosis.evidence import ReplayError
from anynan._diagnosis.lineage import Replay, Sink
from anynan._judging import actions as acting
from anynan._judging import judge as judging_room
from anynan._readings import history as monitor_room
from anynan._readings.readings import Reading
from anynan._steps.tracker import Tracker
from anynan.options import Options
from tests.fake_adapter import Layer, Model, Output, adapter_of, lent, track

NAN, INF = float("nan"), float("inf")
GOOD, BAD = [1.0, 2.0], [1.0, -2.0]  # the model takes a logarithm


def make() -> Model:
    return Model(
        Layer("embed", ("multiply",), np.asarray(1.0)),
        Layer("blocks.0", ("log",)),
        Layer("blocks.1", ("copy",)),
        Layer("head", ("multiply",), np.asarray(0.5)),
    )


def step_of(model: Model) -> Callable[[Any], Output]:
    def step(batch: Any) -> Output:
        """Run forward, backward and the update."""
        loss = model(batch).loss()
        loss.backward()
        model.update(0.01)
        return loss

    return step


def tracked(model: Model | None = None, **options: Any) -> tuple[Model, Any]:
    model = model or make()
    return model, track(step_of(model), model=model, **options)


def rooted() -> Model:
    """Make a model whose gradient is infinite where its input is 0."""
    return Model(Layer("embed", ("multiply",), np.asarray(1.0)), Layer("norm", ("sqrt",)))


def one(*operations: str, weight: float | None = None) -> Model:
    return Model(Layer("layer", operations, None if weight is None else np.asarray(weight)))


def forward_only(model: Model, **options: Any) -> Any:
    return track(lambda batch: model(batch).loss(), model=model, **options)


def failure(call: Callable[..., Any], *args: Any) -> anynan.AnomalyError:
    with pytest.raises(anynan.AnomalyError) as caught:
        call(*args)
    return caught.value


def repeat(call: Callable[[Any], Any], argument: Any, times: int) -> None:
    for _ in range(times):
        call(argument)


@contextmanager
def silence() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", anynan.AnynanWarning)
        yield


# The story is whole without a known framework.


@pytest.mark.parametrize("read", ["auto", "immediate", "step"])
def test_the_report_names_layer_operation_line_cause_and_fix(read: Any) -> None:
    _, tracker = tracked(read=read)
    tracker(GOOD)
    error = failure(tracker, BAD)
    assert isinstance(error, anynan.NonFiniteError)
    message = str(error)
    for words in (
        "NaN first appeared in the forward pass of step 1",
        "blocks.0",
        "log",
        "test_tracker.py",
        "loss = model(batch).loss()",
        "negative",
        "fix",
        "embed 1.99",
    ):
        assert words in message, message


@pytest.mark.parametrize("read", ["auto", "step"])
def test_the_event_holds_the_same_as_data(read: Any) -> None:
    _, tracker = tracked(read=read)
    error = failure(tracker, BAD)
    event = error.event
    assert (event.backend, event.layer, event.phase, event.kind) == (
        "toy", "blocks.0", "forward", "nan",
    )  # fmt: skip
    assert (event.severity, event.step, event.call) == ("bad", 0, 0)
    assert event.operation is not None
    assert (event.operation.name, event.operation.raw) == ("log", "toy.log")
    assert event.summary is not None
    assert (event.summary.nan, event.summary.shape) == (1, (2,))
    assert event.cause is not None
    assert event.cause.tag == "log_of_negative"
    assert error.tracker is tracker
    assert tracker.events == (event,)


def test_a_clean_run_says_nothing_and_gives_what_the_function_gives() -> None:
    _, tracker = tracked()
    plain = step_of(make())
    for _ in range(3):
        assert tracker(GOOD).value == plain(GOOD).value
    assert tracker.events == ()
    assert tracker.count("bad") == tracker.count("suspect") == tracker.count("expected") == 0


def test_a_gradient_is_credited_to_the_forward_line_that_made_it() -> None:
    _, tracker = tracked(rooted())
    event = failure(tracker, [0.0, 1.0]).event
    assert (event.layer, event.phase, event.kind) == ("norm", "backward", "posinf")
    assert event.spread.surfaced == "backward embed"
    assert event.operation is not None
    assert event.operation.name == "sqrt"
    assert event.cause is not None
    assert event.cause.tag == "sqrt_gradient_at_zero"


def test_an_overflow_is_the_story_and_the_nan_it_became_is_named_beside_it() -> None:
    model = Model(Layer("wide", ("exp",)), Layer("norm", ("subtract",)))
    tracker = forward_only(model, policy=anynan.Policy(posinf="suspect"))
    event = failure(tracker, [1000.0, 1.0]).event
    assert (event.layer, event.kind) == ("wide", "posinf")
    assert event.operation is not None
    assert event.then is not None
    assert (event.operation.name, event.then.name) == ("exp", "subtract")
    assert event.spread.surfaced == "forward norm"


def test_a_bad_batch_is_named_with_its_rows() -> None:
    _, tracker = tracked()
    event = failure(tracker, [[1.0, 1.0], [NAN, 1.0], [1.0, INF]]).event
    assert (event.phase, event.tensor) == ("input", "x")
    assert event.cause is not None
    assert event.cause.tag == "bad_input"
    assert "1" in event.cause.evidence
    assert "2" in event.cause.evidence


def test_a_bad_weight_at_attach_is_refused_and_nothing_stays_hooked() -> None:
    model = make()
    model.layers[0].weight = np.asarray(NAN)
    error = failure(lambda: tracked(model))
    assert (error.event.phase, error.event.parameter) == ("parameter", "embed.weight")
    assert model.watchers == []


# Actions.


def test_raise_stops_before_the_weights_change() -> None:
    model, tracker = tracked(read="step")
    before = model.layers[0].weight
    failure(tracker, BAD)
    assert model.updates == 0
    assert model.layers[0].weight is before


def test_warn_says_the_report_and_goes_on() -> None:
    model, tracker = tracked(action="warn")
    with pytest.warns(anynan.AnynanWarning, match="NaN first appeared") as record:
        tracker(BAD)
    assert len(record) == 1
    assert model.updates == 1
    assert [event.kind for event in tracker.events] == ["nan"]


def test_record_is_silent() -> None:
    model, tracker = tracked(action="record")
    tracker(BAD)
    assert model.updates == 1
    assert tracker.count("bad") == len(tracker.events) == 1


@pytest.mark.parametrize("read", ["auto", "step"])
def test_skip_drops_the_update_of_the_bad_step_only(read: Any) -> None:
    model, tracker = tracked(action="skip", read=read)
    with pytest.warns(anynan.AnynanWarning, match="the update of this step is dropped"):
        tracker(BAD)
    assert model.updates == 0
    assert np.isfinite(model.layers[0].weight).all()  # type: ignore[arg-type]
    tracker(GOOD)
    assert model.updates == 1


def test_skip_warns_once_for_a_run_of_bad_steps() -> None:
    _, tracker = tracked(action="skip")
    with pytest.warns(anynan.AnynanWarning):
        tracker(BAD)
    tracker(BAD)
    tracker(GOOD)
    with pytest.warns(anynan.AnynanWarning):
        tracker(BAD)
    assert tracker.count("bad") == 3


def test_a_callable_gets_the_event_once_for_each_bad_step() -> None:
    seen: list[anynan.Event] = []
    tracker = forward_only(make(), action=seen.append)
    tracker(BAD)
    tracker(GOOD)
    tracker(BAD)
    assert [(event.step, event.layer) for event in seen] == [(0, "blocks.0"), (2, "blocks.0")]
    (event,) = tracker.events
    assert (event.times, {event.operation}) == (2, {each.operation for each in seen})


def test_what_a_callable_raises_reaches_the_user() -> None:
    def stop(event: anynan.Event) -> None:
        raise KeyError(event.layer)

    _, tracker = tracked(action=stop)
    with pytest.raises(KeyError, match=r"blocks\.0"):
        tracker(BAD)


def test_a_callable_may_remove_the_tracker() -> None:
    model = make()
    tracker: Any = None

    def leave(event: anynan.Event) -> None:
        tracker.remove()

    tracker = track(step_of(model), model=model, action=leave)
    tracker(BAD)
    assert model.watchers == []
    assert len(tracker.events) == 1
    tracker(BAD)
    assert len(tracker.events) == 1


def test_patience_skips_and_warns_first_then_acts() -> None:
    model, tracker = tracked(patience=2)
    for n in (1, 2):
        with pytest.warns(anynan.AnynanWarning, match=f"skipped {n} of 2"):
            tracker(BAD)
    assert model.updates == 0
    failure(tracker, BAD)


def test_a_good_step_renews_patience() -> None:
    _, tracker = tracked(patience=1)
    for _ in range(3):
        with pytest.warns(anynan.AnynanWarning, match="skipped 1 of 1"):
            tracker(BAD)
        tracker(GOOD)


def test_patience_holds_for_a_callable_too() -> None:
    seen: list[anynan.Event] = []
    model, tracker = tracked(patience=1, action=seen.append)
    with pytest.warns(anynan.AnynanWarning, match="skipped 1 of 1"):
        tracker(BAD)
    assert (seen, model.updates) == ([], 0)
    tracker(BAD)
    assert len(seen) == 1


# ANYNAN in the environment.


def test_off_leaves_no_hook_and_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYNAN", "off")
    model, tracker = tracked()
    assert model.watchers == []
    tracker(BAD)
    tracker.check()
    assert tracker.events == ()
    with tracker:
        pass


@pytest.mark.parametrize("action", ["raise", "skip", print])
def test_warn_in_the_environment_wins_over_the_action(
    monkeypatch: pytest.MonkeyPatch, action: Any
) -> None:
    monkeypatch.setenv("ANYNAN", " Warn ")
    model, tracker = tracked(action=action)
    with pytest.warns(anynan.AnynanWarning, match="NaN first appeared"):
        tracker(BAD)
    assert model.updates == 1


def test_record_in_the_environment_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYNAN", "record")
    _, tracker = tracked()
    tracker(BAD)
    assert tracker.count("bad") == 1


def test_raise_in_the_environment_wins_over_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYNAN", "raise")
    _, tracker = tracked(action="record")
    failure(tracker, BAD)


def test_an_unknown_word_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYNAN", "rase")
    model = make()
    with pytest.raises(ValueError, match=r"ANYNAN='rase'.*off, warn, record, raise"):
        tracked(model)
    assert model.watchers == []


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


def test_expect_excuses_no_other_kind() -> None:
    tracker = forward_only(one("exp"))
    with anynan.expect(nan=True, neginf=True):
        event = failure(tracker, [1000.0]).event
    assert event.kind == "posinf"


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


def test_a_whitelist_entry_inside_an_override_counts() -> None:
    model = Model(Layer("a", ("log",)), Layer("b", ("nan_to_num",)))
    inner = anynan.Policy(allow=(anynan.Allow("a", "nan", "known gap"),))
    tracker = forward_only(model, policy=anynan.Policy(overrides={"a": inner}))
    tracker(BAD)
    assert [event.expected for event in tracker.events] == ["known gap"]
    assert "allowed   nan in 'a': known gap" in tracker.report()


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
    assert event.operation is not None
    assert event.operation.name == "log"


def test_large_warns_once_and_goes_on() -> None:
    _, tracker = tracked(policy=anynan.Policy(large=1.5), action="raise")
    with pytest.warns(anynan.AnynanWarning) as record:
        repeat(tracker, GOOD, 3)
    layers = {event.layer for event in tracker.events}
    assert len(record) == len(tracker.events)
    assert "embed" in layers
    assert {event.kind for event in tracker.events} == {"large"}


def test_large_that_the_policy_makes_bad_raises_without_a_replay() -> None:
    _, tracker = tracked(policy=anynan.Policy(large=1.5, bad=("large",)))
    error = failure(tracker, GOOD)
    assert error.event.kind == "large"
    assert not isinstance(error, anynan.NonFiniteError)
    assert adapter_of(tracker).replays == 0


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
    assert event.operation is not None
    assert (event.layer, event.phase, event.operation.name) == ("mask", "forward", "masked_fill")


def test_a_placed_nan_that_reaches_the_loss_is_bad() -> None:
    event = failure(forward_only(one("masked_fill")), BAD).event
    assert event.operation is not None
    assert (event.layer, event.operation.name) == ("layer", "masked_fill")


def test_a_computed_neginf_is_not_taken_for_a_mask_where_the_policy_forbids_it() -> None:
    tracker = forward_only(one("log", "copy"), policy=anynan.Policy(neginf="bad"))
    event = failure(tracker, [0.0, 1.0]).event
    assert event.operation is not None
    assert (event.kind, event.operation.name) == ("neginf", "log")
    assert event.notes == ()


def test_a_placed_neginf_stays_a_mask_where_the_policy_forbids_neginf() -> None:
    model = Model(Layer("mask", ("where",)), Layer("soft", ("exp",)))
    tracker = forward_only(model, policy=anynan.Policy(neginf="bad"))
    tracker(BAD)
    assert [event.severity for event in tracker.events] == ["suspect"]


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
    assert adapter_of(tracker).replays == judging_room.MAX_REPLAYS == 3
    (event,) = tracker.events
    assert (event.layer, event.times, event.notes) == ("blocks.0", 5, ())
    assert event.operation is not None


def test_a_failure_elsewhere_is_still_replayed() -> None:
    model = Model(Layer("a", ("log",)), Layer("b", ("exp",)))
    tracker = forward_only(model, action="record")
    for _ in range(4):
        tracker(BAD)
    with lent_operations(model.layers[0], ("copy",)):
        tracker([1000.0])
    assert tracker.events[-1].operation is not None
    assert tracker.events[-1].operation.name == "exp"


@contextmanager
def lent_operations(layer: Layer, operations: tuple[str, ...]) -> Iterator[None]:
    before, layer.operations = layer.operations, operations
    try:
        yield
    finally:
        layer.operations = before


def test_without_replay_the_layer_is_named_and_nothing_runs_twice() -> None:
    _, tracker = tracked(replay=False)
    event = failure(tracker, BAD).event
    assert (event.layer, event.operation) == ("blocks.0", None)
    assert adapter_of(tracker).replays == 0


def test_a_replay_that_cannot_be_done_is_said_and_loses_nothing() -> None:
    _, tracker = tracked()
    adapter_of(tracker).refusal = "its inputs were donated"
    event = failure(tracker, BAD).event
    assert (event.layer, event.kind) == ("blocks.0", "nan")
    assert "its inputs were donated" in event.notes


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


def test_the_newest_step_is_kept_however_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_room, "HISTORY_BYTES", 1)
    _, tracker = tracked()
    tracker(GOOD)
    tracker(GOOD)
    assert tracker.history.steps() == [1]


def test_no_history_is_kept_when_none_is_wanted() -> None:
    _, tracker = tracked(history=0)
    tracker(GOOD)
    failure(tracker, BAD)
    assert len(tracker.history) == 0


def test_a_failed_step_is_in_the_history() -> None:
    _, tracker = tracked()
    failure(tracker, BAD)
    bad = [reading for reading in tracker.history if reading.kind is not None]
    assert [(reading.layer, reading.kind, reading.step) for reading in bad] == [
        ("blocks.0", "nan", 0)
    ]


def test_events_are_bounded_and_still_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acting, "MAX_EVENTS", 3)
    layers = [Layer(str(number), ("copy",)) for number in range(5)]
    tracker = forward_only(Model(*layers), action="record")
    for layer in layers:
        with lent_operations(layer, ("log",)):
            tracker(BAD)
    assert [event.layer for event in tracker.events] == ["2", "3", "4"]
    assert tracker.count("bad") == 5


def test_steps_go_on_after_a_failure() -> None:
    _, tracker = tracked()
    failure(tracker, BAD)
    tracker(GOOD)
    assert failure(tracker, BAD).event.step == 2


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
@pytest.mark.parametrize("read", ["auto", "step"])
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
    tracker = track(model.__call__, model=model, policy=policy, read="step")
    event = failure(tracker, [-1.0, 0.5]).event
    assert [r.kind for r in tracker.history.last()] == [None, "nan", None, "neginf", "neginf"]
    assert event.layer == "log"
    assert event.spread.count == 1  # the loss holds -Inf; the layer's own -Inf is a mask


# Reading later.


def test_every_n_steps_reads_then_and_finds_what_happened_before() -> None:
    model, tracker = tracked(read=3)
    tracker(GOOD)
    tracker(BAD)
    assert tracker.events == ()
    error = failure(tracker, GOOD)
    assert error.event.step == 1
    assert model.updates == 3


def test_check_reads_now() -> None:
    _, tracker = tracked(read=100)
    tracker(BAD)
    assert tracker.events == ()
    failure(tracker.check)
    tracker.check()
    assert len(tracker.events) == 1


def test_unread_rows_are_read_at_remove_and_warned_about() -> None:
    model, tracker = tracked(read=100)
    tracker(BAD)
    with pytest.warns(anynan.AnynanWarning, match="NaN first appeared"):
        tracker.remove()
    assert tracker.count("bad") == 1
    assert model.watchers == []


def test_a_with_block_applies_the_action_to_unread_rows() -> None:
    model, tracker = tracked(read=100)

    def block() -> None:
        with tracker:
            tracker(BAD)

    failure(block)
    assert model.watchers == []


def test_a_with_block_does_not_hide_the_users_own_error() -> None:
    model, tracker = tracked(read=100)

    def block() -> None:
        with tracker:
            tracker(BAD)
            msg = "mine"
            raise KeyError(msg)

    with pytest.raises(KeyError) as caught:
        block()
    assert caught.value.__notes__[0].startswith("NaN first")
    assert tracker.count("bad") == 1
    assert model.watchers == []


def test_an_unread_gradient_under_a_loss_scale_is_judged_at_remove() -> None:
    _, tracker = tracked(rooted(), read=100)
    adapter_of(tracker).scale = 1.0
    tracker([0.0, 1.0])
    with pytest.warns(anynan.AnynanWarning, match="backward"):
        tracker.remove()


# Life.


def test_remove_takes_every_hook_away_and_twice_is_safe() -> None:
    model, tracker = tracked()
    assert len(model.watchers) == 1
    tracker.remove()
    tracker.remove()
    assert model.watchers == []
    tracker(BAD)
    assert tracker.events == ()
    assert "removed" in repr(tracker)


def test_events_and_history_can_be_read_after_remove() -> None:
    _, tracker = tracked(action="record")
    tracker(BAD)
    tracker.remove()
    assert len(tracker.events) == 1
    assert tracker.dump("blocks.0")
    assert "1 bad" in tracker.report()
    assert tracker.metrics()["anynan/bad"] == 1


def test_the_with_block_removes() -> None:
    model, tracker = tracked()
    with tracker as inside:
        assert inside is tracker
        assert len(model.watchers) == 1
    assert model.watchers == []


def test_paused_sees_nothing_and_resumed_sees_again() -> None:
    model, tracker = tracked()
    tracker.pause()
    tracker.pause()
    assert model.watchers == []
    assert "paused" in repr(tracker)
    tracker(BAD)
    assert (tracker.events, len(tracker.history)) == ((), 0)
    tracker.resume()
    tracker.resume()
    assert len(model.watchers) == 1
    failure(tracker, BAD)


def test_pause_judges_what_was_not_read_yet() -> None:
    _, tracker = tracked(read=100)
    tracker(BAD)
    failure(tracker.pause)


def test_remove_while_paused_leaves_nothing() -> None:
    model, tracker = tracked()
    tracker.pause()
    tracker.remove()
    assert model.watchers == []


def test_a_tracker_that_was_removed_says_so_where_it_would_watch_nothing() -> None:
    _, tracker = tracked()
    tracker.remove()
    tracker.remove()
    for use in (tracker.resume, tracker.check, tracker.__enter__):
        with pytest.raises(RuntimeError, match=r"removed and watches nothing: track step again"):
            use()


def test_clear_forgets_events_readings_and_counts_but_keeps_watching() -> None:
    _, tracker = tracked(action="record")
    tracker(BAD)
    tracker.clear()
    assert (tracker.events, len(tracker.history), tracker.count("bad")) == ((), 0, 0)
    assert tracker.history.nbytes == 0
    tracker(BAD)
    assert [event.step for event in tracker.events] == [1]


def test_a_suspect_is_listed_again_after_clear() -> None:
    tracker = forward_only(Model(Layer("mask", ("where",)), Layer("soft", ("exp",))))
    tracker(BAD)
    tracker.clear()
    tracker(BAD)
    assert [event.kind for event in tracker.events] == ["neginf"]


def test_what_is_not_watched_is_said_once_and_listed() -> None:
    _, tracker = tracked()
    with pytest.warns(anynan.AnynanWarning, match="anynan: layer x is not watched") as record:
        repeat(tracker.judge.say, "layer x is not watched", 2)
    assert len(record) == 1
    assert tracker.notes == ("layer x is not watched",)
    assert "note      layer x is not watched" in tracker.report()


# In the function's place.


def test_a_tracker_looks_like_the_function() -> None:
    model = make()

    def train_step(batch: Any, *, rate: float = 0.1) -> Any:
        """Do one step."""
        return model(batch)

    train_step.version = 3  # type: ignore[attr-defined]
    tracker = track(train_step, model=model)
    assert tracker.fn is train_step
    assert tracker.__wrapped__ is train_step
    assert tracker.__name__ == "train_step"
    assert tracker.__doc__ == "Do one step."
    assert tracker.version == 3
    assert list(inspect.signature(tracker).parameters) == ["batch", "rate"]


def test_a_functions_own_attributes_do_not_replace_the_trackers() -> None:
    model = make()

    def train_step(batch: Any) -> Any:
        return model(batch)

    for name in ("options", "monitor", "name", "adapter", "paused", "_events"):
        setattr(train_step, name, "mine")
    tracker = track(train_step, model=model)
    failure(tracker, BAD)
    assert len(tracker.events) == 1


def test_track_without_a_target_is_a_decorator() -> None:
    model = make()

    @track(model=model, action="record")
    def step(batch: Any) -> Any:
        return model(batch)

    step(BAD)
    assert isinstance(step, anynan.Tracker)
    assert step.count("bad") == 1


def test_a_tracked_method_is_bound() -> None:
    model = make()

    class Trainer:
        rate = 0.25

        @functools.partial(track, model=model, action="record")
        def step(self, batch: Any, scale: float = 1.0) -> tuple[float, float]:
            model(batch)
            return self.rate, scale

    trainer = Trainer()
    assert trainer.step(BAD, scale=2.0) == (0.25, 2.0)
    tracker: Any = Trainer.step
    assert isinstance(tracker, anynan.Tracker)
    assert tracker.count("bad") == 1


def test_a_callable_object_can_be_tracked() -> None:
    model = make()

    class Step:
        def __call__(self, batch: Any) -> Any:
            return model(batch)

    tracker = track(Step(), model=model, action="record")
    tracker(BAD)
    assert tracker.count("bad") == 1


def test_a_tracked_step_inside_itself_is_one_step() -> None:
    model = make()
    tracker: Any = None

    def step(batch: Any, deep: int) -> Any:
        return tracker(batch, deep - 1) if deep else model(batch)

    tracker = track(step, model=model)
    tracker(GOOD, 2)
    assert tracker.history.steps() == [0]


def test_the_users_own_exception_passes_and_the_step_still_ends() -> None:
    model = make()

    def step(batch: Any) -> Any:
        model(batch)
        msg = "mine"
        raise KeyError(msg)

    tracker = track(step, model=model)
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            tracker(GOOD)
    assert tracker.history.steps() == [0, 1]


def test_the_error_crosses_processes_without_the_tracker() -> None:
    _, tracker = tracked()
    error = failure(tracker, BAD)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.event, copy.tracker, str(copy)) == (error.event, None, str(error))


# Looking back.


def test_dump_filters_by_layer_and_phase() -> None:
    _, tracker = tracked()
    tracker(GOOD)
    found = tracker.dump("blocks", "forward")
    assert [reading.layer for reading in found] == ["blocks.0", "blocks.1"]
    assert {reading.phase for reading in tracker.dump("blocks.0")} == {"forward", "backward"}
    assert len(tracker.dump()) == len(list(tracker.history))
    assert tracker.dump("nowhere") == []


def test_dump_refuses_an_unknown_phase() -> None:
    _, tracker = tracked()
    with pytest.raises(ValueError, match=r"'forwards' is unknown; choose from .*forward"):
        tracker.dump(phase="forwards")


def test_metrics_are_flat_numbers_of_the_last_step() -> None:
    _, tracker = tracked(stats=("mean", "norm"))
    tracker([1.0, 2.0])
    tracker([1.0, 4.0])
    numbers = tracker.metrics(layers=True)
    assert all(type(value) is float for value in numbers.values())
    assert numbers["anynan/step"] == 1
    weight = tracker.fn.__closure__[0].cell_contents.layers[0].weight
    assert numbers["anynan/absmax/forward/embed"] == pytest.approx(4, rel=0.1)
    assert numbers["anynan/mean/forward/embed"] == pytest.approx(2.5, rel=0.1)
    assert numbers["anynan/norm/forward/embed"] == pytest.approx(17**0.5, rel=0.1)
    assert weight is not None
    assert numbers["anynan/headroom"] == pytest.approx(1022, abs=2)
    digest = tracker.metrics()
    assert {"anynan/headroom", "anynan/step", "anynan/bad"} <= set(digest)
    assert all(name.count("/") == 1 and numbers[name] == x for name, x in digest.items())
    assert (numbers["anynan/bad"], numbers["anynan/suspect"]) == (0, 0)


def test_metrics_give_the_smallest_and_largest_value_where_asked() -> None:
    tracker = forward_only(one("copy"), stats=("min", "max"))
    tracker([-3.0, 2.0])
    numbers = tracker.metrics(layers=True)
    assert numbers["anynan/min/forward/layer"] == -3
    assert numbers["anynan/max/forward/layer"] == 2


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


def test_metrics_before_the_first_step_are_counts_only() -> None:
    _, tracker = tracked()
    assert tracker.metrics() == {"anynan/bad": 0, "anynan/suspect": 0, "anynan/expected": 0}


def test_report_tells_steps_headroom_and_events() -> None:
    _, tracker = tracked(action="record")
    assert "none yet" in tracker.report()
    tracker(GOOD)
    tracker(BAD)
    text = tracker.report()
    for words in ("anynan: step", "0 to 1", "1 bad", "headroom", "blocks.0", "bits"):
        assert words in text, text


def test_report_puts_the_tightest_layer_first_even_at_no_headroom_at_all() -> None:
    model = Model(Layer("a", ("copy",)), Layer("b", ("copy",)))
    tracker = track(lambda x: model(x).value is None, model=model)
    tracker([1.0])
    tracker([np.finfo(float).max])
    tracker([1.0])
    lines = [line for line in tracker.report().splitlines() if line.startswith("  headroom")]
    assert "0.0 bits" in lines[0]
    assert "step 1" in lines[0]


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


def test_a_failure_in_one_thread_does_not_end_anothers_step() -> None:
    model = make()
    tracker = track(model.__call__, model=model)
    caught: list[anynan.AnomalyError] = []

    def work() -> None:
        try:
            tracker(BAD)
        except anynan.AnomalyError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    tracker(GOOD)
    assert len(caught) == 1
    assert tracker.step == 1


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
    assert event.operation is not None
    assert (event.layer, event.phase, event.operation.name) == ("norm", "backward", "sqrt")
    assert tracker.count("expected") == 2


def test_a_good_step_ends_the_streak() -> None:
    _, tracker = scaled(65536.0, policy=anynan.Policy(scale_streak=2))
    for _ in range(3):
        tracker([0.0, 1.0])
        tracker([1.0, 1.0])
    assert (tracker.count("expected"), tracker.count("bad")) == (3, 0)


def test_an_overflow_at_the_floor_of_the_scale_is_bad_at_once() -> None:
    _, tracker = scaled(1.0)
    event = failure(tracker, [0.0, 1.0]).event
    assert (event.layer, event.phase) == ("norm", "backward")


def test_a_bad_forward_pass_is_not_excused_by_a_loss_scale() -> None:
    _, tracker = scaled(65536.0)
    event = failure(tracker, [-1.0, 1.0]).event
    assert (event.layer, event.phase) == ("norm", "forward")


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


def test_a_range_starts_where_the_weights_were_last_known_good() -> None:
    model = make()
    tracker = forward_only(model)
    for _ in range(4):
        tracker(GOOD)
    tracker.judge.known_clean(3)
    with lent(model, "head", NAN):
        event = failure(tracker, GOOD).event
    assert event.since == (3, 4)


def test_other_bad_weights_are_counted_and_named() -> None:
    model = make()
    tracker = forward_only(model)
    with lent(model, "head", NAN), lent(model, "embed", NAN):
        event = failure(tracker, GOOD).event
    assert event.parameter == "embed.weight"
    assert event.notes == ("1 more parameter or buffer is bad too: head.weight",)


def test_a_weight_is_not_blamed_for_a_step_that_its_own_bad_update_came_from() -> None:
    _, tracker = tracked(rooted(), read=2)
    adapter_of(tracker).refusal = "the step was over"
    tracker([0.0, 1.0])
    event = failure(tracker, [1.0, 1.0]).event
    assert (event.step, event.phase) == (0, "backward")
    assert event.notes == ("the step was over",)


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


# The operation level: the watcher of a replay saw a whole step.


def seen_by_a_watcher(*operations: str, batch: Any) -> Replay:
    tracker = forward_only(one(*operations), action="record", policy=anynan.Policy(nan="suspect"))
    tracker(batch)
    adapter = adapter_of(tracker)
    site = tracker.judge.monitor.site("layer", "forward", "output", "float64", None)
    return adapter.replay(Reading(0, 0, 0, site, NAN, NAN))


def test_a_contained_origin_is_shown_as_a_suspect() -> None:
    tracker = forward_only(one("copy"))
    seen = seen_by_a_watcher("log", "nan_to_num", batch=BAD)
    tracker.judge.operations(tracker.judge.rows(), seen)
    (event,) = tracker.events
    assert (event.severity, event.layer, event.kind) == ("suspect", "layer", "nan")
    assert event.operation is not None
    assert event.operation.name == "log"
    assert event.cause is not None
    assert event.cause.tag == "log_of_negative"
    assert event.notes == ("contained: its bad values reached no layer output, loss or gradient",)
    assert tracker.count("suspect") == 1


def test_a_harmful_origin_that_no_reading_showed_is_bad() -> None:
    tracker = forward_only(one("copy"))
    seen = seen_by_a_watcher("log", batch=BAD)
    event = failure(tracker.judge.operations, tracker.judge.rows(), seen).event
    assert event.operation is not None
    assert (event.layer, event.operation.name) == ("layer", "log")
    assert adapter_of(tracker).replays == 0


def test_what_the_watcher_saw_is_never_said_to_be_missing() -> None:
    tracker = forward_only(one("copy"), action="record")
    seen = seen_by_a_watcher("log", batch=BAD)
    for _ in range(5):
        tracker.judge.operations(tracker.judge.rows(), seen)
        tracker.judge.settle(tracker.judge.close_step())
    (event,) = tracker.events
    assert (event.notes, event.times) == ((), 5)
    assert event.operation is not None
    assert event.operation.name == "log"


def test_a_step_that_failed_already_is_not_reported_twice() -> None:
    tracker = forward_only(one("log"), action="record")
    rows = tracker.judge.rows()
    seen = seen_by_a_watcher("log", batch=BAD)
    tracker.judge.operations(rows, seen)
    tracker.judge.operations(rows, seen)
    assert tracker.count("bad") == 1


# The guard on the gradient norm.


def test_a_jump_of_the_gradient_norm_warns() -> None:
    _, tracker = tracked(one("multiply", weight=1.0), policy=anynan.Policy(spike=10))
    for _ in range(6):
        tracker([1.0])
    with pytest.warns(anynan.AnynanWarning):
        tracker([100.0])
    (event,) = tracker.events
    assert (event.kind, event.severity, event.step) == ("spike", "suspect", 6)
    assert event.cause is not None
    assert event.cause.tag == "exploding_gradient"


def test_clear_forgets_the_norms_that_a_jump_is_told_by() -> None:
    _, tracker = tracked(one("multiply", weight=1.0), policy=anynan.Policy(spike=10))
    for _ in range(6):
        tracker([1.0])
    tracker.clear()
    tracker([100.0])
    assert tracker.events == ()


def test_what_is_soft_stays_soft_around_an_inner_one() -> None:
    _, tracker = tracked(one("multiply", weight=1.0))
    with tracker.judge.softly():
        with tracker.judge.softly(on=False):
            pass
        with tracker.judge.softly():
            pass
        with pytest.warns(anynan.AnynanWarning):
            tracker([INF])
    failure(tracker, [INF])


def test_a_jump_that_the_policy_makes_bad_raises() -> None:
    policy = anynan.Policy(spike=10, bad=("spike",))
    model, tracker = tracked(one("multiply", weight=1.0), policy=policy)
    for _ in range(6):
        tracker([1.0])
    error = failure(tracker, [100.0])
    assert not isinstance(error, anynan.NonFiniteError)
    assert error.event.kind == "spike"
    assert model.updates == 6


def test_there_is_no_jump_before_there_is_a_median() -> None:
    _, tracker = tracked(one("multiply", weight=1.0), policy=anynan.Policy(spike=2))
    for x in (1.0, 100.0, 1.0, 1000.0):
        tracker([x])
    assert tracker.events == ()


def test_a_vanishing_gradient_warns() -> None:
    _, tracker = tracked(one("multiply", weight=1.0), policy=anynan.Policy(vanishing=1e-6))
    with pytest.warns(anynan.AnynanWarning):
        tracker([1e-9])
    assert [event.kind for event in tracker.events] == ["vanishing"]


def test_a_gradient_that_is_not_finite_is_no_jump() -> None:
    policy = anynan.Policy(spike=10, bad=("spike",))
    _, tracker = tracked(one("multiply", weight=1.0), policy=policy, backward=False)
    for _ in range(6):
        tracker([1.0])
    rows = tracker.judge.rows()
    tracker.judge.guard(rows, INF)
    tracker.judge.guard(rows, NAN)
    assert tracker.events == ()


def test_a_jump_can_be_allowed() -> None:
    allow = anynan.Allow("*", "spike", "the rate is warmed up")
    policy = anynan.Policy(spike=10, bad=("spike",), allow=(allow,))
    _, tracker = tracked(one("multiply", weight=1.0), policy=policy)
    for x in (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 100.0):
        tracker([x])
    assert [event.expected for event in tracker.events] == ["the rate is warmed up"]
    assert tracker.count("expected") == 1


# Unfit input.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": "block.*"}, "layers='block.*' matches no layer"),
        ({"exclude": "embd"}, "exclude='embd' matches no layer; did you mean 'embed'"),
        ({"action": "rise"}, "action='rise' is unknown; choose from raise, warn, record, skip"),
        ({"history": -1}, "history=-1 is too small: it must be at least 0"),
    ],
)
def test_unfit_options_are_refused_in_words(options: dict[str, Any], words: str) -> None:
    model = make()
    with pytest.raises(ValueError) as caught:
        tracked(model, **options)
    assert words in str(caught.value)
    assert model.watchers == []


def test_a_refused_replay_is_a_runtime_error() -> None:
    assert issubclass(ReplayError, RuntimeError)


def test_a_tracker_shows_what_its_users_need() -> None:
    names = {
        name
        for name in (*dir(Tracker), *vars(Tracker(print, Options(), "step")))
        if not name.startswith("_")
    }
    assert names == {
        *("check", "clear", "count", "dump", "events", "fn", "history", "judge", "metrics", "name"),
        *("notes", "pause", "paused", "remarks", "remove", "report", "resume", "save", "start"),
        *("step", "target", "to_html", "to_jsonl", "where"),
    }


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


def test_a_fault_of_the_models_own_is_named_beside_missing_values() -> None:
    model = Model(Layer("fill", ("nan_to_num",)), Layer("head", ("log",)))
    _, tracker = tracked(model)
    event = failure(tracker, [-1.0, NAN]).event
    assert (event.layer, event.phase) == ("head", "forward")
    assert event.operation is not None
    assert event.operation.name == "log"


def test_without_a_replay_a_bad_batch_is_named_before_what_followed() -> None:
    _, tracker = tracked(Model(Layer("head", ("copy",))), replay=False)
    event = failure(tracker, [1.0, NAN]).event
    assert (event.phase, event.tensor, event.operation) == ("input", "x", None)
    assert "is inferred" in event.notes[0]


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


def test_a_large_input_that_the_policy_makes_bad_is_the_batchs() -> None:
    policy = anynan.Policy(large=5, bad=("large",))
    _, tracker = tracked(one("copy"), policy=policy)
    event = failure(tracker, [1.0, 9.0]).event
    assert (event.phase, event.kind, event.tensor) == ("input", "large", "x")
    assert event.spread.surfaced is None


def test_a_callable_may_remove_the_tracker_in_a_step_with_missing_values() -> None:
    def remove(_: anynan.Event) -> None:
        tracker.remove()

    model = Model(Layer("fill", ("nan_to_num",)), Layer("head", ("log",)))
    _, tracker = tracked(model, action=remove, read="step")
    with silence():
        tracker([-1.0, NAN])
    assert tracker.count("bad") == 1
