"""A hunt over models, losses and training steps."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anynan


class Directions(nn.Module):
    """Scale each row to length one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x / x.norm(dim=1, keepdim=True)
        return torch.log_softmax(self.inner(self.drop(x)), 1)


def _place(finding: Any) -> tuple[str, str]:
    operation = finding.event.operation
    return operation.name, operation.source.text


def test_a_model_is_moved_to_a_row_of_zeros() -> None:
    report = anynan.stress(Directions(), torch.randn(8, 4))
    first = report.findings[0]
    assert (first.words, first.group) == ("x: a row of zeros", "inside")
    assert _place(first) == ("divide", "x = x / x.norm(dim=1, keepdim=True)")
    assert first.event.tried is not None
    assert first.event.tried.outcome == "finite"
    assert [m.site.operation for m in report.margins] == ["vector_norm", "divide"]


def test_the_slope_leads_to_a_probability_of_zero() -> None:
    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return -torch.log(torch.softmax(logits, 1).gather(1, y[:, None])).mean()

    logits, y = torch.randn(8, 4, requires_grad=True), torch.randint(0, 4, (8,))
    finding = anynan.stress(loss, logits, y, domain={"logits": (-90.0, 90.0)}).findings[0]
    line = loss.__code__.co_firstlineno + 1
    words = f"logits: moved towards log at test_stress.py:{line}: smallest argument"
    assert words in (finding.words, *finding.also)
    assert _place(finding)[0] == "log"
    assert finding.event.cause is not None
    assert finding.event.cause.tag in ("log_of_zero", "slope_overflow")
    assert finding.inputs["logits"].max() <= 90


def test_the_gradient_of_a_root_is_found_where_a_loss_is_finite() -> None:
    report = anynan.stress(
        lambda a, b: (a - b).norm(dim=1).sqrt().sum(),
        torch.randn(6, 3, requires_grad=True),
        torch.randn(6, 3),
    )
    first = report.findings[0]
    assert first.words == "b: the same as a"
    assert first.event.phase == "backward"


def test_without_requires_grad_no_gradient_is_taken() -> None:
    assert anynan.stress(lambda x: (x * x).sqrt().sum(), torch.randn(6, 3)).findings == []


@pytest.mark.parametrize("fixed", [False, True])
def test_a_training_step_is_sought_on_what_it_reaches_and_after_training_on(fixed: bool) -> None:
    x = torch.tensor([[1.0, 2], [2, 3], [3, 1], [4, 3], [5, 3], [6, 2]])
    y = torch.tensor([[0.0], [0], [0], [1], [1], [1]])
    w, b = torch.zeros((2, 1), requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([w, b], lr=1)

    def step() -> None:
        p = torch.sigmoid(x.matmul(w) + b)
        p = p.clamp(1e-6, 1 - 1e-6) if fixed else p
        cost = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()
        optimizer.zero_grad()
        cost.backward()
        optimizer.step()

    report = anynan.stress(step)
    if fixed:
        assert report.findings == []
        return
    assert {_place(finding)[0] for finding in report.findings} == {"log"}
    assert len(report.findings) == 2  # one for each logarithm of the line
    assert all("after training on for 1 step" in str(finding) for finding in report.findings)


def test_everything_is_afterwards_as_it_was() -> None:
    model = Directions()
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    model.inner.weight.grad = torch.ones(3, 4)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.nll_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    kept = [p.clone() for p in model.parameters()], x.clone(), torch.get_rng_state()
    assert anynan.stress(step, x, y).runs > 10
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), kept[0], strict=True))
    assert torch.equal(x, kept[1])
    assert torch.equal(torch.get_rng_state(), kept[2])
    assert model.training
    assert not optimizer.state
    assert model.inner.weight.grad is not None
    assert torch.equal(model.inner.weight.grad, torch.ones(3, 4))
    assert model.inner.bias.grad is None
    assert not x.requires_grad


def test_labels_that_are_all_ignored_are_tried() -> None:
    logits, y = torch.randn(8, 4, requires_grad=True), torch.randint(0, 4, (8,))
    first = anynan.stress(F.cross_entropy, logits, y).findings[0]
    assert (first.words, first.group) == ("target: all labels are ignored", "shaped")
    assert first.event.cause is not None
    assert first.event.cause.tag == "empty_mean"


def test_autocast_is_tried() -> None:
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(1e3)
    report = anynan.stress(lambda x: model(model(x)).mean(), torch.full((2, 4), 10.0))
    words = [finding.words for finding in report.findings]
    assert "under autocast in float16: the example itself" in words
