"""Gradients that pass through several models, that the program asks for, or of its own weights."""

from pathlib import Path

import pytest

from tests.torch_adapter.forked import run

LOOP = """
import torch
from torch import nn
torch.manual_seed(0)
class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)
    def forward(self, x):
        return self.layer(x.square().sqrt())
first, second, root, free = nn.Linear(4, 3), nn.Linear(3, 4), Root(), nn.Parameter(torch.ones(3))
weights = [*first.parameters(), *second.parameters(), *root.parameters(), free]
optimizer = torch.optim.SGD({trained}, lr=0.01)
for i in range(4):
    k = {k}
    x = torch.full((2, 3), k, requires_grad=True)
    {step}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
MADE = {
    "between models": "loss = second((first(torch.ones(2, 4)) * k).square().sqrt()).mean()",
    "in the next model": "loss = root(first(torch.ones(2, 4)) * k).mean()",
    "asked for, before the model": (
        "loss = torch.autograd.grad(second(x.square().sqrt()).sum(), x, create_graph=True)[0].sum()"
    ),
    "asked for, in the model": (
        "loss = nn.MSELoss()(torch.autograd.grad(root(x).sum(), x, create_graph=True)[0], x)"
    ),
    "of a free weight": "loss = second(x).mean() + (free * k).square().sqrt().sum()",
    "of a free weight, before the model": "loss = second((free * k).square().sqrt()).mean()",
}


def told(tmp_path: Path, step: str, *, k: str = "float(i != 2)", trained: str = "weights") -> str:
    return run(tmp_path, LOOP.format(step=step, k=k, trained=trained))[2]


@pytest.mark.parametrize("step", MADE.values(), ids=MADE)
def test_the_operation_is_told_once_with_its_line(tmp_path: Path, step: str) -> None:
    said = told(tmp_path, step)
    assert "op gradient of sqrt" in said
    before = LOOP.partition("return" if "root" in step else "{step}")[0]
    assert f"sqrt at {tmp_path}/script.py:{len(before.splitlines())}: " in said
    assert "backward pass of step 2" in said
    assert ("gradient of free" in said) is ("free" in step)
    assert said.count("AnynanWarning") == 1


@pytest.mark.parametrize("step", [MADE["asked for, in the model"], MADE["of a free weight"]])
def test_a_clean_program_is_clean(tmp_path: Path, step: str) -> None:
    said = told(tmp_path, step, k="1.0")
    assert "nothing went bad" in said
    assert "the program" not in said


def test_what_only_is_trained_is_no_data(tmp_path: Path) -> None:
    step = "loss = second(free).mean() + (free * k).norm().square().sqrt()"
    said = told(tmp_path, step, trained="[free]")
    assert "op gradient of sqrt" in said
    assert "data set" not in said
