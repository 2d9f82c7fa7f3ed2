"""One fault is one event: what comes of it later, and the same again, is counted there."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import MinMaxObserver

import anynan
from tests.failing import failure
from tests.flat import split
from tests.torch_adapter.cause_parts import Body
from tests.torch_adapter.training import bad


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, 8), nn.Linear(8, 1)
        self.fault = False

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.cell(x, h)
        return self.out(torch.log(h - 2) if self.fault else h), h


LEVELS = pytest.mark.parametrize("level", ["step", "layer"])


@LEVELS
def test_weights_that_an_update_by_hand_spoils_are_told_once(level: Any) -> None:
    torch.manual_seed(0)
    model, h = Net(), torch.zeros(2, 8)
    tracker = anynan.torch.track(model, action="record", level=level)
    for i in range(12):
        model.zero_grad()
        y, h = model(torch.ones(2, 4), h.detach())
        y.square().mean().backward()
        for p in model.parameters():
            p.data.sub_(p.grad / (0.0 if i == 3 else 1.0))
    (event,) = tracker.events
    assert (event.operation.name, event.step, event.times) == ("subtract", 4, 1)
    assert tracker.count("bad") == 1
    assert "p.data.sub_(p.grad / " in event.operation.source.text
    assert event.spread.count >= 7
    assert "comes from its own step 4, which was reported" in tracker.report()


@LEVELS
def test_a_fault_right_after_the_weights_were_repaired_is_one_of_its_own(level: Any) -> None:
    torch.manual_seed(0)
    model, h = Net(), torch.zeros(2, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    good = {key: value.clone() for key, value in model.state_dict().items()}
    tracker = anynan.torch.track(model, action="record", level=level)
    for i in range(3):
        model.fault = i > 0
        optimizer.zero_grad()
        model(torch.ones(2, 4), h)[0].square().mean().backward()
        optimizer.step()
        model.load_state_dict(good)
    (event,) = tracker.events
    assert (event.step, event.operation.name, event.times) == (1, "log", 2)


@LEVELS
def test_a_state_that_is_carried_on_bad_is_a_consequence(level: Any) -> None:
    model, h = Net(), torch.zeros(2, 8)
    tracker = anynan.torch.track(model, action="record", level=level)
    with torch.no_grad():
        for i in range(8):
            model.cell.fault = i == 2
            _, h = model(torch.ones(2, 4), h / 0 * 0 if i == 2 else h)
    assert [event.step for event in bad(tracker)] == [2]


@LEVELS
def test_a_weight_that_was_bad_from_the_start_was_never_written(level: Any) -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Flatten(), nn.Linear(16, 1))
    with torch.no_grad():
        model[0].weight[9] = math.nan
    tracker = anynan.torch.track(model, action="record", level=level)
    optimizer = torch.optim.Adam(model.parameters())
    for i in range(6):
        loss = model(torch.tensor([[0, 1], [2, 9 if i == 3 else 3]])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if i != 3:
            optimizer.step()
    (event,) = tracker.events
    assert (event.phase, event.parameter, event.step) == ("parameter", "0.weight", 0)
    assert event.spread.count >= 1
    assert "was finite before" not in tracker.report()


@LEVELS
@torch.no_grad()
def test_a_fault_beside_a_bad_weight_is_an_event_of_its_own(level: Any) -> None:
    by = {3: -1e3}
    log = Body(lambda x: torch.log(x.abs() + by.get(i, 1.0)))
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 1), log)
    model[0].weight[9] = math.nan
    tracker = anynan.torch.track(model, action="record", level=level)
    for i in range(5):
        model(torch.tensor([1, 9 if i == 1 else 2]))
    found = bad(tracker)
    assert [(event.phase, event.step) for event in found] == [("parameter", 0), ("forward", 3)]
    assert found[1].operation.name == "log"


@pytest.mark.parametrize("meant", [False, True])
def test_a_weight_that_is_infinite_is_told_and_not_the_log_of_the_zero_that_came_of_it(meant):
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.tensor([0.0, 0.0]))
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.scale.sigmoid().log().square() + self.gate.sigmoid().sum()

    model = Gate()
    optimizer = torch.optim.SGD([model.scale], lr=0.1)
    with anynan.torch.track(model, action="record") as tracker:
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model.gate[1] = -torch.inf  # a mask, of 0 and -Inf
            model.scale.fill_(-200.0 if meant else -torch.inf)
        model(torch.ones(3))
    (event,) = tracker.events
    assert event.parameter == (None if meant else "scale")


# Buffers: what they hold on purpose, what a failing call wrote into them, what it spoilt.


WAYS = pytest.mark.parametrize(
    "options", [{}, {"replay": False}, {"read": "end"}, {"parameters": True}], ids=str
)


class Average(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x / (x * 0)
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x


@WAYS
def test_an_observer_starts_at_inf(options: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), MinMaxObserver())
    with anynan.torch.track(model, **split(options)) as tracker:
        for _ in range(3):
            model(torch.randn(3, 2)).sum().backward()
    assert {event.severity for event in tracker.events} == {"suspect"}
    assert {event.parameter for event in tracker.events} == {"1.min_val"}
    assert "was already in a buffer" in str(tracker.report())


@WAYS
def test_what_the_failing_call_wrote_is_not_its_cause(options: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Average(), nn.Linear(2, 1))
    with anynan.torch.track(model, **split(options)) as tracker:
        event = failure(lambda: (model(torch.randn(3, 2)), tracker.flush()))
    assert (event.phase, event.layer, event.parameter) == ("forward", "1", None), str(event)
    if options.get("replay") is False:
        assert any("1.mean is bad now" in note for note in event.notes)


@pytest.mark.parametrize("replay", [True, False])
def test_statistics_that_a_reported_step_spoilt_make_no_event_of_their_own(*, replay: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    x = torch.randn(5, 3)
    spoilt = x.clone()
    spoilt[0, 0] = math.nan
    advanced = anynan.Advanced(replay=replay)
    with anynan.torch.track(model, action="record", advanced=advanced) as tracker:
        model(spoilt)
        model(x)
        model.eval()
        for _ in range(3):
            model(x)
    (event,) = bad(tracker)
    assert (event.phase, event.step) == ("input", 0)
    assert event.spread.count > 3


def test_a_batch_that_reaches_scaled_gradients_is_named_although_the_update_is_skipped() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(x).mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    event = failure(anynan.torch.track(step), torch.tensor([[1.0, math.nan]]))
    assert (event.phase, event.tensor) == ("input", "x")


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("action", ["warn", "skip"])
def test_an_update_that_comes_after_the_call_belongs_to_its_fault(action: Any, calls: int) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())

    @anynan.torch.track(action=action)
    def step(x: torch.Tensor, *, fault: bool) -> None:
        y = model(x)
        root = torch.sqrt(y * 0).sum() if fault else 0.0  # finite, but not its gradient
        (y.square().mean() + root).backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(8):
            step(torch.randn(4, 3), fault=i == 4)
            if i % calls == calls - 1:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    (event,) = step.events
    assert (event.step, event.operation.name) == (4, "sqrt")
    spoilt = not all(p.isfinite().all() for p in model.parameters())
    assert spoilt == (action == "warn")
    assert ("since the update of step 4" in step.report()) == spoilt
