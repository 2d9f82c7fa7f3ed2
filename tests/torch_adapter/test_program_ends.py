"""What a program ends over, and numbers that it read and kept, under ``anynan run``."""

import re
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
        "torch.linalg.cholesky(-torch.eye(3))",
        "torch.distributions.Normal(0.0, -z.exp())",
        "caught() or dict()[0]",
    ],
)
def test_what_has_no_part_in_how_the_program_ends_is_not_blamed(tmp_path: Path, end: str) -> None:
    made = "z.masked_fill(z > z.mean(), -float('inf')).softmax(1)"
    ended = f"z.sum() if scale else {end}"
    tried = "torch.linalg.cholesky(torch.zeros(3, 3) / torch.zeros(3, 3))"
    caught = f"def caught():\n  try: {tried}\n  except RuntimeError: return 0"
    _, _, told = run(tmp_path, caught + ENDS.format(made=made, taken=ended))
    assert "Error" in told and "AnynanWarning" not in told


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
        {read}
print(sum(history), i)
"""
KEEP = "history.append(measure.item())"


@pytest.mark.parametrize(
    ("made", "read", "name"),
    [
        ("torch.log(-loss) if i == 1 else loss", KEEP, "log"),
        ("torch.tensor(float('inf')) if i == 1 else loss", KEEP, ""),
        ("torch.log(-loss) if i == 1 else loss", "history += [1] * int(measure < 9)", ""),
        ("torch.log(-loss) if i == 1 else loss", "if measure < 9: history.append(1)", "log"),
    ],
)
def test_a_bad_measure_that_the_program_kept_is_a_note(
    tmp_path: Path, made: str, read: str, name: str
) -> None:
    status, out, told = run(tmp_path, METRIC.format(made=made, read=read), "--fail")
    assert status == 0 and ("nan" in out or "inf" in out or read is not KEEP)
    assert "nothing went bad in" in told and "AnynanWarning" not in told
    assert ("[read-bad]" in told) is bool(name)
    if name:
        assert f"read at script.py:12 was made by {name} at script.py:11" in told


PICKED = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(4):
    with torch.no_grad():
        out = model(torch.randn(8, 4))
        scores = {scores}
        print(scores.{pick})
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
UNIT = "out * (i != 2) / (out * (i != 2)).norm(dim=1, keepdim=True)"


@pytest.mark.parametrize(
    ("scores", "pick", "told"),
    [
        (UNIT, "argmax(1)", True),
        (UNIT, "max(1)[1]", True),
        ("out.masked_fill(out < 9, -torch.inf)", "argmax(1)", False),
        ("torch.where(out < 9, torch.nan, out) + 1", "argmax(1)", False),  # missing values
        ("out / (out - out)", "argmax(1)", False),  # what is far away has no weight
    ],
)
def test_nan_that_ends_in_what_the_program_picks_is_told(
    tmp_path: Path, scores: str, pick: str, told: bool
) -> None:
    said = run(tmp_path, PICKED.format(scores=scores, pick=pick))[2]
    assert ("AnynanWarning: NaN" in said) is told
    assert ("op divide" in said and "script.py:9" in said) is told


CLOSURE = """
import torch
torch.manual_seed(0)
class Model(torch.nn.Linear):
    def forward(self, x):
        return (super().forward(x) * (i != 0)).square().sum(1).sqrt()
model = Model(4, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
def closure():
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).mean()
    loss.backward()
    return loss
for i in range(2):
    optimizer.step(closure)
"""


def test_the_first_gradient_that_a_closure_makes_is_read(tmp_path: Path) -> None:
    told = run(tmp_path, CLOSURE)[2]
    first = told.partition("AnynanWarning")[2].partition("anynan: ")[0]
    assert "op gradient of sqrt" in first and "of step 0" in first


AVERAGE = """
import copy
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
average = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def update(i):
    with torch.no_grad():
        for p, q in zip(average.{of}, model.{of}):
            p{data}.mul_(0.9).add_({made})
for i in range({steps}):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    update(i)
{end}
"""


@pytest.mark.parametrize(
    ("made", "steps", "data", "of", "said"),
    [
        ("q / (q.norm() * (i != 16))", 20, "", "parameters()", "script.py:11 writes holds"),
        ("q, alpha=0.1", 3, "", "parameters()", "nothing went bad"),
        # Gone as the program ends, as what a function holds.
        ("q / (q.norm() * (i != 0))", 3, "", "parameters()", "op divide"),
        ("q.data / (q.norm() * (i != 1))", 3, ".data", "parameters()", "op divide"),
        ("q / (q.norm() * (i != 1))", 3, "", "state_dict().values()", "op divide"),
    ],
)
def test_an_average_that_never_runs_is_looked_at(
    tmp_path: Path, made: str, steps: int, data: str, of: str, said: str
) -> None:
    end = "del average" if re.search(r"i != [01]\)", made) else ""
    program = AVERAGE.format(made=made, steps=steps, data=data, of=of, end=end)
    assert said in run(tmp_path, program)[2]
