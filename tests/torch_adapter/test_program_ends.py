"""What a program ends over, and numbers that it read and kept, under ``anynan run``."""

import re

import pytest

from tests.torch_adapter.forked import training

GRAM = "torch.linalg.cholesky(z.T @ z + torch.eye(3)).diagonal().log().sum()"
NORMAL = "torch.distributions.Normal(0.0, z.abs() + 1e-9).log_prob(z.detach()).mean()"
ENDED = [
    ("z / (z.std(0) * scale)", GRAM, "LinAlgError"),
    ("z * scale / (z * scale) * 0.5", "bce(z, torch.ones(8, 3))", "between 0 and 1"),
    ("z * scale / (z * scale)", "(model.weight[0][z.long() - 1] * z).mean()", "out of bounds"),
    ("z * scale / (z * scale)", NORMAL, "constraint"),
    ("1 / (kept := 1 / (z.exp() * scale))", NORMAL.replace(" + 1e-9", ""), "constraint"),
]


def ending(made: str, taken: str) -> str:
    before = f"""
    model, bce = torch.nn.Linear(4, 3), torch.nn.BCELoss()
    def loss_of(z, scale):
        z = {made}
        return {taken}
    """
    return training("loss_of(model(torch.rand(8, 4)), 0.0 if i == 2 else 1.0)", before)


@pytest.mark.parametrize(("made", "taken", "said"), ENDED)
def test_what_an_operation_refuses_without_a_word_of_nan_has_its_line(made, taken, said, run):
    done = run(ending(made, taken))
    done.fails(said)
    assert re.search("op (divide|reciprocal)", done.first)
    assert f"z = {made}" in done.first and "[divide_by_zero]" in done.first


@pytest.mark.parametrize(
    "end",
    [
        "torch.linalg.cholesky(-torch.eye(3))",
        "torch.distributions.Normal(0.0, -z.exp())",
        "caught() or dict()[0]",
    ],
)
def test_what_has_no_part_in_how_the_program_ends_is_not_blamed(run, end: str) -> None:
    made = "z.masked_fill(z > z.mean(), -float('inf')).softmax(1)"
    tried = "torch.linalg.cholesky(torch.zeros(3, 3) / torch.zeros(3, 3))"
    caught = f"def caught():\n  try: {tried}\n  except RuntimeError: return 0\n"
    said = run(caught + ending(made, f"z.sum() if scale else {end}")).said
    assert "Error" in said and "AnynanWarning" not in said


KEEP, LOG = "history.append(measure.item())", "torch.log(-loss) if i == 1 else loss"


@pytest.mark.parametrize(
    ("made", "read", "name"),
    [
        (LOG, KEEP, "log"),
        ("torch.tensor(float('inf')) if i == 1 else loss", KEEP, ""),
        (LOG, "history += [1] * int(measure < 9)", ""),
        (LOG, "if measure < 9: history.append(1)", "log"),
    ],
)
def test_a_bad_measure_that_the_program_kept_is_a_note(run, made, read, name: str) -> None:
    before = "model, history = torch.nn.Linear(4, 1), []"
    after = f"with torch.no_grad():\n    measure = {made}\n    {read}"
    program = training("model(torch.randn(8, 4)).square().mean()", before, after)
    done = run(program + "print(sum(history), i)", "--fail")
    assert done.status == 0 and ("nan" in done.out or "inf" in done.out or read is not KEEP)
    done.tells("nothing went bad in")
    assert "AnynanWarning" not in done.said and ("[read-bad]" in done.said) is bool(name)
    if name:
        done.tells(f"read at script.py:9 was made by {name} at script.py:8")


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
def test_nan_that_ends_in_what_the_program_picks_is_told(run, scores, pick, told: bool) -> None:
    loss = f"""0
    with torch.no_grad():
        out = model(torch.randn(8, 4))
        scores = {scores}
        print(scores.{pick})
    loss = model(torch.randn(8, 4)).square().mean()"""
    said = run(training(loss)).said
    assert ("AnynanWarning: NaN" in said) is told
    assert ("op divide" in said and "script.py:8" in said) is told


CLOSURE = """
import torch
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


def test_the_first_gradient_that_a_closure_makes_is_read(run) -> None:
    first = run(CLOSURE).first
    assert "op gradient of sqrt" in first and "of step 0" in first


AVERAGE = """
import copy
model = torch.nn.Linear(4, 2)
average = copy.deepcopy(model)
def update(i):
    with torch.no_grad():
        for p, q in zip(average.{of}, model.{of}):
            p{data}.mul_(0.9).add_({made})
"""


@pytest.mark.parametrize(
    ("made", "steps", "data", "of", "said"),
    [
        ("q / (q.norm() * (i != 16))", 20, "", "parameters()", "script.py:8 writes holds"),
        ("q, alpha=0.1", 3, "", "parameters()", "nothing went bad"),
        # Gone as the program ends, as what a function holds.
        ("q / (q.norm() * (i != 0))", 3, "", "parameters()", "op divide"),
        ("q.data / (q.norm() * (i != 1))", 3, ".data", "parameters()", "op divide"),
        ("q / (q.norm() * (i != 1))", 3, "", "state_dict().values()", "op divide"),
    ],
)
def test_an_average_that_never_runs_is_looked_at(run, made, steps, data, of, said: str) -> None:
    before = AVERAGE.format(made=made, data=data, of=of)
    program = training("model(torch.randn(8, 4)).square().mean()", before, "update(i)", steps=steps)
    run(program + ("del average" if re.search(r"i != [01]\)", made) else "")).tells(said)
