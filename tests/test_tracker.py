"""What a tracker does with readings, shown on a toy framework that the core knows nothing of."""

from typing import Any

import numpy as np
import pytest

import anynan
from tests.fake_adapter import Layer, Model
from tests.fake_steps import BAD, GOOD, event_of, failure, forward_only, make, rooted, tracked

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


def test_a_clean_run_says_nothing_and_gives_what_the_function_gives() -> None:
    (_, tracker), (_, plain) = tracked(), tracked()
    plain.remove()
    for _ in range(3):
        assert tracker(GOOD).value == plain(GOOD).value
    assert tracker.events == ()
    assert tracker.count("bad") == tracker.count("suspect") == tracker.count("expected") == 0


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
    before = model.layers[0].weight
    failure(tracker, BAD)
    assert model.updates == 0
    assert model.layers[0].weight is before


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
