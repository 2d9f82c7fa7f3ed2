"""``track``: its forms, its options, and every shape of model it meets."""

import pytest
import torch

import anynan
from anynan import NonFiniteError
from anynan.torch.update import updates
from tests.torch_adapter.stepping import Net, batch, hooks_on, train
from tests.torch_adapter.training import bad

# The forms of track.


def test_with_block_watches_and_then_removes() -> None:
    model = Net()
    with anynan.torch.track(model) as tracker, torch.no_grad():
        model(batch())
        model.fault.armed = "forward"
        with pytest.raises(NonFiniteError) as caught:
            model(batch())
    event = caught.value.event
    assert (event.layer, event.phase, event.kind, event.step) == ("fault", "forward", "nan", 1)
    assert caught.value.tracker is tracker
    assert bad(tracker) == [event]
    assert hooks_on(model) == 0
    model(batch())  # nobody watches any more


def test_pause_leaves_no_hook_and_resume_watches_again() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = anynan.torch.track(model, action="record")
    train(model, optimizer)
    tracker.pause()
    assert hooks_on(model) == 0
    assert not updates._handles
    model.fault.armed = "forward"
    model(batch())
    assert not tracker.events
    model.fault.armed = None
    tracker.resume()
    train(model, optimizer)
    assert tracker.history.steps() == [0, 1]
    model.fault.armed = "forward"
    model(batch())
    assert [event.layer for event in bad(tracker)] == ["fault"]
