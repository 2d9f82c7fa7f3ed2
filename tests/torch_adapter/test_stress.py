"""A hunt over models, losses and training steps."""

import itertools
import runpy
import sys
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anynan
from anynan._apps.stress import hunt
from anynan._apps.stress.messages import NOTHING_TO_CHANGE
from anynan._cli.commands import main


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
    assert first.event.tried.outcome == "finite"
    assert [m.site.operation for m in report.margins] == ["vector_norm", "divide"]


def test_the_slope_leads_to_a_probability_of_zero() -> None:
    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return -torch.log(torch.softmax(logits, 1).gather(1, y[:, None])).mean()

    logits, y = torch.randn(8, 4, requires_grad=True), torch.randint(0, 4, (8,))
    findings = anynan.stress(loss, logits, y, domain={"logits": (-90.0, 90.0)}).findings
    finding = findings[0]
    line = loss.__code__.co_firstlineno + 1
    words = f"logits: moved towards log at test_stress.py:{line}: smallest argument"
    assert any(words in (x.words, *x.also) for x in findings)
    assert _place(finding)[0] == "log"
    assert finding.event.cause.tag in ("log_of_zero", "slope_overflow")
    assert finding.inputs["logits"].max() <= 90


def test_a_hunt_depends_neither_on_the_clock_nor_on_what_was_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return -torch.log(torch.softmax(logits, 1).gather(1, y[:, None])).mean()

    logits, y = torch.randn(8, 4, requires_grad=True), torch.randint(0, 4, (8,))

    def told(seconds: float, left: float) -> tuple[str, int]:
        """Hunt where a look at the clock takes so long, and freed memory holds such numbers."""
        clock = itertools.count(0.0, seconds)
        monkeypatch.setattr(hunt, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        freed = [torch.full((8, 4), left) for _ in range(400)]
        del freed
        report = anynan.stress(loss, logits, y, domain={"logits": (-90.0, 90.0)})
        assert report.notes == []
        return str(report), report.runs

    fast = told(1e-6, 0.0)
    assert [told(0.1, left) for left in (float("nan"), 1.0, float("inf"))] == [fast] * 3


def test_a_gradient_that_the_target_leaves_to_its_caller_is_told_apart(tmp_path: Path) -> None:
    def lengths(x: torch.Tensor) -> torch.Tensor:
        return (x * x).sum(1).sqrt().sum()

    x = torch.randn(6, 3)
    report = anynan.stress(lengths, x)
    assert report.ok
    (finding,) = report.findings
    assert str(finding).startswith("x: a row of zeros (if its gradient is taken, ")
    assert _place(finding) == ("sqrt", "return (x * x).sum(1).sqrt().sum()")
    assert (finding.event.phase, x.requires_grad) == ("backward", False)
    assert "\nif its gradient is taken\n  x: a row of zeros\n" in str(report)
    again = {"inputs": finding.inputs, "mode": finding.mode}
    assert not anynan.stress(lengths, x, found=again).ok
    assert anynan.stress(lambda x: (x * x).sum(1).add(1e-8).sqrt().sum(), x).findings == []


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

    findings = [x for x in anynan.stress(step).findings if x.words != "an empty batch"]
    if fixed:
        assert findings == []
        return
    assert [_place(finding)[0] for finding in findings] == ["log"] * 2  # two are in the line
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
    report = anynan.stress(step, x)
    findings = [x for x in report.findings if x.words != "an empty batch"]
    if not fixed:
        (finding,) = findings
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
    else:
        assert findings == []
    assert all(torch.equal(p, old) for p, old in zip(weights, before, strict=True))
    assert all(p.grad is None for p in weights)


def test_what_a_program_draws_rarely_is_tried() -> None:
    def waits(x: torch.Tensor) -> torch.Tensor:
        return -torch.log(torch.rand(6)) * x

    def mended(x: torch.Tensor) -> torch.Tensor:
        return -torch.log1p(-torch.rand(6)) * x

    def share(x: torch.Tensor) -> torch.Tensor:
        seen = torch.full((6,), 0.5).bernoulli()
        return (x * seen).sum() / seen.sum()

    x, state = torch.rand(6) + 1, torch.get_rng_state()
    line = waits.__code__.co_firstlineno + 1
    finding = anynan.stress(waits, x).findings[0]
    assert finding.mode == f"where rand at test_stress.py:{line} draws a 0"
    assert (_place(finding)[0], finding.group) == ("log", "inside")
    (again,) = anynan.stress(waits, x, found={"mode": finding.mode}).findings
    assert _place(again) == _place(finding)
    assert anynan.stress(mended, x).findings == []
    finding = anynan.stress(share, x).findings[0]
    assert finding.mode.endswith("draws nothing but 0")
    assert _place(finding)[0] == "divide"
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.tier(2)
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
    assert str(first).endswith(" (another shape, label or mask)")
    assert first.event.cause.tag == "empty_mean"


def test_autocast_is_tried() -> None:
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(1e3)
    report = anynan.stress(lambda x: model(model(x)).mean(), torch.full((2, 4), 10.0))
    words = [finding.words for finding in report.findings]
    assert "under autocast in float16: the example itself" in words


def test_a_step_that_returns_nothing_is_judged_by_what_it_leaves() -> None:
    global _logits  # noqa: PLW0603  as in a script's loop
    before = _logits = torch.rand(3, 5, requires_grad=True)

    def step(batch: None) -> None:  # a statement of a script's loop that reads no batch gives None
        global _logits, _loss  # noqa: PLW0603
        _logits = torch.autograd.Variable(_logits, requires_grad=True)
        _loss = -torch.log(torch.softmax(_logits, 1)).mean()

    finding = anynan.stress(step, None).findings[-1]
    assert finding.words == "_logits: 10000 times as far apart"
    assert _place(finding)[0] == "log"
    assert _logits is before


def test_a_script_is_hunted_in_by_its_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = (
        "import sys, torch\n"
        "x, y = torch.rand(6, 2), torch.ones(6, 1) * float(sys.argv[1])\n"
        "w = torch.zeros(2, 1, requires_grad=True)\n"
        "for epoch in range(1000):\n"
        "    p = torch.sigmoid(x @ w)\n"
        "    loss = -(y * torch.log(p)).mean()\n"
        "    loss.backward()\n"
        "    w.data -= w.grad; w.grad = None\n"
        "raise SystemExit(7)\n"
    )
    Path("train.py").write_text(script)
    before = list(sys.argv), list(sys.path), sys.modules["__main__"]
    assert main(["stress", "--budget", "30", "--to-pytest", "test_found.py", "train.py", "1"]) == 0
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before
    out = capsys.readouterr().out
    assert "log at train.py:6: smallest argument 0.5" in out
    assert "x: moved towards log at train.py:6: smallest argument, after training" in out
    tests = runpy.run_path("test_found.py")
    (found,) = (test for name, test in tests.items() if "moved_towards_log" in name)
    with pytest.raises(AssertionError, match="op      log"):
        found()
    Path("train.py").write_text(script.replace("torch.sigmoid(x @ w)", "(x @ w).sigmoid() + 1e-6"))
    found()


_logits: torch.Tensor
_loss: torch.Tensor


@dataclass
class Batch:
    """Hold tensors, as the batches of libraries do."""

    x: torch.Tensor
    many: int = 3


@pytest.mark.parametrize("pack", [list, dict, UserDict, Batch, SimpleNamespace])
def test_what_a_batch_holds_is_changed_and_told_if_it_cannot_be(pack: Any) -> None:
    def step(batch: Any) -> Any:
        x = batch[0] if pack is list else batch["x"] if pack in (dict, UserDict) else batch.x
        return (1 / x).sum()

    x = torch.linspace(-1, 1, 6).reshape(3, 2)
    report = anynan.stress(step, [x] if pack is list else pack(x=x))
    if pack is SimpleNamespace:
        assert report.notes == [NOTHING_TO_CHANGE()]
    else:
        assert report.findings[0].words.endswith("a row of zeros")


def test_tensors_without_numbers_of_their_own_stay_as_they_are() -> None:
    graph = torch.eye(3).to_sparse()
    report = anynan.stress(lambda a, x: torch.log(torch.sparse.mm(a, x)).sum(), graph, _rows())
    assert [x.site.operation for x in report.margins] == ["log"]
    assert torch.equal(graph.to_dense(), torch.eye(3))


def _rows() -> torch.Tensor:
    return torch.linspace(1, 2, 6).reshape(3, 2)


def test_an_input_that_would_end_the_process_is_not_tried() -> None:
    report = anynan.stress(lambda x: torch.pdist(x).sum(), torch.randn(4, 3), budget=5)
    assert any("pdist" in note and "was not tried" in note for note in report.notes)

    def ctc(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(x.log_softmax(2), labels, torch.full((2,), 8), torch.full((2,), 3))

    bag = nn.EmbeddingBag(9, 4)
    assert anynan.stress(bag, torch.tensor([1, 2, 4, 5]), torch.tensor([0, 2]), budget=5).notes
    report = anynan.stress(ctc, torch.randn(8, 2, 5), torch.randint(1, 5, (2, 3)), budget=5)
    assert any("all labels are ignored was not tried: aten._ctc" in x for x in report.notes)
