"""What a tracker does with readings, shown on a toy framework that the core knows nothing of."""

from typing import Any

import numpy as np
import pytest

import anynan
from anynan._readings.readings import Reading
from anynan._steps.tracked import inside
from tests.fake_adapter import Layer, Model, adapter_of
from tests.fake_steps import BAD, GOOD, event_of, failure, forward_only, make, one, rooted, tracked

TOLD = [
    *("NaN first appeared in the forward pass of step 1", "blocks.0", "log", "fake_steps.py"),
    *("loss = model(batch).loss()", "negative", "fix", "embed: 1.99"),
]


@pytest.mark.parametrize("read", ["auto", "immediate", "end"])
def test_the_report_names_layer_operation_line_cause_and_fix(read: Any) -> None:
    _, tracker = tracked(read=read)
    tracker(GOOD)
    error: Any = failure(tracker, BAD)
    assert isinstance(error, anynan.NonFiniteError)
    assert [words for words in TOLD if words not in str(error)] == []
    assert (error.tracker, tracker.events) == (tracker, (error.event,))
    event = error.event
    assert (event.backend, event.layer, event.phase, event.kind, event.severity) == (
        "toy", "blocks.0", "forward", "nan", "bad",
    )  # fmt: skip
    assert (event.operation.raw, event.cause.tag) == ("toy.log", "log_of_negative")
    assert (event.step, event.call, event.summary.nan) == (1, 0, 1)


def test_a_gradient_is_credited_to_the_forward_line_that_made_it() -> None:
    _, tracker = tracked(rooted())
    event = event_of(tracker, [0.0, 1.0])
    assert (event.layer, event.phase, event.kind) == ("norm", "backward", "posinf")
    assert event.spread.surfaced == "backward embed"
    assert event.operation.name == "sqrt"
    assert event.cause.tag == "sqrt_gradient_at_zero"


def test_an_overflow_is_the_story_and_the_nan_it_became_is_named_beside_it() -> None:
    model = Model(Layer("wide", ("exp",)), Layer("norm", ("subtract",)))
    tracker = forward_only(model, policy=anynan.Policy(posinf="suspect"))
    event = event_of(tracker, [1000.0, 1.0])
    assert (event.layer, event.kind) == ("wide", "posinf")
    assert (event.operation.name, event.then.name) == ("exp", "subtract")
    assert event.spread.surfaced == "forward norm"


def test_a_bad_weight_at_attach_is_refused_and_nothing_stays_hooked() -> None:
    model = make()
    model.layers[0].weight = np.asarray(np.nan)
    error = failure(lambda: tracked(model))
    assert (error.event.phase, error.event.parameter) == ("parameter", "embed.weight")
    assert model.watchers == []


def test_raise_stops_before_the_weights_change() -> None:
    model, tracker = tracked(read="end")
    failure(tracker, BAD)
    assert model.updates == 0


@pytest.mark.parametrize("read", ["auto", "end"])
def test_skip_drops_the_update_of_the_bad_step_only(read: Any) -> None:
    model, tracker = tracked(action="skip", read=read)
    with pytest.warns(anynan.AnynanWarning, match="the update of this step is dropped"):
        tracker(BAD)
    assert model.updates == 0
    assert np.isfinite(model.layers[0].weight).all()  # type: ignore[arg-type]
    tracker(GOOD)
    assert model.updates == 1


def test_a_callable_gets_the_event_once_for_each_bad_step() -> None:
    seen: list[anynan.Event] = []
    tracker = forward_only(make(), action=seen.append)
    tracker(BAD)
    tracker(GOOD)
    tracker(BAD)
    assert [(event.step, event.layer) for event in seen] == [(0, "blocks.0"), (2, "blocks.0")]
    (event,) = tracker.events
    assert (event.times, {event.operation}) == (2, {each.operation for each in seen})


def test_a_callable_may_remove_the_tracker() -> None:
    def leave(event: anynan.Event) -> None:
        tracker.remove()

    model, tracker = tracked(action=leave)
    for _ in range(2):
        tracker(BAD)
        assert (model.watchers, len(tracker.events)) == ([], 1)


def test_patience_skips_and_warns_first_then_acts() -> None:
    model, tracker = tracked(patience=2)
    for n in (1, 2):
        with pytest.warns(anynan.AnynanWarning, match=f"skipped {n} of 2"):
            tracker(BAD)
    assert model.updates == 0
    failure(tracker, BAD)


def test_off_leaves_no_hook_and_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYNAN", "off")
    model, tracker = tracked()
    with tracker:
        tracker(BAD)
        tracker.flush()
    assert (model.watchers, tracker.events) == ([], ())


@pytest.mark.parametrize("action", ["raise", "skip", print])
def test_warn_in_the_environment_wins_over_the_action(
    monkeypatch: pytest.MonkeyPatch, action: Any
) -> None:
    monkeypatch.setenv("ANYNAN", " Warn ")
    model, tracker = tracked(action=action)
    with pytest.warns(anynan.AnynanWarning, match="NaN first appeared"):
        tracker(BAD)
    assert model.updates == 1


