"""What tracking promises not to change, not to keep, and never to hide."""

import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers

import anynan
from anynan.torch.update import updates
from tests.conformance.contract import Contract, Subject
from tests.failing import failure
from tests.flat import split
from tests.torch_adapter.cause_parts import Body
from tests.torch_adapter.training import Fault, assert_same, everything, seed, small, train


class Busy(nn.Module):
    """Draw random numbers, keep statistics, and write to its own attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.attn = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.fault, self.rnn = Fault(), nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 2)
        self.calls, self.kept, self.last = 0, list[int](), torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.kept.append(self.calls)
        x = self.norm(self.stem(x)).relu()
        # Each leaves a second number for the next call.
        x = x * (random.gauss(1, 0.1) + float(np.random.standard_normal()))  # noqa: NPY002
        seq = x.unsqueeze(0)
        seq = seq + self.attn(seq, seq, seq)[0]
        seq, _ = self.rnn(self.drop(seq))
        x = self.fault(seq[0])
        self.last = x.detach()
        if not self.training:
            self.training_was = False
        return self.head(x)


class Run:
    """A few steps of training, and everything they leave behind."""

    def __init__(self, track: str | None = None, armed: str | None = None, **options: Any) -> None:
        seed()
        self.model = Busy()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", enabled=options.pop("scaled", False))
        self.losses, self.states = [], []
        step: Any = self.step
        if track is not None:
            target = self.model if track == "model" else self.step
            self.tracker = anynan.torch.track(target, **split(options))
            step = step if track == "model" else self.tracker
        for i in range(5):
            self.model.fault.armed = armed if i == 2 else None
            self.losses.append(step(torch.randn(7, 6)).detach().clone())
            self.states.append(self.state())

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def state(self) -> dict[str, Any]:
        return everything([self.model], [self.optimizer, self.scaler]) | {
            "attributes": (self.model.calls, list(self.model.kept)),
            "last": self.model.last.clone(),
            "names": [sorted(vars(module)) for module in self.model.modules()],
        }


WAYS: list[dict[str, Any]] = [{}, {"read": "end"}, {"scaled": True}, {"level": "operation"}]
STATS = {"parameters": True, "stats": ("mean", "rms", "norm")}


@pytest.mark.parametrize("track", ["model", "step"])
@pytest.mark.parametrize("options", [*WAYS, STATS], ids=str)
def test_training_is_bit_identical(track: str, options: Any) -> None:
    scaled = {k: v for k, v in options.items() if k == "scaled"}
    plain, tracked = Run(**scaled), Run(track, **options)
    assert_same(plain.losses, tracked.losses)
    assert_same(plain.states, tracked.states)
    tracked.tracker.remove()
    assert not tracked.tracker.events
    assert len(tracked.tracker.history) == 5, "it was watched"


@pytest.mark.parametrize("track", ["model", "step"])
@pytest.mark.parametrize("armed", ["forward", "backward"])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_replay_leaves_no_trace(track: str, armed: str, options: Any) -> None:
    scaled = {k: v for k, v in options.items() if k == "scaled"}
    plain, tracked = Run(None, armed, **scaled), Run(track, armed, action="record", **options)
    tracked.tracker.flush()
    assert_same(plain.states, tracked.states)
    events = tracked.tracker.events
    assert events
    if not scaled or armed == "forward":  # there was a replay, or a watched step
        assert events[0].operation.name == {"forward": "log", "backward": "sqrt"}[armed]
        assert events[0].tried is not None or "level" in options, "and a fix was tried in it"
    assert torch.autograd.backward.__module__ == "torch.autograd"
    assert torch.amp.GradScaler.step.__qualname__ == "GradScaler.step"


def bare_hands(tracker: Any) -> Any:
    """Update the weights by hand, then return a bad loss."""
    model = nn.Linear(4, 2)

    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            model.weight -= 0.1 * model.weight.grad
        model.bias.data -= 0.1 * model.bias.grad
        return torch.log(-loss)

    step = tracker(step)
    for _ in range(2):
        step(torch.ones(3, 4))
    return [model.weight.detach(), model.weight._version, model.bias.detach(), model.bias._version]


def writes_on_its_input(tracker: Any) -> Any:
    tracker(model := Body(lambda x: torch.log(-1 - x.mul_(2).abs())))
    x = torch.ones(2, 2)
    model(x[0])
    return [x, x._version]


def comes_from_an_encoder(tracker: Any) -> Any:
    encoder, model = nn.Linear(4, 4), small()
    model[2].armed = "backward"
    tracker(model)
    x = torch.ones(3, 4, requires_grad=True)
    hidden = encoder(x).tanh()
    hidden.retain_grad()
    model(hidden).sum().backward()
    return [encoder.weight.grad, x.grad, hidden.grad]


def steps_in_the_backward_pass(tracker: Any) -> Any:
    model = small()
    model[2].armed = "backward"
    for p in model.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)
        p.register_post_accumulate_grad_hook(lambda p, optimizer=optimizer: optimizer.step())
    tracker(model)
    model(torch.ones(3, 4)).sum().backward()
    return [p.detach() for p in model.parameters()]


PROGRAMS = [bare_hands, writes_on_its_input, comes_from_an_encoder, steps_in_the_backward_pass]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("read", ["immediate", "end"])
def test_a_replay_touches_nothing_of_the_users(program: Any, read: Any) -> None:
    alive: list[Any] = []

    def track(target: Any) -> Any:
        advanced = anynan.Advanced(read=read)
        alive.extend([target, anynan.torch.track(target, action="record", advanced=advanced)])
        return alive[1]

    found = []
    for how in (lambda target: target, track):
        seed()
        found.append(program(how))
    alive[1].flush()
    assert_same(*found)
    assert alive[1].events[0].operation is not None, alive[1].events


def traces(model: nn.Module) -> list[Any]:
    """List what each module holds: names, keys of dicts, kinds; and hooks on all optimizers."""
    held = [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]
    return [list(map(len, held))] + [
        {k: sorted(map(str, v)) if isinstance(v, dict) else type(v) for k, v in vars(each).items()}
        for each in model.modules()
    ]


@pytest.mark.parametrize("target", ["model", "step"])
@pytest.mark.parametrize("end", ["remove", "with", "error", "failure at attach"])
def test_nothing_is_left_after_removal(target: str, end: str) -> None:
    assert not updates._handles
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()

    before = traces(model)
    what: Any = model if target == "model" else step
    if end == "failure at attach":
        model[0].weight.data[0, 0] = torch.nan
        failure(anynan.torch.track, what)
    else:
        model[2].armed = "backward" if end == "error" else None
        tracker = anynan.torch.track(what)
        run = tracker if target == "step" else step
        with tracker if end == "with" else nullcontext():
            failure(run) if end == "error" else run()
        tracker.remove()
    model.zero_grad()
    model[2].armed = None
    assert traces(model) == before
    assert not any(p._backward_hooks for p in model.parameters())
    assert not updates._handles
    assert not any(key.startswith("_anynan") for key in vars(optimizer))


class Biased(nn.Linear):
    """Return the bias beside the result, for the caller to add."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ self.weight.T, self.bias


