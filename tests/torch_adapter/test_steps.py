"""Where a step ends, when it is read, and what is never updated from a bad one."""

import contextlib
import copy
import gc
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import anynan
from anynan import AnynanWarning, NonFiniteError, Policy
from tests.torch_adapter.training import Fault, bad


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.fault = Fault()
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.fault(self.first(x)).tanh())


def batch(rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 4)


def loss_of(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(batch()).square().mean()
    return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


def calls(tracker: anynan.Tracker, step: int, layer: str = "first") -> list[int]:
    return [
        r.call for r in tracker.history if (r.step, r.layer, r.phase) == (step, layer, "forward")
    ]


def snapshot(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(before: list[torch.Tensor], model: nn.Module) -> bool:
    return all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


# Where a step ends.


@pytest.mark.parametrize("read", ["immediate", "step"])
def test_a_step_ends_when_the_optimizer_steps(read: Any) -> None:
    model = Net()
    optimizer = sgd(model)
    tracker = anynan.torch.track(model, read=read)
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


@pytest.mark.parametrize("read", ["immediate", "step"])
def test_accumulated_calls_belong_to_one_step(read: Any) -> None:
    model = Net()
    optimizer = sgd(model)
    tracker = anynan.torch.track(model, read=read)
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
    tracker = anynan.torch.track(model, read="step")
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
    anynan.torch.track(model, read="step")
    for i in range(3):
        model(torch.full((1, 4), -1.0 if i == spoiled else 1.0)).sum().backward()
    with pytest.raises(NonFiniteError) as caught:
        optimizer.step()
    event = caught.value.event
    assert event.operation is not None
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
    tracker.check()
    assert tracker.history.steps() == [0, 1]
    backward = [r.layer for r in tracker.history if (r.step, r.phase) == (1, "backward")]
    assert {"first", "fault", "last", ""} == set(backward)
    model.fault.armed = "backward"
    before = model.first.weight.detach().clone()
    with pytest.raises(NonFiniteError) as caught:
        loss_of(model).backward()
    event = caught.value.event
    assert event.operation is not None
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


@pytest.mark.parametrize("read", ["immediate", "step"])
def test_lbfgs_closure_calls_belong_to_one_step(read: Any) -> None:
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    x = batch()
    tracker = anynan.torch.track(model, read=read)

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
    assert event.operation is not None
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


@pytest.mark.parametrize("read", ["immediate", "step"])
def test_the_scaler_finds_its_scale_without_blame(read: Any) -> None:
    run = Scaled()
    tracker = anynan.torch.track(run.model, read=read)
    before = run.scaler.get_scale()
    for _ in range(12):
        run.step()
    tracker.check()
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
    assert event.operation is not None
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
    assert event.operation is not None
    assert event.operation.name == "sqrt"
    assert event.operation.source is not None
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
@pytest.mark.parametrize("read", ["immediate", "step"])
def test_recomputation_is_no_second_call(reentrant: bool, read: Any) -> None:
    model = Checkpointed(reentrant=reentrant)
    optimizer = sgd(model)
    tracker = anynan.torch.track(model, read=read)
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
@pytest.mark.parametrize("read", ["immediate", "step"])
def test_a_fault_under_checkpointing_is_named(reentrant: bool, read: Any) -> None:
    for armed, phase, word in (("forward", "forward", "log"), ("backward", "backward", "sqrt")):
        model = Checkpointed(reentrant=reentrant)
        optimizer = sgd(model)
        tracker = anynan.torch.track(model, read=read)
        train(model, optimizer)
        model.body.fault.armed = armed
        before = snapshot(model)
        with pytest.raises(NonFiniteError) as caught:
            train(model, optimizer)
        event = caught.value.event
        assert event.operation is not None
        assert (event.phase, event.layer, event.operation.name) == (phase, "body.fault", word)
        assert (event.step, event.call) == (1, 0)
        assert same(before, model)
        tracker.remove()


# Rows nobody read.


def test_unread_rows_are_warned_about_at_remove() -> None:
    model = Net()
    model.fault.armed = "forward"
    tracker = anynan.torch.track(model, read="step")
    loss_of(model)  # no backward, no update: nothing was read
    assert not tracker.events
    with pytest.warns(AnynanWarning, match="fault"):
        tracker.remove()
    assert [event.layer for event in bad(tracker)] == ["fault"]


def test_unread_rows_are_warned_about_when_the_model_goes() -> None:
    model = Net()
    model.fault.armed = "forward"
    anynan.torch.track(model, read="step")
    loss_of(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        del model
        gc.collect()
    assert any("NaN" in str(item.message) for item in said)


def test_unread_rows_of_read_every_n_are_not_lost() -> None:
    model = Net()
    optimizer = sgd(model)
    tracker = anynan.torch.track(model, read=10)
    for i in range(4):
        model.fault.armed = "backward" if i == 3 else None
        train(model, optimizer)
    assert not tracker.events
    with pytest.warns(AnynanWarning, match="step 3"):
        tracker.remove()
    assert tracker.history.steps() == [0, 1, 2, 3]


@pytest.mark.parametrize("read", ["step", 10])
def test_unread_rows_of_a_thread_that_ended(read: Any) -> None:
    model = Net()
    model.fault.armed = "forward"
    tracker = anynan.torch.track(model, read=read)
    thread = threading.Thread(target=loss_of, args=(model,))
    thread.start()
    thread.join()
    assert not tracker.events
    with pytest.warns(AnynanWarning, match="fault"):
        tracker.remove()


def test_unread_rows_at_interpreter_exit() -> None:
    code = """
        import anynan, torch
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        tracker = anynan.torch.track(model, read=100)
        with torch.no_grad():
            model(torch.full((1, 2), torch.nan))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert "AnynanWarning: NaN came in with the batch of step 0" in done.stderr


def test_a_batch_that_the_user_drops_is_a_step_of_its_own() -> None:
    model = Net()
    optimizer = sgd(model)
    tracker = anynan.torch.track(model, action="record")
    for i in range(5):
        model.fault.armed = "forward" if i in (1, 2) else None
        loss = loss_of(model)
        if not loss.isfinite():
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert [(event.step, event.times) for event in bad(tracker)] == [(1, 2)]
    assert tracker.history.steps() == [0, 1, 2, 3, 4]


def test_the_step_after_one_that_raised_is_a_new_one() -> None:
    model = Net()
    optimizer = sgd(model)
    tracker = anynan.torch.track(model)
    for i in range(4):
        model.fault.armed = {1: "forward", 2: "backward"}.get(i)
        with contextlib.suppress(NonFiniteError):
            train(model, optimizer)
    assert [event.step for event in bad(tracker)] == [1, 2]
    assert tracker.history.steps()[-1] == 3


# Weights are never updated from bad gradients.


@pytest.mark.parametrize("armed", ["forward", "backward"])
@pytest.mark.parametrize("make", [sgd, lambda m: torch.optim.AdamW(m.parameters())])
def test_deferred_rows_raise_before_the_update(
    armed: str, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    model = Net()
    optimizer = make(model)
    anynan.torch.track(model, read="step")
    train(model, optimizer)
    weights, state = snapshot(model), copy.deepcopy(optimizer.state_dict())
    model.fault.armed = armed
    optimizer.zero_grad()
    loss_of(model).backward()  # nothing is read here
    with pytest.raises(NonFiniteError) as caught:
        optimizer.step()
    assert (caught.value.event.layer, caught.value.event.phase) == ("fault", armed)
    assert same(weights, model)
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)


@pytest.mark.parametrize("read", ["immediate", "step"])
@pytest.mark.parametrize("armed", ["forward", "backward"])
def test_skip_leaves_weights_and_state_and_goes_on(read: Any, armed: str) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tracker = anynan.torch.track(model, action="skip", read=read)
    for _ in range(2):
        train(model, optimizer)
    weights, state = snapshot(model), copy.deepcopy(optimizer.state_dict())
    model.fault.armed = armed
    with pytest.warns(AnynanWarning, match="the update of this step is dropped"):
        train(model, optimizer)
    assert same(weights, model)
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)
    train(model, optimizer)  # the second in a row is dropped without another word
    assert same(weights, model)
    model.fault.armed = None
    train(model, optimizer)
    assert not same(weights, model)
    assert all(p.isfinite().all() for p in model.parameters())
    assert [(event.step, event.times) for event in bad(tracker)] == [(2, 2)]
    assert tracker.history.steps() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("read", ["immediate", "step"])
def test_skip_drops_a_whole_accumulation(read: Any) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tracker = anynan.torch.track(model, action="skip", read=read)

    def step(spoiled: int | None) -> None:
        optimizer.zero_grad()
        for i in range(3):
            model.fault.armed = "backward" if i == spoiled else None
            loss_of(model).backward()
        optimizer.step()

    step(None)
    before = snapshot(model)
    with pytest.warns(AnynanWarning):
        step(1)
    assert same(before, model)
    step(None)
    assert not same(before, model)
    assert all(p.isfinite().all() for p in model.parameters())
    assert [event.step for event in bad(tracker)] == [1]


def test_skip_in_a_tracked_step() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    @anynan.torch.track(action="skip")
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = torch.log(model(x).square().mean())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    step(batch())
    before = snapshot(model)
    model.fault.armed = "backward"
    with pytest.warns(AnynanWarning, match="dropped"):
        step(batch())
    assert same(before, model)
    model.fault.armed = None
    step(batch())
    assert not same(before, model)


def test_a_norm_that_overflows_condemns_no_gradient() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    tracker = anynan.torch.track(model)
    (loss_of(model) * 1e25).backward()
    weight = model.last.weight.grad
    assert weight is not None
    assert weight.isfinite().all()
    assert weight.norm().isinf(), "the squares overflow"
    optimizer.step()
    assert not tracker.events
    optimizer.zero_grad()
    loss_of(model).backward()
    assert model.last.bias.grad is not None
    model.last.bias.grad[1] = -torch.inf  # and what is bad is found among them
    with pytest.raises(NonFiniteError) as caught:
        optimizer.step()
    event = caught.value.event
    assert (event.parameter, event.kind, event.phase) == ("last.bias", "neginf", "backward")


# A bad update from finite gradients.


class Divide(torch.optim.Optimizer):
    """A hand-made update that divides by its own running average."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state.setdefault(p, {"average": torch.zeros_like(p)})
                    p.sub_(p.grad / state["average"])


@pytest.mark.parametrize("read", ["immediate", "step"])
@pytest.mark.parametrize("whole_step", [True, False])
def test_a_bad_update_names_parameter_gradient_and_state(read: Any, whole_step: bool) -> None:
    model = Net()
    optimizer = Divide(model.parameters())
    target: Any = (lambda: train(model, optimizer)) if whole_step else model
    tracker = anynan.torch.track(target, read=read)
    run = tracker if whole_step else lambda: train(model, optimizer)
    with pytest.raises(NonFiniteError) as caught:
        for _ in range(2):
            run()
    event = caught.value.event
    assert (event.phase, event.step) == ("optimizer", 0)
    assert event.parameter is not None
    assert event.parameter.rpartition(".")[2] in ("weight", "bias")
    assert event.since == (0, 1)
    assert event.cause is not None
    assert event.cause.tag == "optimizer_step_too_large"
    assert event.spread.surfaced is not None


@pytest.mark.parametrize("foreach", [False, True])
def test_adam_without_eps_in_half_precision(foreach: bool) -> None:
    model = nn.Linear(4, 2, bias=False).to(torch.float16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-8, foreach=foreach)
    anynan.torch.track(model, parameters=True)
    with pytest.raises(NonFiniteError) as caught:
        for _ in range(2):
            optimizer.zero_grad()
            # Gradients so small that their squares, and eps, are 0 in float16.
            (model(torch.ones(1, 4, dtype=torch.float16)) * 1e-4).sum().backward()
            optimizer.step()
    event = caught.value.event
    assert (event.phase, event.parameter, event.step) == ("optimizer", "weight", 0)
    assert event.cause is not None
    assert event.cause.tag == "optimizer_epsilon_underflow"
    assert "exp_avg_sq are 0 in float16" in event.cause.evidence


def test_parameters_true_sees_a_bad_update_at_once() -> None:
    model = Net()
    optimizer = Divide(model.parameters())
    tracker = anynan.torch.track(model, parameters=True)
    with pytest.raises(NonFiniteError) as caught:
        train(model, optimizer)
    event = caught.value.event
    assert (event.phase, event.step) == ("optimizer", 0)
    assert event.since == (0, 0)
    assert event.cause is not None
    assert "the gradient was finite" in event.cause.text
    assert "the gradient reached" in event.cause.evidence
    assert len(bad(tracker)) == 1


def test_calls_without_gradients_are_no_iterations_of_a_training() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with anynan.torch.track(model, action="record") as tracker:
        for iteration in range(4):
            with torch.no_grad():
                for _ in range(3):
                    model(torch.rand(2, 4))
            loss = model(torch.rand(2, 4)).square().mean() / (iteration != 2)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        (event,) = tracker.events
        assert (event.step, event.training_step) == (11, 2)
        assert "iteration 2 (call 11)" in anynan.render(event)
        assert anynan.Event.from_json(event.to_json()) == event
        assert "in 4 iterations and 12 calls without gradients" in tracker.report()


def test_a_program_that_takes_no_gradients_counts_its_calls() -> None:
    model = nn.Linear(4, 1)
    with anynan.torch.track(model, action="record") as tracker, torch.no_grad():
        for call in range(3):
            model(torch.full((2, 4), float("nan") if call == 2 else 1.0))
        (event,) = tracker.events
        assert (event.step, event.training_step) == (2, None)
        assert "in 3 steps" in tracker.report()
