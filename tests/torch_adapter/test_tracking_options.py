"""Every option of ``track`` does what it says, and a tracker comes and goes."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import anynan
from anynan import AnynanWarning, NonFiniteError
from anynan.torch.update import updates
from tests.flat import split
from tests.torch_adapter.stepping import Net, batch, hooks_on, train
from tests.torch_adapter.training import Fault, bad


def deep() -> nn.Sequential:
    return nn.Sequential(OrderedDict(left=nn.Sequential(Net()), right=nn.Linear(2, 2)))


LEFT = {"left", "left.0", "left.0.first", "left.0.fault", "left.0.last"}


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({}, {"", "right", *LEFT}),
        ({"layers": "left"}, {"left"}),
        ({"layers": "left*"}, LEFT),
        ({"layers": ["*first", "right"], "exclude": "left"}, {"right"}),
        ({"layers": lambda path, layer: isinstance(layer, Fault)}, {"left.0.fault"}),
        ({"exclude": lambda path, layer: isinstance(layer, nn.Linear | Net)}, {"", "left"}),
    ],
)
def test_layers_and_exclude_choose_what_is_read(options: Any, seen: set[str]) -> None:
    model = deep()
    with anynan.torch.track(model, **split(options)) as tracker:
        model(batch())
    assert {reading.layer for reading in tracker.history if reading.phase == "forward"} == seen


def test_a_fault_inside_a_skipped_layer_is_seen_where_it_leaves() -> None:
    model: Any = deep()
    model.left[0].fault.armed = "forward"
    tracker = anynan.torch.track(model, exclude="left", action="record")
    model(batch())
    (event,) = bad(tracker)
    assert event.operation.name == "log"
    assert event.spread.surfaced == "forward right"


def test_backward_false_reads_no_gradient() -> None:
    model = Net()
    model.fault.armed = "backward"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with anynan.torch.track(model, advanced=anynan.Advanced(backward=False)) as tracker:
        train(model, optimizer)
    assert {reading.phase for reading in tracker.history} == {"input", "forward"}


def test_raised_inside_the_failing_layer() -> None:
    model = Net()
    model.fault.armed = "forward"
    ran: list[bool] = []
    model.last.register_forward_pre_hook(lambda *_: ran.append(anynan.replaying()))
    anynan.torch.track(model)
    with pytest.raises(NonFiniteError):
        model(batch())
    assert False not in ran


def test_patience_skips_the_first_bad_steps_in_a_row() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = anynan.torch.track(model, advanced=anynan.Advanced(patience=2))
    train(model, optimizer)
    before = model.first.weight.detach().clone()
    model.fault.armed = "forward"
    for i in (1, 2):
        with pytest.warns(AnynanWarning, match=f"skipped {i} of 2 bad steps in a row"):
            train(model, optimizer)
    assert torch.equal(before, model.first.weight)
    model.fault.armed = None
    train(model, optimizer)  # a good step: the count starts again
    assert not torch.equal(before, model.first.weight)
    model.fault.armed = "forward"
    for _ in range(2):
        with pytest.warns(AnynanWarning):
            train(model, optimizer)
    with pytest.raises(NonFiniteError):
        train(model, optimizer)
    assert [(event.step, event.times) for event in bad(tracker)] == [(1, 5)]


@pytest.mark.parametrize("read", ["immediate", "end"])
def test_readings_and_stats_hold_the_true_values(read: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = batch(64)
    with anynan.torch.track(
        model, advanced=anynan.Advanced(stats=("mean", "rms", "norm", "absmax"), read=read)
    ) as tracker:
        out = model(x)
        out.square().sum().backward()
        tracker.flush()
    (reading,) = tracker.history.select("1", "forward")
    assert reading.lo == out.min().item()
    assert reading.hi == out.max().item()
    out = out.detach()
    expected = (out.mean(), out.square().mean().sqrt(), out.norm())
    assert reading.stats == pytest.approx([float(x) for x in expected], rel=1e-5)
    assert reading.absmax == out.abs().max().item()
    (grad,) = tracker.history.select("1", "backward")
    assert grad.hi == (2 * out).max().item()
    numbers = tracker.metrics(layers=True)
    assert numbers["anynan/absmax/forward/1"] == reading.absmax
    assert numbers["anynan/rms/forward/1"] == pytest.approx(float(expected[1]), rel=1e-5)
    assert all(type(value) is float for value in numbers.values())


def test_expect_covers_the_gradients_made_inside() -> None:
    model = Net()
    model.fault.armed = "backward"
    with anynan.torch.track(model) as tracker:
        with anynan.expect(nan=True, posinf=True, neginf=True, reason="a known trap"):
            loss = model(batch()).sum()
        loss.backward()
    assert not bad(tracker)
    assert {event.phase for event in tracker.events} == {"backward"}


# Coming and going.


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
