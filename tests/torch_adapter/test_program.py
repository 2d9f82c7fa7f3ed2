"""Programs without modules, and losses that no backward pass begins with, under ``anynan run``."""

from pathlib import Path

import pytest

from tests.torch_adapter.forked import run

LOOP = """
import torch
torch.manual_seed(0)
w = torch.randn(4, requires_grad=True)
x, y = torch.rand(16, 4), torch.rand(16)
for i in range(6):
    p = torch.sigmoid((x @ w) * (1 + i) * 20)
    {loss}
    {update}
print(float(w.sum()))
"""
LOG = "loss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()"
BACKWARD = "loss.backward(); w.data -= 0.5 * w.grad; w.grad = None"
GRAD = "(g,) = torch.autograd.grad(loss, w); w = (w - 0.5 * g).detach().requires_grad_()"


@pytest.mark.parametrize("update", [BACKWARD, GRAD])
def test_a_loop_over_plain_tensors_is_told_operation_line_and_fix(
    tmp_path: Path, update: str
) -> None:
    status, _, said = run(tmp_path, LOOP.format(loss=LOG, update=update), "--fail")
    assert status == 1
    assert "op log" in said
    assert LOG in said
    assert "[log_of_zero]" in said
    assert "tried with log(x + 1e-8) the loss is finite" in said


def test_a_clean_loop_over_plain_tensors_is_clean(tmp_path: Path) -> None:
    loss = "loss = (p - y).square().mean()"
    status, out, said = run(tmp_path, LOOP.format(loss=loss, update=BACKWARD), "--fail")
    assert status == 0
    assert "the program: nothing went bad in 6 steps" in said
    assert out.strip() != "nan"


MODEL = """
import math, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for i in range(6):
    out = model(torch.ones(2, 4))
    loss = (out.pow(2).mean() - i).sqrt()
    {check}
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
CHECKS = [
    "if torch.isnan(loss): break",
    "if math.isnan(float(loss)): raise SystemExit('loss is NaN')",
    "print(loss.detach() if i < 1 else loss)\n    if i: break",
]


@pytest.mark.parametrize("check", CHECKS)
def test_a_program_that_stops_over_its_loss_is_told(tmp_path: Path, check: str) -> None:
    _, _, said = run(tmp_path, MODEL.format(check=check))
    assert "op sqrt" in said
    assert "loss = (out.pow(2).mean() - i).sqrt()" in said
    assert "[sqrt_of_negative]" in said


def test_a_measure_that_is_bad_and_goes_nowhere_is_no_event(tmp_path: Path) -> None:
    program = """
    import torch
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for i in range(4):
        out = model(torch.ones(2, 4))
        with torch.no_grad():
            print((model(torch.ones(2, 4)) * torch.nan).mean().item())
        print(((out - out) / 0).mean().item())
        optimizer.zero_grad(); out.pow(2).mean().backward(); optimizer.step()
    print(torch.tensor(float("inf")).item())
    """
    status, out, said = run(tmp_path, program, "--fail")
    assert (status, out.split()) == (0, [*["nan"] * 8, "inf"])
    assert "1 bad in" not in said


def test_an_exception_that_names_nan_is_told_its_operation(tmp_path: Path) -> None:
    sample = "torch.distributions.Categorical(logits=logits).sample()"
    program = f"""
    import torch
    model = torch.nn.Linear(4, 2)
    def act(x):
        logits = model(x).masked_fill(x[:, :1] > 0.5, float("-inf"))
        return {sample}
    act(torch.tensor([[0.9, 0.0, 0.0, 0.0]]))
    """
    status, _, said = run(tmp_path, program)
    assert status == 1
    assert "in `act`" in said
    assert sample in said


def test_weights_that_are_bad_as_the_program_ends_count(tmp_path: Path) -> None:
    program = """
    import torch
    model = torch.nn.Linear(4, 2)
    model(torch.ones(2, 4)).sum().backward()
    model.weight.data.fill_(float("nan"))
    model.bias.data.fill_(float("nan"))
    """
    status, _, said = run(tmp_path, program, "--fail")
    assert status == 1
    assert said.count("holds NaN as the program ends") == 1
    assert "Linear: weight (and 1 more) holds NaN as the program ends" in said


def test_the_same_fault_again_is_one_event_and_none_of_the_programs_own_trackers(
    tmp_path: Path,
) -> None:
    loop = LOOP.format(loss="loss = torch.log(w * 0).sum()", update="loss.backward()")
    _, _, said = run(tmp_path, loop)
    assert "6 bad in 6 steps" in said
    assert "6 times" in said
    assert said.count(" event ") == 1
    assert "calls track itself" not in said


TAKEN_OUT = """
import torch
from torch.func import grad_and_value, vmap
def nll(w, x):
    return torch.log((w * x).sum())
