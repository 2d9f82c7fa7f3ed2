"""What tracking promises not to change, not to keep, and never to hide."""

import copy
import gc
import io
import math
import pickle
import random
import subprocess
import sys
import textwrap
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers

import anynan
from anynan import AnynanWarning, NonFiniteError
from anynan.torch.update import updates
from tests.torch_adapter.training import Count, Fault, assert_same, live_tensors, seed


class Busy(nn.Module):
    """Draw random numbers, keep statistics, and write to its own attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.attn = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.drop = nn.Dropout(0.3)
        self.fault = Fault()
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 2)
        self.calls = 0
        self.kept: list[int] = []
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.kept.append(self.calls)
        x = self.norm(self.stem(x)).relu()
        x = x * (random.random() + float(np.random.rand()))  # noqa: NPY002
        seq = x.unsqueeze(0)
        seq = seq + self.attn(seq, seq, seq)[0]
        seq, _ = self.rnn(self.drop(seq))
        x = self.fault(seq[0])
        self.last = x.detach()
        if not self.training:
            self.training_was = False
        return self.head(x)


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Fault(), nn.Linear(8, 2))


class Run:
    """A few steps of training, and everything they leave behind."""

    def __init__(
        self, track: str | None = None, arm: dict[int, str] | None = None, **options: Any
    ) -> None:
        seed()
        self.model = Busy()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", enabled=options.pop("scaled", False))
        self.arm = arm or {}
        self.tracker: Any = None
        self.losses: list[torch.Tensor] = []
        step: Any = self.step
        if track == "model":
            self.tracker = anynan.torch.track(self.model, **options)
        elif track == "step":
            step = self.tracker = anynan.torch.track(self.step, **options)
        self.states = []
        for i in range(5):
            self.model.fault.armed = self.arm.get(i)
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
        """Copy everything that a step may have touched."""
        inner = copy.deepcopy(self.optimizer.state_dict())
        return {
            "weights": {k: v.clone() for k, v in self.model.state_dict().items()},
            "gradients": [
                None if p.grad is None else p.grad.clone() for p in self.model.parameters()
            ],
            "optimizer": inner,
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state()[1].copy(),  # type: ignore[index]  # noqa: NPY002
            "python": random.getstate(),
            "attributes": (self.model.calls, list(self.model.kept)),
            "last": None if self.model.last is None else self.model.last.clone(),
            "names": [sorted(vars(module)) for module in self.model.modules()],
            "training": [module.training for module in self.model.modules()],
            "scaler": self.scaler.state_dict(),
            "grad mode": torch.is_grad_enabled(),
        }


# Identity.


@pytest.mark.parametrize("track", ["model", "step"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"read": "step"},
        {"read": 3},
        {"parameters": True, "stats": ("mean", "rms", "norm")},
        {"level": "operation"},
        {"scaled": True},
    ],
    ids=str,
)
def test_training_is_bit_identical(track: str, options: Any) -> None:
    scaled = {k: v for k, v in options.items() if k == "scaled"}
    plain, tracked = Run(**scaled), Run(track, **options)
    assert_same(plain.losses, tracked.losses)
    for i, (one, two) in enumerate(zip(plain.states, tracked.states, strict=True)):
        assert_same(one, two, f"step {i}: ")
    tracked.tracker.remove()
    assert not tracked.tracker.events
    assert len(tracked.tracker.history) == 5, "it was watched"


@pytest.mark.parametrize("track", ["model", "step"])
@pytest.mark.parametrize("armed", ["forward", "backward"])
@pytest.mark.parametrize(
    "options", [{}, {"read": "step"}, {"scaled": True}, {"level": "operation"}], ids=str
)
def test_a_replay_leaves_no_trace(track: str, armed: str, options: Any) -> None:
    arm = {2: armed}
    scaled = {k: v for k, v in options.items() if k == "scaled"}
    plain, tracked = Run(arm=arm, **scaled), Run(track, arm, action="record", **options)
    tracked.tracker.check()
    for i, (one, two) in enumerate(zip(plain.states, tracked.states, strict=True)):
        assert_same(one, two, f"step {i}: ")
    events = tracked.tracker.events
    assert events
    if not scaled or armed == "forward":
        assert events[0].operation is not None, "there was a replay, or a watched step"
        assert events[0].operation.name == {"forward": "log", "backward": "sqrt"}[armed]
    assert torch.autograd.backward.__module__ == "torch.autograd"
    assert torch.amp.GradScaler.step.__qualname__ == "GradScaler.step"


def test_a_replay_leaves_the_graph_of_the_step_usable() -> None:
    model = small()
    anynan.torch.track(model, action="record")
    x = torch.randn(3, 4)
    model[2].armed = "forward"
    loss = model(x).sum()
    model[2].armed = None
    loss.backward()  # the first graph, after the replay
    assert model[0].weight.grad is not None
    assert model[3].bias.grad is not None
    assert torch.equal(model[3].bias.grad, torch.full((2,), 3.0))


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
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            return torch.log(-1 - x.abs())

    model = Model()
    tracker(model)
    x = torch.ones(2, 2)
    model(x[0])
    return [x, x._version]


def keeps_a_tensor_attribute(tracker: Any) -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = torch.zeros(4)
            self.seen: dict[int, int] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total += x.mean(0)
            self.seen[len(self.seen)] = 1
            return torch.log(-1 - x.abs())

    model = Model()
    tracker(model)
    model(torch.ones(2, 4))
    return [model.total, model.seen]


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


@pytest.mark.parametrize(
    "program",
    [
        bare_hands,
        writes_on_its_input,
        keeps_a_tensor_attribute,
        comes_from_an_encoder,
        steps_in_the_backward_pass,
    ],
)
@pytest.mark.parametrize("read", ["immediate", "step"])
def test_a_replay_touches_nothing_of_the_users(program: Any, read: Any) -> None:
    trackers: list[Any] = []
    alive: list[Any] = []

    def track(target: Any) -> Any:
        alive.append(target)
        trackers.append(anynan.torch.track(target, action="record", read=read))
        return trackers[0]

    seed()
    plain = program(lambda target: target)
    seed()
    tracked = program(track)
    trackers[0].check()
    assert_same(plain, tracked)
    assert trackers[0].events
    assert trackers[0].events[0].operation is not None, trackers[0].events


# Nothing left.


def traces(model: nn.Module) -> list[Any]:
    return [
        {k: (dict(v) if isinstance(v, dict) else v) for k, v in vars(module).items()}
        for module in model.modules()
    ]


def shape_of(trace: list[Any]) -> list[Any]:
    return [
        {k: sorted(map(str, v)) if isinstance(v, dict) else type(v) for k, v in vs.items()}
        for vs in trace
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

    before = shape_of(traces(model))
    hooks = (
        len(optimizers._global_optimizer_pre_hooks),
        len(optimizers._global_optimizer_post_hooks),
    )
    what: Any = model if target == "model" else step
    if end == "failure at attach":
        with torch.no_grad():
            model[0].weight[0, 0] = torch.nan
        with pytest.raises(NonFiniteError):
            anynan.torch.track(what)
    elif end == "with":
        with anynan.torch.track(what) as tracker:
            tracker() if target == "step" else step()
    else:
        tracker = anynan.torch.track(what, action="raise" if end == "error" else "record")
        model[2].armed = "backward" if end == "error" else None
        if end == "error":
            with pytest.raises(NonFiniteError):
                tracker() if target == "step" else step()
        else:
            tracker() if target == "step" else step()
        tracker.remove()
    model.zero_grad()
    model[2].armed = None
    assert shape_of(traces(model)) == before
    assert not any(p._backward_hooks for p in model.parameters())
    assert not updates._handles
    assert hooks == (
        len(optimizers._global_optimizer_pre_hooks),
        len(optimizers._global_optimizer_post_hooks),
    )
    assert not any(key.startswith("_anynan") for key in vars(optimizer))


class Biased(nn.Linear):
    """Return the bias beside the result, for the caller to add."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ self.weight.T, self.bias


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Biased(4, 4), Biased(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, bias = self.first(x)
        return self.last(x + bias)


@pytest.mark.parametrize("options", [{}, {"read": "step"}], ids=str)
def test_hooks_on_a_weight_that_a_layer_returns_go_with_the_step(options: Any) -> None:
    model = Adding()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = anynan.torch.track(model, **options)
    for _ in range(3):
        x, bias = model(torch.ones(2, 4))
        (x + bias).sum().backward()
        optimizer.step()
        assert not any(p._backward_hooks for p in model.parameters())
    x, bias = model(torch.ones(2, 4))
    tracker.remove()
    assert not any(p._backward_hooks for p in model.parameters())


# Nothing kept alive.


def train_model(model: nn.Module, **options: Any) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters())
    anynan.torch.track(model, **options)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()

    return step


