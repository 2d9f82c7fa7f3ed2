"""Autocast and loss scaling on the CPU: what is expected, what is not, and how near overflow is."""

import gc
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anynan
from tests.failing import failure
from tests.torch_adapter.cause_parts import circumstance
from tests.torch_adapter.training import Fault

WIDTH, HEADS, LETTERS, LENGTH = 16, 2, 12, 8


@pytest.fixture(autouse=True)
def _no_scaler_left() -> Iterator[None]:
    yield
    gc.collect()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1)
        weights = (scores.float() / math.sqrt(WIDTH // HEADS)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Run:
    """Train a small model with attention under autocast, with a loss scaler."""

    def __init__(self, scale=2.0**16, dtype=torch.float16, how="plain", **kw: Any) -> None:
        torch.manual_seed(0)
        self.dtype, self.how = dtype, how
        letters = nn.Embedding(LETTERS, WIDTH)
        self.model = nn.Sequential(letters, Attention(), nn.Linear(WIDTH, LETTERS), Fault())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 3e-3, fused=how == "fused")
        enabled = dtype is torch.float16
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=enabled, **kw)
        self.tracked: Any = self.step
        self.skipped: list[int] = []

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", self.dtype):
            loss = F.cross_entropy(self.model(x).float().flatten(0, 1), x.roll(-1, 1).flatten())
        self.scaler.scale(loss).backward()
        if self.how == "clip":
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def track(self, what: str, read: Any = "auto") -> anynan.Tracker:
        target = self.model if what == "model" else self.step
        tracker = anynan.torch.track(target, advanced=anynan.Advanced(read=read))
        self.tracked = tracker if what == "step" else self.step
        return tracker

    def train(self, steps: int) -> list[float]:
        losses = []
        for i in range(steps):
            before = self.scaler.get_scale()
            start = torch.randint(0, LETTERS, (4, 1))  # some order to learn: letters that count up
            losses.append(self.tracked((start + torch.arange(LENGTH)) % LETTERS).item())
            if self.scaler.get_scale() < before:
                self.skipped.append(i)
        return losses


def expected(tracker: anynan.Tracker) -> list[int]:
    return [event.step for event in tracker.events if event.expected is not None]


@pytest.mark.parametrize(
    ("what", "read", "dtype"),
    [("model", "auto", torch.float16), ("step", "end", torch.bfloat16)],
)
def test_a_transformer_trains_on_without_an_alarm(what: str, read: Any, dtype: torch.dtype) -> None:
    run = Run(dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error", anynan.AnynanWarning)
        with run.track(what, read) as tracker:
            losses = run.train(50)
    assert losses[-1] < losses[0] / 2, "it learns"
    assert tracker.count("bad") == tracker.count("suspect") == 0
    assert expected(tracker) == run.skipped
    assert len(tracker.history) == 50
    assert not tracker.notes


def test_an_attention_that_overflows_is_named_with_its_float32_value() -> None:
    run = Run()
    with run.track("step") as tracker:
        run.train(3)
        with torch.no_grad():
            run.model[1].qkv.weight[: 2 * WIDTH] *= 2000.0
        event = failure(run.train, 1)
    assert (event.layer, event.phase, event.step) == ("1", "forward", 3)
    assert (event.operation.name, event.operation.output.dtype) == ("matmul", "float16")
    assert event.operation.source.text == "scores = q @ k.transpose(-2, -1)"
    assert event.cause.tag == "overflow_in_dtype"
    assert event.cause.evidence.startswith("in float32 the result reaches ")
    assert event.cause.evidence.endswith("float16 ends at 65,504")
    assert tracker.count("bad") == 1


def steep(factor: float) -> nn.Module:
    """Pass values through a layer, and one that multiplies them and their gradient."""
    last = nn.Linear(2, 2, bias=False)
    nn.init.constant_(last.weight, factor)
    return nn.Sequential(nn.Linear(2, 2), last)


def scaled(net: nn.Module, scale: float, x: Tensor) -> Any:
    """Give a scaler, and a step under float16 with it."""
    optimizer = torch.optim.SGD(net.parameters(), 1e-9)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = net(x).float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return scaler, step


@pytest.mark.parametrize(
    ("what", "read", "how"),
    [("model", "immediate", "plain"), ("model", 3, "clip"), ("step", "end", "fused")],
)
def test_every_skipped_update_is_logged_as_expected(what: str, read: Any, how: str) -> None:
    run = Run(2.0**24, growth_interval=5, how=how)
    with run.track(what, read) as tracker:
        run.train(20)
        tracker.flush()  # the last step waited for the scaler
    assert expected(tracker) == run.skipped and len(run.skipped) > 5
    assert tracker.count("expected") == len(run.skipped)
    assert tracker.count("bad") == tracker.count("suspect") == 0
    assert "(scale 16777216, now " in str(tracker.events[0].expected)


@pytest.mark.parametrize("read", ["immediate", "end"])
def test_an_overflow_that_reaches_no_weight_is_not_called_a_skipped_update(read: Any) -> None:
    net = steep(6e4).insert(1, nn.ReLU())
    nn.init.constant_(net[0].bias, -100.0)  # no slope: what overflows after it stops there
    scaler, step = scaled(net, 2.0**10, torch.ones(1, 2))
    with anynan.torch.track(net, advanced=anynan.Advanced(read=read)) as tracker:
        step()
    assert scaler.get_scale() == 2.0**10, "nothing was skipped"
    (event,) = tracker.events
    assert (event.layer, event.kind) == ("1", "posinf")
    assert event.expected is not None
    assert "reached no weight: the scaler makes this update (scale now 1024)" in event.expected


@pytest.mark.parametrize(("scale", "power", "told"), [(2.0**4, 0.5, 1), (2.0**127, 2.0, 0)])
def test_a_scaled_loss_may_overflow_but_not_be_nan(scale: float, power: float, told: int) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 1e-9)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    with anynan.torch.track(net, action="record") as tracker:
        for _ in range(2):
            loss = (net(torch.ones(1, 2)).square().sum() - 9.0).pow(power)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    losses = [event for event in tracker.events if event.phase == "loss"]
    assert [event.kind for event in losses] == ["nan"] * told


