"""``track``: its forms, its options, and every shape of model it meets."""

import pytest
import torch

import anynan
from anynan import NonFiniteError
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
