"""Where a step ends, when it is read, and what is never updated from a bad one."""

from typing import Any

import pytest
import torch
from torch import nn

import anynan
from anynan import NonFiniteError
from tests.torch_adapter.stepping import Net, batch, loss_of, same, sgd, snapshot, train


def calls(tracker: anynan.Tracker, step: int, layer: str = "first") -> list[int]:
    return [
        r.call for r in tracker.history if (r.step, r.layer, r.phase) == (step, layer, "forward")
    ]


# Where a step ends.


@pytest.mark.parametrize("read", ["immediate", "end"])
def test_a_step_ends_when_the_optimizer_steps(read: Any) -> None:
    model = Net()
    optimizer = sgd(model)
    tracker = anynan.torch.track(model, advanced=anynan.Advanced(read=read))
    for _ in range(3):
        train(model, optimizer)
    assert tracker.history.steps() == [0, 1, 2]
    for step in range(3):
        phases = [r.phase for r in tracker.history if r.step == step]
        assert phases.count("input") == 1
        assert calls(tracker, step) == [0]
        weights = [r.site.parameter for r in tracker.history if r.step == step]
        assert {"first.weight", "first.bias", "last.weight", "last.bias"} <= set(weights)


def test_without_an_optimizer_a_step_ends_at_the_call_after_a_backward() -> None:
    model = Net()
    tracker = anynan.torch.track(model)
    for i in range(3):
        loss_of(model).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
                p.grad = None
        assert tracker.history.steps() == list(range(i))
    tracker.remove()
    assert tracker.history.steps() == [0, 1, 2]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_tracked_function_may_return_a_loss_without_gradients(mode: Any) -> None:
    model = nn.Linear(2, 2)

    @anynan.torch.track
    def step(x: Any) -> Any:
        with mode():
            return model(x).sum()

    step(torch.ones(1, 2))
    assert not step.events
    with pytest.raises(NonFiniteError):
        step(torch.full((1, 2), torch.inf))


def test_validation_between_training_steps_is_its_own_step() -> None:
    model = Net()
    optimizer = sgd(model)
    tracker = anynan.torch.track(model)
    train(model, optimizer)
    with torch.no_grad():
        model(batch())
    train(model, optimizer)
    assert tracker.history.steps() == [0, 1, 2]
    by_step = [{r.phase for r in tracker.history if r.step == s} for s in range(3)]
    assert by_step == [{"input", "forward", "loss", "backward"}, {"input", "forward"}, by_step[0]]


@pytest.mark.parametrize("spoiled", [0, 1, 2])
def test_the_bad_call_of_an_accumulation_is_run_again(spoiled: int) -> None:
    class Log(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(x)

    model = nn.Sequential(Log(), nn.Linear(4, 2))
    optimizer = sgd(model)
    anynan.torch.track(model, advanced=anynan.Advanced(read="end"))
    for i in range(3):
        model(torch.full((1, 4), -1.0 if i == spoiled else 1.0)).sum().backward()
    with pytest.raises(NonFiniteError) as caught:
        optimizer.step()
    event = caught.value.event
    assert (event.layer, event.call, event.operation.name) == ("0", spoiled, "log")


def test_optimizers_that_step_in_the_backward_pass() -> None:
    model = Net()
    for p in model.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)

        def update(p: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            p.grad = None

        p.register_post_accumulate_grad_hook(update)
    tracker = anynan.torch.track(model)
    for _ in range(3):
        loss_of(model).backward()
    tracker.flush()
    assert tracker.history.steps() == [0, 1]
    backward = [r.layer for r in tracker.history if (r.step, r.phase) == (1, "backward")]
    assert {"first", "fault", "last", ""} == set(backward)
    model.fault.armed = "backward"
    before = model.first.weight.detach().clone()
    with pytest.raises(NonFiniteError) as caught:
        loss_of(model).backward()
    event = caught.value.event
    assert (event.layer, event.step, event.operation.name) == ("fault", 3, "sqrt")
    assert torch.equal(before, model.first.weight)


# Loss scaling.


class Scaled:
    """Train with a scaler, whose first scales overflow."""

    def __init__(self, scale: float = 2.0**40) -> None:
        self.model = Net()
        self.optimizer = sgd(self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)

    def step(self, factor: float = 1e28) -> None:
        self.optimizer.zero_grad()
        # float16 does not train on this processor: a large factor overflows float32 instead.
        self.scaler.scale(loss_of(self.model) * factor).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def test_somebody_elses_scaler_is_no_excuse() -> None:
    other = Scaled(scale=2.0)
    other.step(1.0)  # a scaler that is alive, and in use elsewhere
    model = Net()
    model.fault.armed = "backward"
    optimizer = sgd(model)
    before = snapshot(model)
    anynan.torch.track(model)
    with pytest.raises(NonFiniteError) as caught:
        train(model, optimizer)
    assert caught.value.event.phase == "backward"
    assert same(before, model)
    assert other.scaler.is_enabled()


# More than one backward pass.


# Activation checkpointing.
