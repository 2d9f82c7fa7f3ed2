"""A tracker reads, pauses, ends, keeps a bounded history and stands for what it tracks."""

import functools
import inspect
import math
from typing import Any

import pytest

import anynan
from anynan._steps import record as recording
from anynan._steps.tracked import inside
from tests.fake_adapter import Layer, Model, track
from tests.fake_steps import BAD, GOOD, event_of, failure, forward_only, make, one, tracked


def test_every_n_steps_reads_then_and_finds_what_happened_before() -> None:
    model, tracker = tracked(read=3)
    tracker(GOOD)
    tracker(BAD)
    assert tracker.events == ()
    assert event_of(tracker, GOOD).step == 1
    assert model.updates == 3


def test_unread_rows_are_read_at_remove_and_warned_about() -> None:
    model, tracker = tracked(read=100)
    tracker(BAD)
    with pytest.warns(anynan.AnynanWarning, match="NaN first appeared"):
        tracker.remove()
    assert tracker.count("bad") == 1
    assert model.watchers == []


def test_a_with_block_does_not_hide_the_users_own_error() -> None:
    model, tracker = tracked(read=100)

    def block() -> None:
        with tracker:
            tracker(BAD)
            raise KeyError

    with pytest.raises(KeyError) as caught:
        block()
    assert caught.value.__notes__[0].startswith("NaN first")
    assert tracker.count("bad") == 1
    assert model.watchers == []


def test_remove_takes_every_hook_away_and_twice_is_safe() -> None:
    model, tracker = tracked()
    assert len(model.watchers) == 1
    tracker.remove()
    tracker.remove()
    assert model.watchers == []
    tracker(BAD)
    assert tracker.events == ()
    assert "removed" in repr(tracker)
    for use in (tracker.resume, tracker.flush, tracker.__enter__):
        with pytest.raises(RuntimeError, match=r"removed and watches nothing: track step again"):
            use()


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


def test_clear_forgets_events_readings_and_counts_but_keeps_watching() -> None:
    _, tracker = tracked(action="record")
    tracker(BAD)
    tracker.clear()
    assert (tracker.events, len(tracker.history), tracker.count("bad")) == ((), 0, 0)
    assert tracker.history.nbytes == 0
    tracker(BAD)
    assert [event.step for event in tracker.events] == [1]


def test_a_tracker_looks_like_the_function() -> None:
    model = make()

    def train_step(batch: Any, *, rate: float = 0.1) -> Any:
        """Do one step."""
        return model(batch)

    train_step.version = 3  # type: ignore[attr-defined]
    tracker = track(train_step, model=model)
    assert inside(tracker).fn is tracker.__wrapped__ is train_step
    assert (tracker.__name__, tracker.__doc__) == ("train_step", "Do one step.")
    assert tracker.version == 3
    assert list(inspect.signature(tracker).parameters) == ["batch", "rate"]


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


def test_history_is_bounded_in_steps() -> None:
    _, tracker = tracked(history=3)
    for _ in range(5):
        tracker(GOOD)
    assert tracker.history.steps() == [2, 3, 4]


def test_events_are_bounded_and_still_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_EVENTS", 3)
    layers = [Layer(str(number), ("copy",)) for number in range(5)]
    tracker = forward_only(Model(*layers), action="record")
    for layer in layers:
        layer.operations = ("log",)
        tracker(BAD)
        layer.operations = ("copy",)
    assert [event.layer for event in tracker.events] == ["2", "3", "4"]
    assert tracker.count("bad") == 5


@pytest.mark.filterwarnings("ignore::anynan.AnynanWarning")
@pytest.mark.parametrize("action", ["record", "warn", "skip", print])
@pytest.mark.parametrize("read", ["auto", "end"])
def test_spread_counts_the_later_bad_readings(read: Any, action: Any) -> None:
    _, tracker = tracked(read=read, action=action, backward=False)
    tracker(BAD)
    (event,) = tracker.events
    assert event.spread.count == 4  # blocks.1, head, the gradient of head's weight and the loss


def test_spread_does_not_count_masks_and_what_is_expected() -> None:
    model = Model(Layer("log", ("log",)), Layer("fix", ("nan_to_num",)), Layer("m", ("where",)))
    policy = anynan.Policy(allow=(anynan.Allow("m", "nan", "known"),))
    tracker = track(model.__call__, model=model, policy=policy, read="end")
    event = event_of(tracker, [-1.0, 0.5])
    assert [r.kind for r in tracker.history.last()] == [None, "nan", None, "neginf", "neginf"]
    assert event.layer == "log"
    assert event.spread.count == 1  # the loss holds -Inf; the layer's own -Inf is a mask


def test_dump_filters_by_layer_and_phase() -> None:
    _, tracker = tracked()
    tracker(GOOD)
    found = tracker.history.select("blocks", "forward")
    assert [reading.layer for reading in found] == ["blocks.0", "blocks.1"]
    found = tracker.history.select("blocks.0")
    assert {reading.phase for reading in found} == {"forward", "backward"}
    assert len(tracker.history.select()) == len(list(tracker.history))
    assert tracker.history.select("nowhere") == []


def test_metrics_are_flat_numbers_of_the_last_step() -> None:
    _, tracker = tracked(stats=("mean", "norm"))
    tracker([1.0, 2.0])
    tracker([1.0, 4.0])
    numbers = tracker.metrics(layers=True)
    assert all(type(value) is float for value in numbers.values())
    assert numbers["anynan/step"] == 1
    assert numbers["anynan/absmax/forward/embed"] == pytest.approx(4, rel=0.1)
    assert numbers["anynan/mean/forward/embed"] == pytest.approx(2.5, rel=0.1)
    assert numbers["anynan/norm/forward/embed"] == pytest.approx(17**0.5, rel=0.1)
    assert numbers["anynan/headroom"] == pytest.approx(1022, abs=2)
    digest = tracker.metrics()
    assert {"anynan/headroom", "anynan/step", "anynan/bad"} <= set(digest)
    assert all(name.count("/") == 1 and numbers[name] == x for name, x in digest.items())
    assert (numbers["anynan/bad"], numbers["anynan/suspect"]) == (0, 0)


@pytest.mark.parametrize("first", [True, False])
def test_metrics_tell_what_was_nan_in_one_of_two_calls(first: bool) -> None:
    model = Model(Layer("a", ("log",)))
    tracker = track(lambda *pair: [*map(model, pair)], model=model, action="record")
    tracker(*((BAD, GOOD) if first else (GOOD, BAD)))
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
