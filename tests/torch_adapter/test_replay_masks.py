"""What a program handles itself is no failure."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import anynan
from anynan import AnynanWarning
from tests.torch_adapter.failing_models import batch, failing, line, operation, step_event

# Nothing to report.


def test_a_mask_from_the_same_layer_does_not_stop_the_replay() -> None:
    class Shift(nn.Module):
        def forward(self, x: torch.Tensor, by: float) -> torch.Tensor:
            return x + by

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = Shift()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            masked = self.shift(x, -math.inf)
            weights = (x.abs() + 1).log() - masked
            return self.shift(weights * 0, 0.0) + x

    model = Model()
    anynan.torch.track(model)
    event = failing(lambda: model(batch()))
    assert operation(event).name == "subtract"
    assert line(event) == "weights = (x.abs() + 1).log() - masked"
    assert event.then.name == "multiply"
    assert event.spread.surfaced == "forward shift"


def test_a_placed_positive_inf_is_a_suspect_and_replayed_once() -> None:
    replays: list[bool] = []

    class Distances(nn.Module):
        """Give Inf where there is no edge, as for shortest paths."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            replays.append(anynan.replaying())
            return x.masked_fill(x < 0, math.inf)

    class Nearest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.distances = Distances()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.distances(x).min(-1).values

    model = Nearest()
    with anynan.torch.track(model) as tracker, torch.no_grad():
        for _ in range(3):
            model(torch.tensor([[1.0, -1.0]]))
    assert {(event.layer, event.kind, event.severity) for event in tracker.events} == {
        ("distances", "posinf", "suspect")
    }
    assert sum(replays) == 1
    assert "only placed values" in tracker.report()


# What comes after an update in the same step.


def adversarial(bad: bool) -> tuple[Callable[[torch.Tensor], torch.Tensor], list[nn.Module]]:
    """Update a critic and then its opponent, in one step."""
    torch.manual_seed(0)
    maker, critic = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1), nn.Sigmoid())
    optimizers = [torch.optim.Adam(m.parameters(), 0.1) for m in (critic, maker)]

    def step(x: torch.Tensor) -> torch.Tensor:
        scores = critic(x), critic(maker(x).detach())
        (scores[1] - scores[0]).mean().backward()
        optimizers[0].step()
        loss = torch.log(critic(maker(x)) * (0 if bad else 1)).mean()
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        return loss

    return step, [maker, critic]


@pytest.mark.parametrize("level", ["step", "layer", "operation"])
def test_the_loss_of_a_second_model_after_the_update_of_the_first(level: Any) -> None:
    step, _ = adversarial(bad=True)
    event = step_event(step, torch.ones(3, 2), level=level)
    assert event.operation.name == "log"
    assert "critic(maker(x))" in event.operation.source.text
    assert event.cause.tag == "log_of_zero"


def test_a_second_run_past_an_update_makes_none() -> None:
    runs = []
    for tracked in (False, True):
        step, models = adversarial(bad=True)
        run = anynan.torch.track(step, action="record") if tracked else step
        run(torch.ones(3, 2))
        runs.append([x.clone() for m in models for x in m.state_dict().values()])
        runs[-1] += [p.grad.clone() for m in models for p in m.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) or (a != a).any() for a, b in zip(*runs, strict=True))
    assert len(runs[0]) == len(runs[1])


def test_a_metric_of_nothing_after_the_update() -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return {"loss": loss, "accuracy": net(x[:0]).argmax(-1).float().mean()}

    event = step_event(step, batch())
    assert (event.operation.name, event.tensor) == ("mean", "result['accuracy']")


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_scripted_part_is_left_alone_and_said() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(self.norm(x))

    scripted = torch.jit.script(Part())  # type: ignore[no-untyped-call]
    model = nn.Sequential(nn.Linear(4, 4), scripted)
    for target in (model, lambda x: model(x).sum(), lambda x: scripted(x).sum()):
        count = int(scripted.norm.num_batches_tracked)
        with pytest.warns(AnynanWarning, match="scripted or traced take no hooks"):
            tracker = anynan.torch.track(target)
        event = failing(lambda tracker=tracker: tracker(batch()))
        assert event.operation.name == "log"
        assert not event.notes
        assert int(scripted.norm.num_batches_tracked) == count + 1
        tracker.remove()
    with pytest.raises(TypeError, match="track the module that it was made from"):
        anynan.torch.track(scripted)