@pytest.mark.parametrize("read", ["auto", "end"])
def test_hooks_on_a_weight_that_a_layer_returns_go_with_the_step(read: Any) -> None:
    model = nn.Sequential(Biased(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = anynan.torch.track(model, advanced=anynan.Advanced(read=read))
    for _ in range(3):
        x, bias = model(torch.ones(2, 4))
        (x + bias).sum().backward()
        optimizer.step()
        assert not any(p._backward_hooks for p in model.parameters())
    x, bias = model(torch.ones(2, 4))
    tracker.remove()
    assert not any(p._backward_hooks for p in model.parameters())


# The vows of an adapter, kept by PyTorch's.


class Logs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.log = nn.Linear(2, 3), Body(lambda x: torch.log(x))
        self.head, self.drop = nn.Linear(3, 1), nn.Dropout(0.5)
        nn.init.ones_(self.embed.weight)
        nn.init.ones_(self.embed.bias)

    def forward(self, x: Any) -> Any:
        return self.head(self.drop(self.log(self.embed(x))))


class TestTorch(Contract):
    def make(self) -> Subject:
        torch.manual_seed(7)
        net = Logs()
        optimizer = torch.optim.Adam(net.parameters(), 0.01)

        def step(x: Any) -> Any:
            return train(net, optimizer, x).detach()

        def state() -> dict[str, Any]:
            found = {f"weight {k}": x.detach().numpy().copy() for k, x in net.named_parameters()}
            for i, held in optimizer.state_dict()["state"].items():
                found |= {f"state {i} {k}": x.numpy().copy() for k, x in held.items()}
            return found | {"random": torch.get_rng_state().numpy().copy()}

        good, bad = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 2.0], [-3.0, -4.0]])
        owners = (torch, torch.Tensor, nn.Linear, torch.optim.Optimizer, Body, Logs)
        return Subject(net, step, good, bad, state, owners)

    def track(self, target: Any, **options: Any) -> Any:
        return anynan.torch.track(target, **split(options))
