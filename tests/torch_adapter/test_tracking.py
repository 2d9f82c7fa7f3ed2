"""Every option of ``track`` does what it says, and a tracker comes and goes."""

import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Normal

import anynan
from anynan import AnynanWarning
from anynan.torch.update import updates
from tests.failing import failure
from tests.flat import split
from tests.torch_adapter.cause_parts import Body
from tests.torch_adapter.training import Fault, Net, bad, batch, hooks_on, sgd, train


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
    model = deep()
    model.left[0].fault.armed = "forward"
    tracker = anynan.torch.track(model, exclude="left", action="record")
    model(batch())
    (event,) = bad(tracker)
    assert (event.operation.name, event.spread.surfaced) == ("log", "forward right")


def test_backward_false_reads_no_gradient() -> None:
    model = Net()
    model.fault.armed = "backward"
    with anynan.torch.track(model, advanced=anynan.Advanced(backward=False)) as tracker:
        train(model, sgd(model))
    assert {reading.phase for reading in tracker.history} == {"input", "forward"}


def test_patience_skips_the_first_bad_steps_in_a_row() -> None:
    model = Net()
    optimizer = sgd(model)
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
    failure(train, model, optimizer)
    assert [(event.step, event.times) for event in bad(tracker)] == [(1, 5)]


@pytest.mark.parametrize("read", ["immediate", "end"])
def test_readings_and_stats_hold_the_true_values(read: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = batch(64)
    advanced = anynan.Advanced(stats=("mean", "rms", "norm", "absmax"), read=read)
    with anynan.torch.track(model, advanced=advanced) as tracker:
        out = model(x)
        out.square().sum().backward()
        tracker.flush()
    (reading,) = tracker.history.select("1", "forward")
    assert (reading.lo, reading.hi) == (out.min().item(), out.max().item())
    expected = [x.item() for x in (out.mean(), out.square().mean().sqrt(), out.norm())]
    assert reading.stats == pytest.approx(expected, rel=1e-5)
    assert reading.absmax == out.abs().max().item()
    (grad,) = tracker.history.select("1", "backward")
    assert grad.hi == (2 * out).max().item()
    numbers = tracker.metrics(layers=True)
    assert numbers["anynan/absmax/forward/1"] == reading.absmax
    assert numbers["anynan/rms/forward/1"] == pytest.approx(expected[1], rel=1e-5)
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


def test_pause_leaves_no_hook_and_resume_watches_again() -> None:
    model = Net()
    optimizer = sgd(model)
    tracker = anynan.torch.track(model, action="record")
    train(model, optimizer)
    tracker.pause()
    assert hooks_on(model) == 0 and not updates._handles
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


@dataclass
class Answer:
    note: str
    hidden: list[torch.Tensor]


def model_output(one: torch.Tensor, other: torch.Tensor) -> Any:
    library = pytest.importorskip("transformers.modeling_outputs")
    return library.BaseModelOutput(last_hidden_state=one, hidden_states=(one, other))


# What makes an output of two tensors, and the name of the second.
SHAPES: dict[str, tuple[Any, str]] = {
    "tensor": (lambda one, other: other, ""),
    "tuple": (lambda one, other: (one, (None, other)), "[1][1]"),
    "dict": (lambda one, other: {"count": torch.tensor(3), "logits": other}, "['logits']"),
    "dataclass": (lambda one, other: Answer("text", [one, other]), ".hidden[1]"),
    "model output": (model_output, "['hidden_states'][1]"),
    "distribution": (lambda one, other: Normal(other, 1.0, validate_args=False), ".loc"),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_outputs_of_every_shape(kind: str) -> None:
    make, name = SHAPES[kind]
    outer = nn.Sequential(Body(lambda x: make(x, torch.log(-1 - x.abs()))))
    anynan.torch.track(outer)
    event = failure(outer, batch().requires_grad_())
    assert (event.layer, event.tensor, event.operation.name) == ("0", f"output{name}", "log")


def test_positional_inputs_are_named_after_the_argument() -> None:
    class Two(nn.Module):
        def forward(self, image: torch.Tensor, extra: dict[str, torch.Tensor]) -> torch.Tensor:
            return image + extra["mask"]

    anynan.torch.track(model := Two())
    event = failure(model, batch(), {"mask": torch.full((4,), torch.nan)})
    assert event.tensor == "extra['mask']"


def test_reentrant_module() -> None:
    class Tree(nn.Linear):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            if not depth:
                return torch.log(-1 - super().forward(x).abs())
            return self(x, depth - 1) + 1

    with anynan.torch.track(model := Tree(4, 4), action="record") as tracker, torch.no_grad():
        model(batch())
    (event,) = bad(tracker)
    assert (event.layer, event.operation.name) == ("", "log")
    assert tracker.history.steps() == [0]
    assert len([r for r in tracker.history if r.phase == "input"]) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("read", ["immediate", "end"])
def test_without_gradients(mode: Any, read: Any) -> None:
    model = Net().eval()
    tracker = anynan.torch.track(model, advanced=anynan.Advanced(read=read))
    with mode():
        model(batch())
        model(batch())
        model.fault.armed = "forward"
        event = failure(model, batch())
    assert tracker.history.steps()[:2] == [0, 1]
    assert (event.layer, event.step, event.operation.name) == ("fault", 2, "log")
    # And outside inference mode again, with the same slots.
    model.fault.armed = None
    model(batch()).sum().backward()


def test_a_tracked_step_with_a_tracked_model_reports_once() -> None:
    model = Net()
    optimizer = sgd(model)
    inner = anynan.torch.track(model, action="record")
    step = anynan.torch.track(lambda: train(model, optimizer), action="record")
    step()
    model.fault.armed = "forward"
    step()
    assert len(bad(step)) + len(bad(inner)) == 1
    assert bad(step)[0].layer == "fault"
    model(batch())  # outside the step the inner tracker watches again
    assert len(bad(inner)) == 1


def test_a_step_meets_a_new_model_later() -> None:
    step = anynan.torch.track(lambda model, x: model(x), action="record")
    for armed in (False, False, True):
        model = Net()
        model.fault.armed = "forward" if armed else None
        step(model, batch())
    (event,) = bad(step)
    assert event.layer.endswith("fault") and event.step == 2


def test_wrappers_do_not_show_in_paths() -> None:
    model = nn.DataParallel(Net())
    model.module.fault.armed = "forward"
    tracker = anynan.torch.track(model, action="record")
    with warnings.catch_warnings(action="error"):
        model(batch())
    assert bad(tracker)[0].layer == "fault"
