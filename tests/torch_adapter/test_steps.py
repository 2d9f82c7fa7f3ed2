"""Where a step ends, when it is read, and what is never updated from a bad one."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import anynan
from anynan import NonFiniteError, Policy
from tests.torch_adapter.stepping import Net, batch, loss_of, same, sgd, snapshot, train
from tests.torch_adapter.training import bad


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
def test_a_call_without_gradients_is_a_step(mode: Any) -> None:
    model = Net()
    tracker = anynan.torch.track(model)
    with mode():
        for _ in range(3):
            model(batch())
    assert tracker.history.steps() == [0, 1, 2]
    assert [calls(tracker, step) for step in range(3)] == [[0]] * 3


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


@pytest.mark.parametrize("read", ["immediate", "end"])
def test_accumulated_calls_belong_to_one_step(read: Any) -> None:
    model = Net()
    optimizer = sgd(model)
    tracker = anynan.torch.track(model, advanced=anynan.Advanced(read=read))
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(3):
            loss_of(model).backward()
        optimizer.step()
    assert tracker.history.steps() == [0, 1]
    assert calls(tracker, 0) == calls(tracker, 1) == [0, 1, 2]
    backward = [
        r.call for r in tracker.history if (r.step, r.layer, r.phase) == (1, "fault", "backward")
    ]
    assert backward == [0, 1, 2]


def test_the_bad_call_of_an_accumulation_is_named() -> None:
    model = Net()
    optimizer = sgd(model)
    tracker = anynan.torch.track(model, advanced=anynan.Advanced(read="end"))
    optimizer.zero_grad()
    for i in range(3):
        model.fault.armed = "forward" if i == 1 else None
        loss_of(model).backward()
    with pytest.raises(NonFiniteError) as caught:
        optimizer.step()
    event = caught.value.event
    assert (event.layer, event.phase, event.step, event.call) == ("fault", "forward", 0, 1)
    assert "call 2" in str(caught.value)
    assert tracker.events == (event,)


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


def test_two_forwards_of_one_loss_are_one_step() -> None:
    model = Net()
    optimizer = sgd(model)
    tracker = anynan.torch.track(model)
    for _ in range(2):
        loss = loss_of(model) + loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert tracker.history.steps() == [0, 1]
    assert calls(tracker, 1) == [0, 1]


@pytest.mark.parametrize("read", ["immediate", "end"])
def test_lbfgs_closure_calls_belong_to_one_step(read: Any) -> None:
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    x = batch()
    tracker = anynan.torch.track(model, advanced=anynan.Advanced(read=read))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert tracker.history.steps() == [0, 1]
    for step in (0, 1):
        seen = calls(tracker, step)
        assert seen == list(range(len(seen)))
        assert len(seen) > 1
    before = snapshot(model)
    model.fault.armed = "backward"
    with pytest.raises(NonFiniteError) as caught:
        optimizer.step(closure)
    event = caught.value.event
    assert (event.layer, event.phase, event.step) == ("fault", "backward", 2)
    assert same(before, model), "it was read before the first update inside the step"


def test_lbfgs_in_a_tracked_step() -> None:
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    @anynan.torch.track
    def step(x: torch.Tensor) -> torch.Tensor:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        loss: torch.Tensor = optimizer.step(closure)
        return loss

    step(batch())
    model.fault.armed = "backward"
    with pytest.raises(NonFiniteError) as caught:
        step(batch())
    event = caught.value.event
    assert (event.layer, event.step, event.operation.name) == ("fault", 1, "sqrt")


def test_a_gan_critic_runs_twice_in_a_step_of_its_own_optimizer() -> None:
    critic = Net()
    optimizer = sgd(critic)
    tracker = anynan.torch.track(critic)
    for _ in range(2):
        optimizer.zero_grad()
        (loss_of(critic) - loss_of(critic)).backward()
        optimizer.step()
        # The generator's turn: the critic's gradients are not used.
        fake = batch().requires_grad_()
        critic(fake).mean().backward()
    assert calls(tracker, 1)[:2] == [0, 1]
    assert not bad(tracker)


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


@pytest.mark.parametrize("read", ["immediate", "end"])
def test_the_scaler_finds_its_scale_without_blame(read: Any) -> None:
    run = Scaled()
    tracker = anynan.torch.track(run.model, advanced=anynan.Advanced(read=read))
    before = run.scaler.get_scale()
    for _ in range(12):
        run.step()
    tracker.flush()
    assert run.scaler.get_scale() < before, "some steps overflowed"
    assert not bad(tracker)
    assert 0 < tracker.count("expected") < 12
    (reason, *_) = {event.expected for event in tracker.events}
    assert reason is not None
    assert "scale" in reason
    assert tracker.history.steps() == list(range(12))[: len(tracker.history)]
    assert len(tracker.history) >= 11


def test_a_streak_of_skipped_steps_is_bad() -> None:
    run = Scaled()
    run.model.fault.armed = "backward"
    tracker = anynan.torch.track(run.model, policy=Policy(scale_streak=3))
    for _ in range(3):
        run.step(1.0)
    with pytest.raises(NonFiniteError) as caught:
        run.step(1.0)
    event = caught.value.event
    assert event.phase == "backward"
    assert event.operation.name == "sqrt"
    assert bad(tracker) == [event]
    assert run.scaler.get_scale() < 2.0**40


def test_a_scale_at_its_floor_is_bad() -> None:
    run = Scaled(scale=2.0)
    run.model.fault.armed = "backward"
    tracker = anynan.torch.track(run.model, action="record")
    for _ in range(4):
        run.step(1.0)
    assert bad(tracker)
    assert bad(tracker)[0].phase == "backward"


def test_a_bad_forward_is_blamed_at_once_whatever_the_scaler_does() -> None:
    run = Scaled(scale=2.0)
    anynan.torch.track(run.model)
    run.step(1.0)
    run.model.fault.armed = "forward"
    with pytest.raises(NonFiniteError) as caught:
        run.step(1.0)
    assert caught.value.event.layer == "fault"


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


def test_retained_graph() -> None:
    model = Net()
    optimizer = sgd(model)
    tracker = anynan.torch.track(model)
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    train(model, optimizer)
    assert tracker.history.steps() == [0, 1]
    assert calls(tracker, 0) == [0]


def test_gradient_penalty() -> None:
    model = Net()
    optimizer = sgd(model)
    tracker = anynan.torch.track(model)

    def step() -> None:
        x = batch().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        optimizer.zero_grad()
        (grad.norm(dim=1) - 1).square().mean().backward()
        optimizer.step()

    step()
    step()
    assert tracker.history.steps() == [0, 1]
    assert not tracker.events
    model.fault.armed = "backward"
    with pytest.raises(NonFiniteError) as caught:
        step()
    event = caught.value.event
    assert event.phase == "backward"
    assert event.operation.name == "sqrt"
    assert event.operation.source.text == "return x + torch.sqrt(0 * x)"


# Activation checkpointing.


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.body = Net()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.body, self.stem(x), use_reentrant=self.reentrant)
        return out


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("read", ["immediate", "end"])
def test_recomputation_is_no_second_call(reentrant: bool, read: Any) -> None:
    model = Checkpointed(reentrant=reentrant)
    optimizer = sgd(model)
    tracker = anynan.torch.track(model, advanced=anynan.Advanced(read=read))
    for _ in range(3):
        train(model, optimizer)
    assert tracker.history.steps() == [0, 1, 2]
    for step in range(3):
        assert calls(tracker, step, "body.first") == [0]
        backward = [
            r.call
            for r in tracker.history
            if (r.step, r.layer, r.phase, r.site.tensor) == (step, "body.fault", "backward", "grad")
        ]
        assert backward == [0], "its gradient is read, once"


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("read", ["immediate", "end"])
def test_a_fault_under_checkpointing_is_named(reentrant: bool, read: Any) -> None:
    for armed, phase, word in (("forward", "forward", "log"), ("backward", "backward", "sqrt")):
        model = Checkpointed(reentrant=reentrant)
        optimizer = sgd(model)
        tracker = anynan.torch.track(model, advanced=anynan.Advanced(read=read))
        train(model, optimizer)
        model.body.fault.armed = armed
        before = snapshot(model)
        with pytest.raises(NonFiniteError) as caught:
            train(model, optimizer)
        event = caught.value.event
        assert (event.phase, event.layer, event.operation.name) == (phase, "body.fault", word)
        assert (event.step, event.call) == (1, 0)
        assert same(before, model)
        tracker.remove()
