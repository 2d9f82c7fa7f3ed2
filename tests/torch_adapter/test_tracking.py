"""``track``: its forms, its options, and every shape of model it meets."""

import pytest
import torch

import anynan
from anynan import AnynanWarning, NonFiniteError
from anynan._steps.tracked import inside
from anynan.torch.update import updates
from tests.torch_adapter.faults import Net, bad, batch, hooks_on, train

# The forms of track.


def test_with_block_watches_and_then_removes() -> None:
    model = Net()
    with anynan.torch.track(model) as tracker, torch.no_grad():
        model(batch())
        model.fault.armed = True
        with pytest.raises(NonFiniteError) as caught:
            model(batch())
    event = caught.value.event
    assert (event.layer, event.phase, event.kind, event.step) == ("fault", "forward", "nan", 1)
    assert caught.value.tracker is tracker
    assert bad(tracker) == [event]
    assert hooks_on(model) == 0
    model(batch())  # nobody watches any more


def test_with_block_raises_what_was_unread_at_its_end() -> None:
    model = Net()
    model.fault.armed = True
    with (
        pytest.raises(NonFiniteError, match="fault"),
        anynan.torch.track(model, advanced=anynan.Advanced(read="end", backward=False)),
    ):
        out = model(batch().requires_grad_())
        assert out.isnan().any()
    assert hooks_on(model) == 0


def test_decorator_without_options() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @anynan.torch.track
    def step(x: torch.Tensor) -> torch.Tensor:
        """Train once."""
        return train(model, optimizer, x)

    assert isinstance(step, anynan.Tracker)
    assert (step.__name__, step.__doc__) == ("step", "Train once.")
    assert torch.is_tensor(step(batch()))
    assert step.history.steps() == [0]
    model.fault.armed = True
    with pytest.raises(NonFiniteError) as caught:
        step(batch())
    assert (caught.value.event.layer, caught.value.event.step) == ("fault", 1)


def test_tracked_function_gives_back_the_original() -> None:
    def step(x: int) -> int:
        return x + 1

    tracker = anynan.torch.track(step, action="record")
    with pytest.warns(AnynanWarning, match="no module was found"):
        assert tracker(2) == 3
    assert inside(tracker).fn is step
    tracker.remove()
    assert tracker(3) == 4  # removed, it still stands in for the function


def test_remove_is_safe_twice_and_untrack_is_the_same() -> None:
    model = Net()
    tracker = anynan.torch.track(model)
    tracker.remove()
    tracker.remove()
    assert hooks_on(model) == 0
    again = anynan.torch.track(model)
    anynan.untrack(model)
    assert hooks_on(model) == 0
    assert "removed" in repr(again)
    with pytest.raises(ValueError, match="not tracked"):
        anynan.untrack(model)


def test_pause_leaves_no_hook_and_resume_watches_again() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = anynan.torch.track(model, action="record")
    train(model, optimizer)
    tracker.pause()
    assert hooks_on(model) == 0
    assert not updates._handles
    model.fault.armed = True
    model(batch())
    assert not tracker.events
    model.fault.armed = False
    tracker.resume()
    train(model, optimizer)
    assert tracker.history.steps() == [0, 1]
    model.fault.armed = True
    model(batch())
    assert [event.layer for event in bad(tracker)] == ["fault"]
