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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu()


class Deep(nn.Module):
    """Two blocks, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.left = Block()
        self.right = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(x)


# Options.


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({}, {"", "left", "left.inner", "left.inner.first", "right.inner.last"}),
        ({"layers": "left"}, {"left"}),
        ({"layers": "left*"}, {"left", "left.inner", "left.inner.first", "left.inner.last"}),
        (
            {"layers": ["*first", "*last"], "exclude": "left"},
            {"right.inner.first", "right.inner.last"},
        ),
        ({"layers": lambda path, layer: isinstance(layer, Fault)}, {"left.inner.fault"}),
        ({"exclude": lambda path, layer: isinstance(layer, Block)}, {""}),
    ],
)
def test_layers_and_exclude_choose_what_is_read(options: Any, seen: set[str]) -> None:
    model = Deep()
    with anynan.torch.track(model, **split(options)) as tracker:
        model(batch())
    read = {reading.layer for reading in tracker.history if reading.phase == "forward"}
    assert seen <= read
    if "layers" in options and callable(options["layers"]):
        assert read == {"left.inner.fault", "right.inner.fault"}
    if options.get("exclude") == "left":
        assert read == seen
    if options.get("layers") == "left":
        assert read == {"left"}
    if options.get("layers") == "left*":
        assert not any(path.startswith("right") for path in read)
    if callable(options.get("exclude")):
        assert read == {""}


def test_a_fault_inside_a_skipped_layer_is_seen_where_it_leaves() -> None:
    model = Deep()
    model.left.inner.fault.armed = "forward"
    tracker = anynan.torch.track(model, exclude="left", action="record")
    model(batch())
    (event,) = bad(tracker)
    assert event.operation.name == "log"
    assert event.spread.surfaced == "forward (the model itself)"


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


class Sometimes(nn.Linear):
    """A layer whose weight only matters when it runs."""

    runs = False

    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.runs else x


@pytest.mark.parametrize(("exact", "since"), [(True, (2, 3)), (False, (0, 6))])
def test_parameters_true_says_exactly_since_when(exact: bool, since: tuple[int, int]) -> None:
    model = nn.Sequential(OrderedDict(body=Net(), rarely=Sometimes()))
    optimizer = torch.optim.SGD(model.body.parameters(), lr=0.1)
    tracker = anynan.torch.track(model, advanced=anynan.Advanced(parameters=exact), action="record")
    for i in range(7):
        if i == 3:
            with torch.no_grad():
                model.rarely.weight[1, 0] = torch.nan
        model.rarely.runs = i == 6
        train(model, optimizer)
        if bad(tracker):
            break
    (event,) = bad(tracker)
    assert event.parameter == "rarely.weight"
    assert event.layer == "rarely"
    assert event.phase == "parameter" or not exact  # an update lies in between
    assert event.step == since[1]
    assert event.since == since
    assert "step" in str(tracker.report())


# Coming and going.


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