for x in (torch.ones(2), -torch.ones(2)):
    _, losses = vmap(grad_and_value(nll), in_dims=(0, None))(torch.ones(3, 2), x)
    print(losses.{taken})
"""


@pytest.mark.parametrize("taken", ["tolist()", "numpy()", "sum(0, True).mean().numpy()"])
def test_what_the_program_takes_out_of_tensors_is_told_at_its_last_line(
    taken: str, tmp_path: Path
) -> None:
    status, _, said = run(tmp_path, TAKEN_OUT.format(taken=taken), "--fail")
    assert status == 1
    assert "op log" in said
    assert "return torch.log((w * x).sum())" in said
    assert f"script.py:{len(TAKEN_OUT.splitlines())}: AnynanWarning" in said


def test_missing_values_that_the_program_takes_out_are_no_harm(tmp_path: Path) -> None:
    program = """
    import torch
    x = torch.tensor([1.0, float("nan"), 2.0])
    print(x.tolist(), x.numpy(), x, x[x == x].tolist(), x.nanmean().item())
    y = torch.ones(3, requires_grad=True)
    y.sum().backward()
    print((y * 2).masked_fill(x > 1, float("-inf")))
    """
    status, _, said = run(tmp_path, program, "--fail")
    assert status == 0
    assert "1 bad in" not in said


BY_HAND = """
import torch, torch.nn.functional as F
torch.manual_seed(0)
fc = torch.nn.Linear(4, 1)
for i in range(4):
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    fc.zero_grad()
    loss = F.smooth_l1_loss(fc(x), y) + {more}
    loss.backward()
    for p in fc.parameters():
        p.data.add_(-0.1 * p.grad)
