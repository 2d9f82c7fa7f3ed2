"""One fault is one event: what comes of it later, and the same again, is counted there."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import anynan


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
    assert (event.phase, event.step, event.times, tracker.count("bad")) == ("parameter", 4, 1, 1)
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
    assert [event.step for event in tracker.events if event.severity == "bad"] == [2]


@LEVELS
def test_an_optimizer_that_spoils_weights_again_is_told_once(level: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Flatten(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), eps=0.0)
    tracker = anynan.torch.track(model, action="record", level=level)
    for i in range(8):
        loss = model(torch.tensor([[0, 1], [1, 2]]) + i % 3).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    (event,) = [event for event in tracker.events if event.severity == "bad"]
    assert (event.phase, event.cause.tag) == ("optimizer", "optimizer_epsilon_underflow")
    assert event.spread.count >= 6


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
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(10, 8), nn.Linear(8, 1)

        def forward(self, rows: torch.Tensor, by: float) -> torch.Tensor:
            return torch.log(self.out(self.table(rows)).abs() + by)

    model = Model()
    model.table.weight[9] = math.nan
    tracker = anynan.torch.track(model, action="record", level=level)
    for i in range(5):
        model(torch.tensor([1, 9 if i == 1 else 2]), -1e3 if i == 3 else 1.0)
    found = [event for event in tracker.events if event.severity == "bad"]
    assert [(event.phase, event.step) for event in found] == [("parameter", 0), ("forward", 3)]
    assert found[1].operation.name == "log"


@torch.no_grad()
def test_weights_that_are_bad_again_after_they_were_good_are_a_new_event() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    tracker = anynan.torch.track(model, action="record")
    for i in range(8):
        model[0].weight.fill_(math.nan if i in (2, 3) else 1.0)
        model[1].weight.fill_(math.nan if i == 6 else 1.0)
        model(torch.ones(2, 4))
    bad = [(event.parameter, event.step, event.spread.count) for event in tracker.events]
    assert [name for name, _, _ in bad] == ["0.weight", "1.weight"]
    assert bad[0][2] >= 1


@LEVELS
def test_the_same_operation_again_is_counted_with_the_first(level: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 1), nn.Tanh())
    model.forward = lambda x: -torch.log(1 - torch.tanh(model[0](x) + 12).square())
    tracker = anynan.torch.track(model, action="record", level=level)
    for _ in range(9):
        model(torch.rand(3))
    (event,) = tracker.events
    assert (event.step, event.times, tracker.count("bad")) == (0, 9, 9)
    assert event.operation.name == "log"
    assert "; 9 times" in tracker.report()
    assert anynan.Event.from_json(event.to_json()) == event


@pytest.mark.parametrize("meant", [False, True])
def test_a_weight_that_is_infinite_is_told_and_not_the_log_of_the_zero_that_came_of_it(
    *, meant: bool
) -> None:
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