@pytest.mark.parametrize(
    ("whole_step", "options"),
    [
        (False, {}),
        (False, {"read": "step", "parameters": True}),
        (False, {"stats": ("rms",)}),
        (False, {"level": "operation"}),
        (True, {}),
        (True, {"read": "step"}),
        (True, {"level": "operation", "parameters": True}),
    ],
    ids=str,
)
def test_fifty_steps_leak_no_tensor(whole_step: bool, options: Any) -> None:
    model = small()
    if whole_step:
        optimizer = torch.optim.AdamW(model.parameters())

        @anynan.torch.track(**options)
        def step() -> None:
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
    else:
        step = train_model(model, **options)
    counts = []
    for i in range(50):
        step()
        if i in (4, 49):
            counts.append(live_tensors())
    assert counts[0] == counts[1]


def test_failing_steps_leak_no_tensor() -> None:
    model = small()
    step = train_model(model, action="record")
    counts = []
    for i in range(16):
        model[2].armed = "forward" if i % 2 else None
        step()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.1)
        if i in (9, 15):
            counts.append(live_tensors())
    assert counts[0] == counts[1]


@pytest.mark.parametrize("detach", [True, False])
def test_a_hidden_state_carried_on_is_not_kept(detach: bool) -> None:
    cell = nn.GRUCell(3, 3)
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.01)
    tracker = anynan.torch.track(cell)
    hidden = torch.zeros(2, 3)
    states: list[weakref.ref[torch.Tensor]] = []
    for _ in range(10):
        hidden = cell(torch.randn(2, 3), hidden)
        if detach:
            hidden.sum().backward()
            optimizer.step()
            hidden = hidden.detach()
        states.append(weakref.ref(hidden))
    if not detach:
        hidden.sum().backward()
        optimizer.step()
    assert [ref() is not None for ref in states] == [False] * 9 + [True]
    assert not tracker.events


