"""A tracker reads, pauses, ends and stands for what it tracks."""

import functools
import inspect
import pickle
from typing import Any

import pytest

import anynan
from anynan._steps.tracked import inside
from tests.fake_adapter import track
from tests.fake_steps import BAD, GOOD, failure, make, tracked

# Reading later.


def test_every_n_steps_reads_then_and_finds_what_happened_before() -> None:
    model, tracker = tracked(read=3)
    tracker(GOOD)
    tracker(BAD)
    assert tracker.events == ()
    error = failure(tracker, GOOD)
    assert error.event.step == 1
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
            msg = "mine"
            raise KeyError(msg)

    with pytest.raises(KeyError) as caught:
        block()
    assert caught.value.__notes__[0].startswith("NaN first")
    assert tracker.count("bad") == 1
    assert model.watchers == []


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


def test_a_tracker_that_was_removed_says_so_where_it_would_watch_nothing() -> None:
    _, tracker = tracked()
    tracker.remove()
    tracker.remove()
    for use in (tracker.resume, tracker.flush, tracker.__enter__):
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


# In the function's place.


def test_a_tracker_looks_like_the_function() -> None:
    model = make()

    def train_step(batch: Any, *, rate: float = 0.1) -> Any:
        """Do one step."""
        return model(batch)

    train_step.version = 3  # type: ignore[attr-defined]
    tracker = track(train_step, model=model)
    assert inside(tracker).fn is train_step
    assert tracker.__wrapped__ is train_step
    assert tracker.__name__ == "train_step"
    assert tracker.__doc__ == "Do one step."
    assert tracker.version == 3
    assert list(inspect.signature(tracker).parameters) == ["batch", "rate"]


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
