"""What a program ends over, and numbers that it read and kept, under ``anynan run``."""

from pathlib import Path

import pytest

from tests.torch_adapter.forked import run

ENDS = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
bce = torch.nn.BCELoss()
def loss_of(z, scale):
    z = {made}
    return {taken}
for i in range(4):
    loss = loss_of(model(torch.rand(8, 4)), 0.0 if i == 2 else 1.0)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
GRAM = "torch.linalg.cholesky(z.T @ z + torch.eye(3)).diagonal().log().sum()"
NORMAL = "torch.distributions.Normal(0.0, z.abs() + 1e-9).log_prob(z.detach()).mean()"
ENDED = [
    ("z / (z.std(0) * scale)", GRAM, "LinAlgError"),
    ("(z * scale - z).abs() / (z - z * scale).abs()", GRAM, "LinAlgError"),
    ("z * scale / (z * scale) * 0.5", "bce(z, torch.ones(8, 3))", "between 0 and 1"),
    ("z * scale / (z * scale)", "(model.weight[0][z.long() - 1] * z).mean()", "out of bounds"),
    ("z * scale / (z * scale)", NORMAL, "constraint"),
    ("1 / (kept := 1 / (z.exp() * scale))", NORMAL.replace(" + 1e-9", ""), "constraint"),
]


@pytest.mark.parametrize(("made", "taken", "said"), ENDED)
def test_what_an_operation_refuses_without_a_word_of_nan_has_its_line(
    tmp_path: Path, made: str, taken: str, said: str
) -> None:
    status, _, told = run(tmp_path, ENDS.format(made=made, taken=taken))
    assert status == 1 and said in told
    first = told.partition("AnynanWarning")[2].partition("anynan: ")[0]
    assert "op divide" in first or "op reciprocal" in first
    assert f"z = {made}" in first
    assert "[divide_by_zero]" in first


@pytest.mark.parametrize(
    "end",
    [
        "z @ torch.ones(7)",
        "torch.linalg.cholesky(-torch.eye(3))",
        "torch.distributions.Normal(0.0, -z.exp())",
        "dict()[0]",
    ],
)
def test_what_has_no_part_in_how_the_program_ends_is_not_blamed(tmp_path: Path, end: str) -> None:
    made = "z.masked_fill(z > z.mean(), -float('inf')).softmax(1)"
    ended = f"z.sum() if scale else {end}"
    _, _, told = run(tmp_path, ENDS.format(made=made, taken=ended))
    assert "Error" in told and "AnynanWarning" not in told


CAUGHT = """
import torch
bad = torch.zeros(3, 3) / torch.zeros(3, 3)
try:
    torch.linalg.cholesky(bad)
except RuntimeError:
    pass
torch.ones(3) @ torch.ones(4)
"""


def test_what_the_program_caught_is_not_what_it_ended_over(tmp_path: Path) -> None:
    assert "AnynanWarning" not in run(tmp_path, CAUGHT)[2]


METRIC = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for i in range(4):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    with torch.no_grad():
        measure = {made}
        history.append(measure.item())
print(sum(history))
"""


@pytest.mark.parametrize(
    ("made", "name"),
    [
        ("torch.log(-loss) if i == 1 else loss", "log"),
        ("loss / (loss * (i != 1))", "divide"),
        ("torch.tensor(float('inf')) if i == 1 else loss", ""),
    ],
)
def test_a_bad_measure_that_the_program_kept_is_a_note(
    tmp_path: Path, made: str, name: str
) -> None:
    status, out, told = run(tmp_path, METRIC.format(made=made), "--fail")
    assert status == 0 and ("nan" in out or "inf" in out)
    assert "nothing went bad in" in told and "AnynanWarning" not in told
    assert ("[read-bad]" in told) is bool(name)
    if name:
        assert f"read at script.py:12 was made by {name} at script.py:11" in told
