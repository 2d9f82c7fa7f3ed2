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