def test_expect_excuses_its_kind_and_is_counted() -> None:
    tracker = forward_only(make())
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
    assert event_of(forward_only(model, policy=elsewhere), BAD).layer == "a"


def test_an_override_makes_another_layer_stricter() -> None:
    model = Model(Layer("a", ("copy",)), Layer("b", ("copy",)))
    strict = anynan.Policy(large=10, bad=("large",))
    tracker = forward_only(model, policy=anynan.Policy(overrides={"b": strict}))
    error = failure(tracker, [100.0])
    assert not isinstance(error, anynan.NonFiniteError)
    assert (error.event.layer, error.event.kind) == ("b", "large")


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
    event = event_of(forward_only(model), [0.0, 1.0])
    assert (event.layer, event.kind, event.operation.name) == ("logs", "neginf", "log")
    assert event.spread.surfaced == "forward norm"


def test_only_placed_values_are_downgraded_and_not_replayed_again() -> None:
    tracker = forward_only(Model(Layer("mask", ("full",)), Layer("b", ("nan_to_num",))))
    for _ in range(4):
        tracker(BAD)
    assert adapter_of(tracker).replays == 1
    assert [(event.layer, event.severity) for event in tracker.events] == [("mask", "suspect")]
    assert "only placed values (a mask)" in tracker.report()


def test_a_placed_nan_that_leaves_its_layer_is_bad() -> None:
    model = Model(Layer("mask", ("masked_fill",)), Layer("b", ("nan_to_num",)))
    event = event_of(forward_only(model), BAD)
    assert (event.layer, event.phase, event.operation.name) == ("mask", "forward", "masked_fill")


def test_a_contained_origin_is_shown_as_a_suspect() -> None:
    """The watcher of a second run saw a whole step, at the level of operations."""
    other = forward_only(one("log", "nan_to_num"), action="record")
    other(BAD)
    site = inside(other).judge.monitor.site("layer", "forward", "output", "float64", None)
    seen = adapter_of(other).replay(Reading(0, 0, 0, site, np.nan, np.nan))
    tracker = forward_only(one("copy"))
    inside(tracker).judge.operations(inside(tracker).judge.rows(), lambda: seen)
    (event,) = tracker.events
    assert (event.severity, event.layer, event.kind) == ("suspect", "layer", "nan")
    assert event.operation.name == "log"
    assert event.cause.tag == "log_of_negative"
    assert event.notes == (
        "contained: its bad values reached no layer output, loss or gradient [contained]",
    )
    assert tracker.count("suspect") == 1


@pytest.mark.parametrize("bad", [(), ("spike",)])
def test_a_jump_of_the_gradient_norm_warns_or_is_bad(bad: Any) -> None:
    policy = anynan.Policy(spike=10, bad=bad)
    model, tracker = tracked(one("multiply", weight=1.0), policy=policy)
    for _ in range(6):
        tracker([1.0])
    if bad:
        assert not isinstance(failure(tracker, [100.0]), anynan.NonFiniteError)
    else:
        with pytest.warns(anynan.AnynanWarning):
            tracker([100.0])
    (event,) = tracker.events
    assert (event.kind, event.severity, event.step) == ("spike", "bad" if bad else "suspect", 6)
    assert event.cause.tag == "exploding_gradient"
    assert model.updates == (6 if bad else 7)


def test_missing_values_that_a_layer_fills_in_are_only_noted() -> None:
    _, tracker = tracked(Model(Layer("fill", ("nan_to_num",)), Layer("head", ("copy",))))
    for _ in range(3):
        tracker([1.0, np.nan, np.inf])
    (event,) = tracker.events
    assert (event.severity, event.phase, event.kind) == ("suspect", "input", "nan")
    assert tracker.count("suspect") == 3
    assert adapter_of(tracker).replays == 0


def test_a_layer_that_hands_missing_values_on_is_not_to_blame() -> None:
    _, tracker = tracked(Model(Layer("scale", ("copy",)), Layer("fill", ("nan_to_num",))))
    for _ in range(3):
        tracker([1.0, np.nan])
    assert tracker.count("bad") == 0
    assert [event.phase for event in tracker.events] == ["input"]
    assert adapter_of(tracker).replays == 1


def test_data_that_a_layer_dealt_with_is_not_blamed_without_a_replay() -> None:
    model = Model(Layer("fill", ("nan_to_num",)), Layer("head", ("log",)))
    _, tracker = tracked(model, replay=False)
    event = event_of(tracker, [1.0, np.nan, 2.0])
    assert event.phase == "backward"
    assert "x came in bad, too" in event.notes[-1]


def test_a_mask_that_comes_in_is_never_blamed() -> None:
    _, tracker = tracked(one("log"), replay=False)
    event = event_of(tracker, [-1.0, -np.inf])
    assert (event.layer, event.phase) == ("layer", "forward")
    assert tracker.count("suspect") == 1
