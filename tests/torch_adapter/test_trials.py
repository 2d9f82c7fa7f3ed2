"""A fix is tried before it is told: what the report claims of it is what really comes of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import anynan
from tests.failing import failure
from tests.torch_adapter.cause_parts import Body


def failing(step: Callable[..., Any], *args: Any, **advanced: Any) -> anynan.Event:
    """Run a tracked step once; return what stopped it."""
    with anynan.torch.track(step, advanced=anynan.Advanced(**advanced)) as tracked:
        event = failure(tracked, *args)
    assert anynan.Event.from_json(event.to_json()) == event
    return event


class Two(nn.Module):
    """Two faults that do not depend on each other: a logarithm of 0, and a root's slope there."""

    def __init__(self, first: Any = torch.log, second: Any = torch.sqrt) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        gone = torch.relu(-y.abs())
        logs = self.first(gone)
        return logs + self.second(gone + 0 * y) + y


def body_event(function: Callable[[torch.Tensor], torch.Tensor], values: Any) -> anynan.Event:
    """Train a weight of a model once by a function of it."""
    body = Body(function)
    body.weight = nn.Parameter(torch.tensor(values))

    def step() -> torch.Tensor:
        loss = body(body.weight).sum()
        loss.backward()
        return loss

    return failing(step)


def train(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss = model(x).sum() * 0.5
    loss.backward()
    return loss


@pytest.mark.parametrize("read", ["immediate", "end"])
def test_two_faults_come_in_one_report(read: Any) -> None:
    torch.manual_seed(0)
    model, x = Two(), torch.randn(4, 3)
    event = failing(lambda x: train(model, x), x, read=read)
    assert event.operation.name == "log"
    assert event.tried == anynan.events.Trial("log(x + 1e-8)", "another", "step")
    (other,) = event.others
    assert (other.operation.name, other.phase, other.layer) == ("sqrt", "backward", "")
    assert other.operation.source.text == "return logs + self.second(gone + 0 * y) + y"
    assert other.cause.tag == "sqrt_gradient_at_zero"
    # What is claimed is what comes of both fixes.
    mended = Two(lambda x: torch.log(x + 1e-8), lambda x: torch.sqrt(x + 1e-8))
    mended.load_state_dict(model.state_dict())
    loss = train(mended, x)
    norm = torch.cat([p.grad.flatten() for p in mended.parameters()]).norm().item()
    assert (other.tried.outcome, other.tried.repair) == ("finite", "sqrt(x + 1e-8)")
    assert other.tried.loss == pytest.approx(loss.item())
    assert other.tried.gradient_norm == pytest.approx(norm)


def test_a_fix_that_is_not_enough_says_so() -> None:
    y = torch.tensor([0.0, -1e-8])
    event = body_event(lambda w: w / y, [1.0, 1.0])
    assert (event.tried.outcome, event.others) == ("insufficient", ())
    assert event.cause.fix.startswith("not enough by itself: ")
    assert event.tried.repair == "x / (y + 1e-8)"


def test_of_a_model_only_what_ran_is_claimed() -> None:
    model = Two(second=torch.relu)
    policy = anynan.Policy(neginf="bad")
    with anynan.torch.track(model, policy=policy):
        event = failure(model, torch.ones(2, 3))
    assert event.tried == anynan.events.Trial("log(x + 1e-8)", "finite", "forward")
    assert "the forward pass is finite" in anynan.reports.render(event)


@pytest.mark.parametrize(
    ("function", "repaired"),
    [
        (lambda x: x.abs().sqrt_(), "sqrt(x + 1e-8)"),
        (lambda x: (x.detach() * 0 + 1).div_(x.detach()) + x, "x / (y + 1e-8)"),
        (lambda x: F.softmax(x.masked_fill(x == 0, -torch.inf), -1), "softmax("),
        (lambda x: torch.atan2(x, x).norm() + torch.special.xlogy(x + 1, x), "xlogy("),
    ],
    ids=["in place", "operator in place", "library", "of two operands"],
)
def test_what_only_the_dispatcher_sees_is_repaired(function: Any, repaired: str) -> None:
    tried = body_event(function, [[0.0, 0.0]]).tried
    assert repaired in tried.repair and tried.outcome == "finite"


def test_a_checkpointed_layer_is_repaired_when_it_is_computed_again() -> None:
    fc = nn.Linear(2, 2, bias=False)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = checkpoint(lambda x: torch.sqrt(fc(x)), x, use_reentrant=False).sum()
        loss.backward()
        return loss

    tried = failing(step, torch.zeros(2, 2)).tried
    assert (tried.repair, tried.outcome) == ("sqrt(x + 1e-8)", "finite")


def test_a_gradient_of_a_gradient_is_not_claimed_to_be_tried() -> None:
    def slope(w: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(torch.sqrt(w).sum(), w, create_graph=True)[0]

    assert body_event(slope, [0.0, 0.0]).tried is None


def test_a_second_update_behind_the_first_is_not_claimed_to_be_finite() -> None:
    one, two = Two(second=torch.relu), nn.Linear(3, 1)
    updates = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, two)]

    def step(x: torch.Tensor) -> torch.Tensor:
        train(one, x)
        updates[0].step()
        loss = train(two, x) / 0
        updates[1].step()
        return loss

    assert failing(step, torch.ones(2, 3)).tried is None


def test_an_overflow_that_goes_on_beside_what_was_filled_is_no_second_fault() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3))).half()
    for layer in model:
        layer.weight.data = torch.tensor([[3.0, 0.0], [0.0, 2.0]]).half()
    x = torch.tensor([[30000.0, 10000.0]]).half()
    event = failing(lambda x: model(x).sum(), x)
    assert event.layer == "0"
    assert (event.tried.outcome, event.others) == ("another", ())
    assert "not finite yet" in anynan.reports.render(event)