"""


@pytest.mark.parametrize("value", ["fc.weight", "fc(x)"])
def test_a_gradient_of_a_model_that_no_optimizer_updates_is_told_once(
    value: str, tmp_path: Path
) -> None:
    more = f"({value} * 0).pow(2).sum().sqrt()"
    _, _, said = run(tmp_path, BY_HAND.format(more=more))
    assert "first appeared in the backward pass of step 0" in said
    assert "op gradient of sqrt" in said
    assert more in said
    assert "[norm_gradient_at_zero]" in said
    assert said.count(" event ") == 1


OF_TENSORS = "w = torch.ones(4, 1, requires_grad=True); optimizer = torch.optim.Adam([w])"
OF_MODEL = "w = torch.nn.Linear(4, 1); optimizer = torch.optim.Adam(w.parameters())"


@pytest.mark.parametrize(("weights", "out"), [(OF_TENSORS, "x @ w"), (OF_MODEL, "w(x)")])
def test_optimizer_state_that_is_bad_as_the_program_ends_counts(
    weights: str, out: str, tmp_path: Path
) -> None:
    program = f"""
    import torch
    {weights}
    x = torch.ones(8, 4)
    ({out}).mean().backward(); optimizer.step()
    next(iter(optimizer.state.values()))["exp_avg_sq"].fill_(torch.nan)
    """
    status, _, said = run(tmp_path, program, "--fail")
    assert status == 1
    assert "Adam's exp_avg_sq of w" in said
    assert "holds NaN as the program ends" in said
    assert "nothing went bad" not in said


SAMPLED = """
import torch
torch.manual_seed(0)
class Denoiser(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    def forward(self, x):
        return (self.inner(x) - x).square().mean()
    @torch.no_grad()
    def sample(self):
        x = torch.randn(3, 4)
        for _ in range(4):
            x = (x - self.inner(x)).{made}
        return x
model = Denoiser()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for epoch in range(2):
    for _ in range(2):
        loss = model(torch.randn(3, 4))
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    print(float(model.sample().sum()))
"""


@pytest.mark.parametrize("made", ["log()", "relu().log()"])  # NaN, and -Inf that becomes NaN
def test_a_part_that_a_method_calls_past_its_trained_model_is_watched(
    tmp_path: Path, made: str
) -> None:
    status, _, said = run(tmp_path, SAMPLED.format(made=made), "--fail")
    assert status == 1
    assert "op log" in said
    assert f"x = (x - self.inner(x)).{made}" in said
    assert run(tmp_path, SAMPLED.format(made="mul(1)"), "--fail")[0] == 0


BUFFER = """
import torch
torch.manual_seed(0)
class Schedule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        alpha = torch.cumprod(torch.linspace(0.999, 0.9, 3), 0)
        self.register_buffer("scale", torch.sqrt(0.99 - alpha))
    def forward(self, x):
        return (self.layer(x) * self.scale).mean()
model = Schedule()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for _ in range(3):
    loss = model(torch.randn(3, 4))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def test_a_buffer_that_the_program_computed_bad_names_its_operation(tmp_path: Path) -> None:
    status, _, said = run(tmp_path, BUFFER, "--fail")
    assert status == 1
    assert "op sqrt" in said
    assert 'self.register_buffer("scale", torch.sqrt(0.99 - alpha))' in said
    assert "nothing in this run" not in said


COMPILED = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
calls, scale = [], torch.ones((), requires_grad=True)

def tall(x, k):
    return torch.{name}(x * k)

@torch.compile(backend="aot_eager")
def loss_fn(x, *, k):
    calls.append(1)
    {write}
    return tall(x.square().mean(), k) + scale

for i in range(3):
    loss = loss_fn(model(torch.ones(5, 4)) * 1, k=float(i != 1))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
print(len(calls), scale.grad)
"""


@pytest.mark.parametrize(
    ("name", "write", "wanted"),
    [
        ("log", "", "op log {}:9 in tall"),
        pytest.param("sqrt", "", "op gradient of sqrt {}:9 in tall", marks=pytest.mark.tier(2)),
        pytest.param("log", "x.add_(1)", "outside_the_model", marks=pytest.mark.tier(2)),
    ],  # the last is not run again
)
def test_a_compiled_loss_is_told_with_its_line_and_leaves_all_as_it_was(
    name: str, write: str, wanted: str, tmp_path: Path
) -> None:
    _, printed, said = run(tmp_path, COMPILED.format(name=name, write=write))
    assert printed == "3 tensor(3.)\n"
    assert wanted.format(tmp_path / "script.py") in said
    assert "1 bad in 3 steps" in said


@pytest.mark.parametrize(
    ("rule", "reported"),
    [
        ("simplefilter('error')", True),
        ("filterwarnings('ignore', '.*')", True),
        ("filterwarnings('ignore', message='.*first appeared')", False),
    ],
)
def test_filters_of_all_warnings_are_not_for_what_is_bad(
    rule: str, reported: bool, tmp_path: Path
) -> None:
    program = LOOP.format(loss=LOG, update=BACKWARD).replace("w.sum", "w.detach().sum")
    status, out, said = run(tmp_path, f"import warnings; warnings.{rule}\n{program}")
    assert (status, out) == (0, "nan\n")
    assert ("tried with log(x + 1e-8)" in said) == reported
    assert "the program: 1 bad in 6 steps" in said


def test_a_weight_that_the_program_spoils_before_it_is_watched_is_told_once(
    tmp_path: Path,
) -> None:
    spoilt = BUFFER.replace("alpha = ", "self.layer.weight.data.div_(0); alpha = ")
    status, _, said = run(tmp_path, spoilt.replace("0.99 - alpha", "alpha"), "--fail")
    assert status == 1
    assert "op divide" in said
    assert "self.layer.weight.data.div_(0)" in said
    assert "layer.weight" in said
    assert "1 bad in 3 steps" in said