@circumstance("loss_scale_too_high")
@pytest.mark.parametrize("what", ["model", "step"])
@pytest.mark.parametrize("read", ["immediate", "end"])
def test_a_streak_is_replayed_under_the_scale_of_its_step(what: str, read: Any) -> None:
    # 2**15 * 6 and 2**14 * 6 overflow. Under the scale after that, 2**13, nothing does.
    net = steep(3.0)
    scaler, step = scaled(net, 2.0**15, torch.full((1, 2), 1e-4))
    target, advanced = net if what == "model" else step, anynan.Advanced(read=read)
    policy = anynan.Policy(scale_streak=2)
    with anynan.torch.track(target, advanced=advanced, policy=policy) as tracker:
        run = step if what == "model" else tracker
        event = failure(lambda: [*(run() for _ in range(4)), tracker.flush()])
    assert (event.layer, event.phase, event.step) == ("1", "backward", 1)
    assert event.operation.output.dtype == "float16"
    assert event.cause.tag == "loss_scale_too_high"
    assert event.cause.evidence == (
        "loss scale 16,384, gradients in float16; in float32 the result reaches 98,304 "
        "(6 without the loss scale), float16 ends at 65,504"
    )
    assert not any("did not reproduce" in note for note in event.notes)
    assert expected(tracker) == [0]
    assert scaler.get_scale() == 2.0**13, "the replay leaves the scaler as it found it"


@circumstance("loss_scale_floor")
def test_an_overflow_at_a_scale_of_one_is_bad_at_once() -> None:
    scaler, step = scaled(steep(6e4), 1.0, torch.full((1, 2), 1e-4))
    with anynan.torch.track(step) as tracker:
        event = failure(tracker)
    assert (event.layer, event.cause.tag) == ("1", "loss_scale_floor")
    assert event.cause.evidence == (
        "the loss scale is down to 1; in float32 the result reaches 120,000, float16 ends at 65,504"
    )
    assert scaler.get_scale() == 0.5


def test_a_weight_that_does_not_fit_is_named_at_its_cast() -> None:
    """Autocast keeps its cast of a weight; a replay must make it again to see it overflow."""
    net = steep(1e5)
    with anynan.torch.track(net), torch.autocast("cpu", torch.float16):
        event = failure(net, torch.ones(3, 2))
    assert (event.layer, event.operation.name) == ("1", "astype")
    assert event.cause.tag == "overflow_in_dtype" and "100,000" in event.cause.evidence


@pytest.mark.parametrize("what", ["model", "step"])
def test_nothing_is_raised_between_the_scalers_step_and_its_update(what: str) -> None:
    run = Run(2.0**10)
    with run.track(what, "end"):
        run.train(1)
        run.model[3].armed = "forward"
        event = failure(run.train, 2)
        assert (event.step, event.layer) == (1, "3")
    assert run.scaler.get_scale() == 2.0**9, "the skipped step was finished first"
    run.model[3].armed = None
    run.tracked = run.step
    run.train(2)
