"""A hunt over models, losses and training steps."""

from pathlib import Path
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
        self.inner, self.drop = nn.Linear(4, 3), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x / x.norm(dim=1, keepdim=True)
        return torch.log_softmax(self.inner(self.drop(x)), 1)


def _place(finding: Any) -> tuple[str, str]:
    return finding.event.operation.name, finding.event.operation.source.text


def _beyond(report: Any) -> list[Any]:
    return [finding for finding in report.findings if finding.words != "an empty batch"]


def test_a_model_is_moved_to_a_row_of_zeros() -> None:
    report = anynan.stress(Directions(), torch.randn(8, 4))
    first = report.findings[0]
    assert (first.words, first.group) == ("x: a row of zeros", "inside")
    assert _place(first) == ("divide", "x = x / x.norm(dim=1, keepdim=True)")
    assert first.event.tried.outcome == "finite"
    assert [m.site.operation for m in report.margins] == ["vector_norm", "divide"]


def test_the_slope_leads_to_a_probability_of_zero() -> None:
    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return -torch.log(torch.softmax(logits, 1).gather(1, y[:, None])).mean()

    logits, y = torch.randn(8, 4, requires_grad=True), torch.randint(0, 4, (8,))
    finding, *others = anynan.stress(loss, logits, y, domain={"logits": (-90.0, 90.0)}).findings
    line = loss.__code__.co_firstlineno + 1
    words = f"logits: moved towards log at test_stress.py:{line}: smallest argument"
    assert any(words in (x.words, *x.also) for x in (finding, *others))
    assert _place(finding)[0] == "log"
    assert finding.event.cause.tag in ("log_of_zero", "slope_overflow")
    assert finding.inputs["logits"].max() <= 90


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

    findings = _beyond(anynan.stress(step))
    assert [_place(finding)[0] for finding in findings] == ["log"] * (0 if fixed else 2)
    assert all("after training on for 1 step" in str(finding) for finding in findings)


@pytest.mark.parametrize("fixed", [False, True])
def test_weights_are_moved_to_an_edge_that_no_data_leads_to(fixed: bool, tmp_path: Path) -> None:
    model, shift = nn.Linear(6, 4), torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), shift], lr=0.1)

    def step(x: torch.Tensor) -> None:
        z = model(x.bernoulli()) + shift
        loss = torch.log(1 + torch.exp(z.clamp(max=80) if fixed else z)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    x, weights = torch.full((8, 6), 0.5), [*model.parameters(), shift]
    before = [p.clone() for p in weights]
    findings = _beyond(anynan.stress(step, x))
    assert len(findings) == (0 if fixed else 1)
    for finding in findings:
        line = step.__code__.co_firstlineno + 2
        assert finding.what == (
            "other weights (shift, weight, bias): moved towards exp at "
            f"test_stress.py:{line}: largest argument"
        )
        assert (_place(finding)[0], finding.group) == ("exp", "outside")
        assert finding.event.tried.outcome == "finite"
        (again,) = anynan.stress(step, x, found={"inputs": finding.inputs}).findings
        assert _place(again) == _place(finding)
        finding.save(tmp_path / "bundle")
    assert all(torch.equal(p, old) for p, old in zip(weights, before, strict=True))
    assert all(p.grad is None for p in weights)


def test_what_a_program_draws_rarely_is_tried() -> None:
    def waits(x: torch.Tensor) -> torch.Tensor:
        return -torch.log(torch.rand(6)) * x

    def share(x: torch.Tensor) -> torch.Tensor:
        return x.sum() / torch.full((6,), 0.5).bernoulli().sum()

    x, state = torch.rand(6) + 1, torch.get_rng_state()
    line = waits.__code__.co_firstlineno + 1
    finding = anynan.stress(waits, x).findings[0]
    assert finding.mode == f"where rand at test_stress.py:{line} draws a 0"
    assert (_place(finding)[0], finding.group) == ("log", "inside")
    (again,) = anynan.stress(waits, x, found={"mode": finding.mode}).findings
    assert _place(again) == _place(finding)
    assert anynan.stress(lambda x: -torch.log1p(-torch.rand(6)) * x, x).findings == []
    finding = anynan.stress(share, x).findings[0]
    assert finding.mode.endswith("draws nothing but 0")
    assert _place(finding)[0] == "divide"
    assert torch.equal(torch.get_rng_state(), state)


def test_labels_that_are_all_ignored_are_tried() -> None:
    logits, y = torch.randn(8, 4, requires_grad=True), torch.randint(0, 4, (8,))
    first = anynan.stress(F.cross_entropy, logits, y).findings[0]
    assert (first.words, first.group) == ("target: all labels are ignored", "shaped")
    assert str(first).endswith(" (another shape, label or mask)")
    assert first.event.cause.tag == "empty_mean"


def test_autocast_is_tried() -> None:
    model = nn.Linear(4, 4)
    model.weight.data.fill_(1e3)
    report = anynan.stress(lambda x: model(model(x)).mean(), torch.full((2, 4), 10.0))
    words = [finding.words for finding in report.findings]
    assert "under autocast in float16: the example itself" in words


def test_tensors_without_numbers_of_their_own_stay_as_they_are() -> None:
    graph, rows = torch.eye(3).to_sparse(), torch.linspace(1, 2, 6).reshape(3, 2)
    report = anynan.stress(lambda a, x: torch.log(torch.sparse.mm(a, x)).sum(), graph, rows)
    assert [x.site.operation for x in report.margins] == ["log"]
    assert torch.equal(graph.to_dense(), torch.eye(3))


def test_an_input_that_would_end_the_process_is_not_tried() -> None:
    report = anynan.stress(lambda x: torch.pdist(x).sum(), torch.randn(4, 3), budget=60)
    assert any("pdist" in note and "was not tried" in note for note in report.notes)

    def ctc(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(x.log_softmax(2), labels, torch.full((2,), 8), torch.full((2,), 3))

    bag = nn.EmbeddingBag(9, 4)
    assert anynan.stress(bag, torch.tensor([1, 2, 4, 5]), torch.tensor([0, 2]), budget=60).notes
    report = anynan.stress(ctc, torch.randn(8, 2, 5), torch.randint(1, 5, (2, 3)), budget=60)
    assert any("all labels are ignored was not tried: aten._ctc" in x for x in report.notes)
