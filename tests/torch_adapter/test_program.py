"""Programs without modules, and losses that no backward pass begins with, under ``anynan run``."""

import pytest

from tests.torch_adapter.forked import training

LOOP = """
import torch
w = torch.randn(4, requires_grad=True)
x, y = torch.rand(16, 4), torch.rand(16)
for i in range(6):
    p = torch.sigmoid((x @ w) * (1 + i) * 20)
    {loss}
    {update}
print(float(w.detach().sum()))
"""
LOG = "loss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()"
BACKWARD = "loss.backward(); w.data -= 0.5 * w.grad; w.grad = None"
GRAD = "(g,) = torch.autograd.grad(loss, w); w = (w - 0.5 * g).detach().requires_grad_()"


@pytest.mark.parametrize("update", [BACKWARD, GRAD])
def test_a_loop_over_plain_tensors_is_told_operation_line_and_fix(run, update: str) -> None:
    done = run(LOOP.format(loss=LOG, update=update), "--fail")
    fix = "tried with log(x + 1e-8) the loss is finite"
    done.fails("op log", LOG, "[log_of_zero]", fix)


def test_a_clean_loop_over_plain_tensors_is_clean(run) -> None:
    loss = "loss = (p - y).square().mean()"
    done = run(LOOP.format(loss=loss, update=BACKWARD), "--fail")
    assert (done.status, done.out.strip() == "nan") == (0, False)
    done.tells("the program: nothing went bad in 6 steps")


CHECKS = [
    "if torch.isnan(loss): break",
    "if math.isnan(float(loss)): raise SystemExit('loss is NaN')",
    "print(loss.detach() if i < 1 else loss)\n    if i: break",
]


@pytest.mark.parametrize("check", CHECKS)
def test_a_program_that_stops_over_its_loss_is_told(run, check: str) -> None:
    loss = "(model(torch.ones(2, 4)).pow(2).mean() - i).sqrt()"
    before = "import math; model = torch.nn.Linear(4, 3)"
    run(training(f"{loss}\n    {check}", before)).tells("op sqrt", loss, "[sqrt_of_negative]")


def test_a_measure_that_is_bad_and_goes_nowhere_is_no_event(run) -> None:
    loss = """(out := model(torch.ones(2, 4))).pow(2).mean()
    with torch.no_grad():
        print((model(torch.ones(2, 4)) * torch.nan).mean().item())
    print(((out - out) / 0).mean().item())"""
    done = run(training(loss) + 'print(torch.tensor(float("inf")).item())', "--fail")
    assert (done.status, done.out.split()) == (0, [*["nan"] * 8, "inf"])
    assert "1 bad in" not in done.said


def test_the_same_fault_again_is_one_event_and_none_of_the_programs_own_trackers(run) -> None:
    done = run(LOOP.format(loss="loss = torch.log(w * 0).sum()", update="loss.backward()"))
    done.tells("6 bad in 6 steps", "6 times")
    assert done.said.count(" event ") == 1
    assert "calls track itself" not in done.said


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
def test_what_the_program_takes_out_of_tensors_is_told_at_its_last_line(run, taken: str) -> None:
    last = f"script.py:{len(TAKEN_OUT.splitlines())}: AnynanWarning"
    done = run(TAKEN_OUT.format(taken=taken), "--fail")
    done.fails("op log", "return torch.log((w * x).sum())", last)


def test_missing_values_that_the_program_takes_out_are_no_harm(run) -> None:
    program = """
    import torch
    x = torch.tensor([1.0, float("nan"), 2.0])
    print(x.tolist(), x.numpy(), x, x[x == x].tolist(), x.nanmean().item())
    y = torch.ones(3, requires_grad=True)
    y.sum().backward()
    print((y * 2).masked_fill(x > 1, float("-inf")))
    """
    done = run(program, "--fail")
    assert done.status == 0 and "1 bad in" not in done.said