def test_a_loss_that_is_kept_keeps_no_batch() -> None:
    model = small()
    step_loss: list[torch.Tensor] = []
    batches: list[weakref.ref[torch.Tensor]] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    anynan.torch.track(model)
    for _ in range(3):
        x = torch.randn(3, 4)
        batches.append(weakref.ref(x))
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        step_loss.append(loss)  # with its graph
    del x
    assert [ref() for ref in batches] == [None] * 3


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("options", [{}, {"read": "step"}], ids=str)
@pytest.mark.parametrize("until", ["attach", "forward", "backward", "update", "no_grad"])
def test_a_model_is_freed_at_once(options: Any, until: str) -> None:
    with no_collector():
        model = small()
        tracker = anynan.torch.track(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if until == "no_grad":
            with torch.no_grad():
                model(torch.randn(3, 4))
        elif until != "attach":
            loss = model(torch.randn(3, 4)).sum()
            if until != "forward":
                loss.backward()
            if until == "update":
                optimizer.step()
            del loss
        refs = [weakref.ref(model), weakref.ref(model[0].weight), weakref.ref(model[2])]
        del model, optimizer
        assert [ref() for ref in refs] == [None] * 3
        assert tracker.fn is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tracker.remove()


def test_inputs_and_outputs_are_freed_at_the_end_of_a_step() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    anynan.torch.track(model)
    with no_collector():
        x = torch.randn(3, 4)
        out = model(x)
        refs = [weakref.ref(x), weakref.ref(out)]
        loss = out.sum()
        loss.backward()
        optimizer.step()
        del x, out, loss
        assert [ref() for ref in refs] == [None, None]


# Copies.


def test_a_deep_copy_is_not_tracked() -> None:
    model = small()
    tracker = anynan.torch.track(model, action="record")
    other = copy.deepcopy(model)
    x = torch.randn(3, 4)
    assert torch.equal(model(x), other(x))
    other[2].armed = "forward"
    other(x).sum().backward()
    assert not tracker.events
    again = copy.deepcopy(other)
    again(x)
    with anynan.torch.track(other, action="record") as second:  # and it can be tracked itself
        other(x)
    assert len(second.events) == 1
    tracker.remove()


@pytest.mark.tier(2)
def test_a_pickle_loads_where_anynan_is_not_installed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    tracker = anynan.torch.track(model)
    x = torch.randn(3, 4)
    expected = model(x)
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))
    torch.save(model, tmp_path / "model.pt")
    torch.save((x, expected.detach()), tmp_path / "data.pt")
    code = """
        import pickle, sys, torch
        sys.modules["anynan"] = None  # importing it now fails
        x, expected = torch.load("data.pt")
        for model in (
            pickle.load(open("model.pickle", "rb")), torch.load("model.pt", weights_only=False)
        ):
            out = model(x)
            assert torch.equal(out, expected)
            out.sum().backward()
        print("loaded")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "loaded\n", done.stderr
    assert not tracker.events


def test_state_dict_is_untouched() -> None:
    model = small()
    names = list(model.state_dict())
    repr_before = repr(model)
    anynan.torch.track(model, parameters=True)
    model(torch.randn(3, 4)).sum().backward()
    assert list(model.state_dict()) == names
    assert repr(model) == repr_before
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    model.load_state_dict(torch.load(buffer))
    other = small()
    other.load_state_dict(model.state_dict())
    assert_same(dict(model.state_dict()), dict(other.state_dict()))


def test_an_average_of_a_tracked_model_is_not_tracked() -> None:
    model = small()
    tracker = anynan.torch.track(model, action="record")
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    average.module[2].armed = "forward"
    average(torch.randn(3, 4))
    assert not tracker.events


# Cost that can be counted.


def counted(steps: int, **options: Any) -> Count:
    """Count what tracking adds to some steps of training."""
    counts = []
    for tracked in (False, True):
        seed()
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        if tracked:
            tracker = anynan.torch.track(model, **options)
        count = Count()
        for i in range(steps + 1):
            mode: Any = count if i else warnings.catch_warnings()  # the first step is not counted
            with mode:
                optimizer.zero_grad()
                model(torch.randn(8, 16)).square().mean().backward()
                optimizer.step()
        counts.append(count)
        if tracked:
            tracker.remove()
            assert len(tracker.history) == steps + 1
    extra = Count()
    extra.seen = counts[1].seen - counts[0].seen
    extra.large = counts[1].large - counts[0].large
    return extra


def test_one_host_read_per_step() -> None:
    extra = counted(4, read="step")
    assert extra.reads == 4, extra.seen


@pytest.mark.parametrize(
    ("loss", "reads"),
    [
        (nn.MSELoss(), 1),  # a layer's output: read with all the others before the update
        (nn.functional.mse_loss, 2),  # known when the step returns it, after the update
        (lambda x, y: None, 0),
    ],
)
def test_host_reads_of_a_tracked_step_by_what_it_returns(loss: Any, reads: int) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor | None:
        found: torch.Tensor | None = loss(model(x), torch.zeros(3, 2))
        if found is not None:
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
        return found

    run = anynan.torch.track(step, read="step")
    run(torch.randn(3, 4))
    with Count() as count:
        for _ in range(4):
            run(torch.randn(3, 4))
    assert count.reads == 4 * max(reads, 1)
    run.remove()
    losses = [reading for reading in run.history if reading.phase == "loss"]
    assert len(losses) == (5 if reads else 0)
    assert all(r.lo == r.hi and r.lo > 0 for r in losses)


def test_a_loss_that_is_changed_after_its_layer_is_read_again() -> None:
    model, criterion = nn.Linear(4, 2), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @anynan.torch.track(read="step")
    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = criterion(model(x), torch.zeros(3, 2))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            return loss.log_().neg_().sqrt_().mul_(-1).log_()

    with pytest.raises(NonFiniteError) as caught:
        step(torch.randn(3, 4))
    assert caught.value.event.phase == "loss"


@pytest.mark.parametrize(("replay", "first"), [(True, "read"), (False, "update")])
def test_the_update_waits_for_a_read_that_could_stop_it_only(replay: bool, first: str) -> None:
    seen: list[str] = []

    class Order(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = getattr(func, "__name__", "")
            if name in {"tolist", "addcdiv_"}:
                seen.append({"tolist": "read", "addcdiv_": "update"}[name])
            return func(*args, **(kwargs or {}))

    model = small()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    tracker = anynan.torch.track(model, read="step", action="warn", replay=replay)
    model(torch.randn(3, 4)).sum().backward()
    with Order():
        optimizer.step()
    assert seen[0] == first
    assert seen.count("read") == 1
    with pytest.warns(AnynanWarning, match="NaN|Inf"):
        (model(torch.randn(3, 4)) * torch.inf).sum().backward()
        optimizer.step()
        tracker.remove()
    assert tracker.count("bad") == 1


def test_reading_every_n_steps_reads_every_n_steps() -> None:
    extra = counted(8, read=3)
    assert extra.reads in (2, 3), extra.seen


@pytest.mark.parametrize("read", ["step", "immediate"])
def test_each_array_is_passed_over_once(read: Any) -> None:
    extra = counted(1, read=read)
    # The input, 4 layer outputs, 4 gradients of them; the weights' gradients in one call,
    # or each by itself.
    passes = extra.large["aminmax"]
    views = {"detach", "view", "alias", "_unsafe_view", "unbind", "select", "slice"}
    assert set(extra.large) - views <= {"aminmax", "_foreach_norm"}, extra.large
    assert 9 <= passes + extra.large["_foreach_norm"] * 4 <= 13, extra.large


# Never silently blind.


def test_layers_that_never_ran_are_listed() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts["used"](x)

    outer = Outer()
    tracker = anynan.torch.track(outer)
    with torch.no_grad():
        outer(torch.randn(1, 2))
    text = tracker.report()
    assert "parts.idle" in text
    assert "parts.used" not in text.partition("parts.idle")[2]


def test_a_failing_replay_hides_nothing() -> None:
    class Once(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if anynan.replaying():
                raise KeyError("x")
            return torch.log(-1 - x.abs())

    model = nn.Sequential(Once())
    anynan.torch.track(model)
    with pytest.raises(NonFiniteError, match="KeyError") as caught:
        model(torch.randn(2, 2))
    assert caught.value.event.layer == "0"


# Interruptions.


def test_the_users_callback_may_remove_the_tracker() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = anynan.torch.track(model, action=lambda event: tracker.remove())
    model[2].armed = "forward"
    model(torch.randn(3, 4)).sum().backward()
    assert len(tracker.events) == 1
    assert tracker.judge.adapter is None
    model[2].armed = None
    optimizer.zero_grad()
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("read", ["immediate", "step"])
def test_removed_between_forward_and_backward(read: Any) -> None:
    model = small()
    tracker = anynan.torch.track(model, read=read)
    model[2].armed = "backward"
    loss = model(torch.randn(3, 4)).sum()
    tracker.remove()
    loss.backward()  # its hooks are in the graph, and rest
    assert not tracker.events


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("read", ["immediate", "step"])
def test_an_error_in_the_users_forward_leaves_a_sane_state(error: Any, read: Any) -> None:
    class Fragile(nn.Module):
        fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fails:
                raise error
            return x

    model = nn.Sequential(nn.Linear(4, 4), Fragile(), Fault(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = anynan.torch.track(model, read=read)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()

    step()
    model[1].fails = True
    with pytest.raises(error):
        step()
    model[1].fails = False
    step()
    model[2].armed = "backward"
    with pytest.raises(NonFiniteError) as caught:
        step()
    event = caught.value.event
    assert event.operation is not None
    assert (event.layer, event.operation.name) == ("2", "sqrt")
    phases = [r.phase for r in tracker.history if r.step == tracker.history.steps()[-1]]
    assert phases.count("backward") >= 4


def test_an_error_in_a_tracked_step_leaves_a_sane_state() -> None:
    model = small()

    @anynan.torch.track
    def step(x: torch.Tensor, fails: bool) -> torch.Tensor:
        out = model(x).sum()
        if fails:
            msg = "mine"
            raise ValueError(msg)
        return out

    step(torch.randn(3, 4), False)
    with pytest.raises(ValueError, match="mine"):
        step(torch.randn(3, 4), True)
    step(torch.randn(3, 4), False)
    assert step.history.steps() == [0, 1, 2]
    model[2].armed = "forward"
    with pytest.raises(NonFiniteError) as caught:
        step(torch.randn(3, 4), False)
    assert caught.value.event.step == 3


def test_what_broke_a_step_is_raised_from_the_users_error() -> None:
    model = small()
    model[2].armed = "forward"

    @anynan.torch.track(read="step")
    def step(x: torch.Tensor) -> None:
        if model(x).isnan().any():
            msg = "the user's own check"
            raise ValueError(msg)

    with pytest.raises(anynan.NonFiniteError, match="NaN first appeared") as caught:
        step(torch.randn(3, 4))
    assert "own check" in str(caught.value.__cause__)


def test_a_fused_path_that_hooks_turn_off_is_said_in_the_report() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with anynan.torch.track(layer) as tracker, torch.no_grad():
        layer(torch.ones(1, 3, 8))
        assert tracker.report().count("fused path") == 1
    with anynan.torch.track(nn.Linear(2, 2)) as tracker:
        assert "fused path" not in tracker.report()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_copy_made_while_tracked_holds_no_hooks() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    model.register_forward_hook(print_nothing)
    anynan.torch.track(model)
    other = copy.deepcopy(model)
    hooks = [[*x._forward_hooks.values(), *x._forward_pre_hooks.values()] for x in other.modules()]
    assert hooks == [[print_nothing], [], []]
    other._forward_hooks.clear()
    assert torch.jit.script(other)(torch.ones(1, 2)).shape == (1, 2)


def print_nothing(module: Any, args: Any, output: Any) -> None:
    """Stand for a hook of the user's own."""


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("tracked", ["model", "step"])
@pytest.mark.parametrize("options", [{}, {"parameters": True}, {"level": "operation"}], ids=str)
def test_lazy_modules(options: Any, tracked: str) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(1))

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    if tracked == "model":
        tracker = anynan.torch.track(model, **options)
    else:
        step = tracker = anynan.torch.track(step, **options)
    step(torch.randn(5, 3))
    tracker.check()
    assert not tracker.events
    model[0].weight.data.fill_(math.nan)
    with pytest.raises(NonFiniteError, match=r"0\.weight"):
        step(torch.randn(5, 3))
