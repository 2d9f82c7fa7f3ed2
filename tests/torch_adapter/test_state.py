"""Buffers: what they hold on purpose, what a failing call wrote into them, what it spoilt."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import MinMaxObserver

import anynan
from anynan import NonFiniteError
from tests.flat import split

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
    with (
        anynan.torch.track(model, **split(options)) as tracker,
        pytest.raises(NonFiniteError) as caught,
    ):
        model(torch.randn(3, 2))
        tracker.flush()
    event = caught.value.event
    assert (event.phase, event.layer, event.parameter) == ("forward", "1", None), str(event)
    if options.get("replay") is False:
        assert any("1.mean is bad now" in note for note in event.notes)


@pytest.mark.parametrize("replay", [True, False])
def test_statistics_that_a_reported_step_spoilt_make_no_event_of_their_own(*, replay: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    x = torch.randn(5, 3)
    bad = x.clone()
    bad[0, 0] = math.nan
    with anynan.torch.track(
        model, action="record", advanced=anynan.Advanced(replay=replay)
    ) as tracker:
        model(bad)
        model(x)
        model.eval()
        for _ in range(3):
            model(x)
        tracker.flush()
    (event,) = [event for event in tracker.events if event.severity == "bad"]
    assert (event.phase, event.step) == ("input", 0)
    assert event.spread.count > 3


def test_another_fault_after_a_reported_one_is_reported() -> None:
    model = nn.Sequential(MinMaxObserver(), nn.Linear(2, 2))
    with anynan.torch.track(model, action="record") as tracker, torch.no_grad():
        model[0].min_val.fill_(math.inf)
        model(torch.full((1, 2), math.nan))
        model(torch.full((1, 2), 3e38))
        model[1].weight.fill_(1e38)
        model(torch.full((1, 2), 1e30))
    bad = [event for event in tracker.events if event.severity == "bad"]
    assert (bad[0].phase, bad[0].step) == ("input", 0)
    assert len(bad) > 1
    assert {event.phase for event in bad[1:]} <= {"forward"}


def test_a_batch_that_reaches_scaled_gradients_is_named_although_the_update_is_skipped() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(x).mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    with pytest.raises(NonFiniteError) as caught, anynan.torch.track(step) as tracked:
        tracked(torch.tensor([[1.0, math.nan]]))
    assert (caught.value.event.phase, caught.value.event.tensor) == ("input", "x")