BY_HAND = """
import torch, torch.nn.functional as F
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
def test_a_gradient_of_a_model_that_no_optimizer_updates_is_told_once(run, value: str) -> None:
    more = f"({value} * 0).pow(2).sum().sqrt()"
    done = run(BY_HAND.format(more=more))
    done.tells("first appeared in the backward pass of step 0", "op gradient of sqrt", more)
    done.tells("[norm_gradient_at_zero]")
    assert done.said.count(" event ") == 1


OF_TENSORS = "w = torch.ones(4, 1, requires_grad=True); optimizer = torch.optim.Adam([w])"
OF_MODEL = "w = torch.nn.Linear(4, 1); optimizer = torch.optim.Adam(w.parameters())"
SPOILED = "next(iter(optimizer.state.values()))['exp_avg_sq'].fill_(torch.nan)"
WRITTEN = "for p in w.parameters(): p.data.fill_(torch.nan)"


@pytest.mark.parametrize(
    ("weights", "out", "write", "told"),
    [
        (OF_TENSORS, "x @ w", SPOILED, "Adam's exp_avg_sq of w"),
        (OF_MODEL, "w(x)", SPOILED, "Adam's exp_avg_sq of w"),
        (OF_MODEL, "w(x)", WRITTEN, "Linear: weight (and 1 more)"),
    ],
)
def test_what_is_bad_as_the_program_ends_counts(run, weights, out, write, told) -> None:
    program = f"""
    import torch
    {weights}
    x = torch.ones(8, 4)
    ({out}).mean().backward(); optimizer.step()
    {write}
    """
    done = run(program, "--fail")
    done.fails(told)
    assert done.said.count("holds NaN as the program ends") == 1
    assert "nothing went bad" not in done.said


SAMPLED = """
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
"""


@pytest.mark.parametrize("made", ["log()", "relu().log()"])  # NaN, and -Inf that becomes NaN
def test_a_part_that_a_method_calls_past_its_trained_model_is_watched(run, made: str) -> None:
    sample = "if i % 2: print(float(model.sample().sum()))"
    bad = training("model(torch.randn(3, 4))", SAMPLED.format(made=made), sample)
    run(bad, "--fail").fails("op log", f"x = (x - self.inner(x)).{made}")
    assert run(bad.replace(made, "mul(1)"), "--fail").status == 0


BUFFER = """
class Schedule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        alpha = torch.cumprod(torch.linspace(0.999, 0.9, 3), 0)
        {line}
    def forward(self, x):
        return (self.layer(x) * self.scale).mean()
model = Schedule()
"""


ROOT = 'self.register_buffer("scale", torch.sqrt({}))'


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("sqrt", ROOT.format("0.99 - alpha")),
        ("divide", ROOT.format("alpha") + "; self.layer.weight.data.div_(0)"),
    ],
)
def test_what_a_constructor_makes_bad_names_its_operation_once(run, name: str, line: str) -> None:
    program = training("model(torch.randn(3, 4))", BUFFER.format(line=line), steps=3)
    done = run(program, "--fail")
    done.fails(f"op {name}", line, "1 bad in 3 steps")
    assert "nothing in this run" not in done.said


COMPILED = """
model, calls, scale = torch.nn.Linear(4, 3), [], torch.ones((), requires_grad=True)
def tall(x, k):
    return torch.{name}(x * k)
@torch.compile(backend="aot_eager")
def loss_fn(x, *, k):
    calls.append(1)
    {write}
    return tall(x.square().mean(), k) + scale
"""


@pytest.mark.parametrize(
    ("name", "write", "wanted"),
    [
        ("log", "", "op log {}:4 in tall"),
        pytest.param("sqrt", "", "op gradient of sqrt {}:4 in tall", marks=pytest.mark.tier(2)),
        pytest.param("log", "x.add_(1)", "outside_the_model", marks=pytest.mark.tier(2)),
    ],  # the last is not run again
)
def test_a_compiled_loss_is_told_with_its_line_and_left(name, write, wanted, tmp_path, run):
    loss = "loss_fn(model(torch.ones(5, 4)) * 1, k=float(i != 1))"
    program = training(loss, COMPILED.format(name=name, write=write), steps=3)
    done = run(program + "print(len(calls), scale.grad)")
    assert done.out == "3 tensor(3.)\n"
    done.tells(wanted.format(tmp_path / "script.py"), "1 bad in 3 steps")


@pytest.mark.parametrize(
    ("rule", "reported"),
    [
        ("simplefilter('error')", True),
        ("filterwarnings('ignore', '.*')", True),
        ("filterwarnings('ignore', message='.*first appeared')", False),
    ],
)
def test_filters_of_all_warnings_are_not_for_what_is_bad(run, rule: str, reported: bool) -> None:
    program = LOOP.format(loss=LOG, update=BACKWARD)
    done = run(f"import warnings; warnings.{rule}\n{program}")
    assert (done.status, done.out) == (0, "nan\n")
    assert ("tried with log(x + 1e-8)" in done.said) == reported
    done.tells("the program: 1 bad in 6 steps")
