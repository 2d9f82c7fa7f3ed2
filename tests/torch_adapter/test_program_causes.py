"""Losses that are modules, learning rates and function transforms, under ``anynan run``."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.torch_adapter.forked import run

LOSS_MODULE = """
import torch
from torch import nn
torch.manual_seed(0)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, x):
        x = self.layer(x)
        return {made}
model, criterion = Model(), nn.NLLLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(2):
    loss = criterion(model(torch.randn(8, 4)), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


@pytest.mark.tier(2)
def test_a_log_that_a_loss_module_makes_infinite_is_told_and_not_the_loss(tmp_path: Path) -> None:
    made = "torch.log(torch.softmax(x * 1e3, 1))"
    _, _, said = run(tmp_path, LOSS_MODULE.format(made=made))
    first = said.partition("anynan: ")[0]
    assert "op log" in first
    assert "a softmax probability rounded to 0 [log_of_zero]" in first
    assert "it surfaced in the forward pass at NLLLoss" in first
    assert "[unseen-to-loss]" not in first


def test_a_class_that_the_model_masks_is_told_where_the_loss_meets_it(tmp_path: Path) -> None:
    mask = "torch.tensor([True, False, False])"
    made = f"torch.log_softmax(x.masked_fill({mask}, -float('inf')), 1)"
    assert "[target_class_masked]" in run(tmp_path, LOSS_MODULE.format(made=made))[2]


DIVERGED = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
optimizer = torch.optim.{optimizer}
for i in range(3):
    out = model(torch.randn(8, 4))
    loss = {loss}
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


@pytest.mark.parametrize(
    "made", ["Adam(model.parameters(), lr=1e30)", "SGD(model.parameters(), lr=1e25)"]
)
def test_a_learning_rate_that_blows_up_the_weights_at_once_is_told_as_such(
    tmp_path: Path, made: str
) -> None:
    program = DIVERGED.format(optimizer=made, loss="out.square().mean()")
    first = run(tmp_path, program)[2].partition("anynan: ")[0]
    assert "[learning_rate_divergence]" in first
    assert "; step 0 came to" in first
    assert "lower the learning rate" in first
    assert "a second fault" not in first


def test_what_a_blown_up_weight_leads_to_names_the_update_in_a_note(tmp_path: Path) -> None:
    loss = "-torch.log(torch.softmax(out, 1).amin(1)).mean()"
    program = DIVERGED.format(optimizer="Adam(model.parameters(), lr=1e13)", loss=loss)
    first = run(tmp_path, program)[2].partition("anynan: ")[0]
    assert "[log_of_zero]" in first
    assert "try a lower learning rate first [grew]" in first


@pytest.mark.tier(2)
@pytest.mark.parametrize("loss", ["torch.log(out - 9).mean()", "out.mul(1e30).square().mean()"])
def test_other_faults_are_not_put_to_the_learning_rate(tmp_path: Path, loss: str) -> None:
    said = run(tmp_path, DIVERGED.format(optimizer="SGD(model.parameters(), lr=1e-3)", loss=loss))
    assert "AnynanWarning" in said[2]
    assert "update" not in said[2].partition("anynan: ")[0]


TRANSFORMED = """
import torch
from torch.func import functional_call, grad, grad_and_value, hessian, vmap
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
params = {{name: x.detach() for name, x in model.named_parameters()}}
def loss_of(params, x, y):
    return {loss}
def out_of(params, x):
    return functional_call(model, params, (x[None],))
for i in range(3):
    x = torch.randn(6, 4)
    gradients, losses = vmap(grad_and_value(loss_of), in_dims=(None, 0, 0))(params, x, x.sum(1))
    norm = sum((g ** 2).flatten(1).sum(1) for g in gradients.values()).sqrt()
    scale = {scale}
    for name, g in gradients.items():
        mean = (g * scale.view(-1, *[1] * (g.dim() - 1))).mean(0)
        params[name] = params[name] - 0.1 * mean
    print(losses.mean().item())
"""
SQUARE, CLIPPED = "(out_of(params, x) - y).square().mean()", "(1 / norm).clamp(max=1)"


@pytest.mark.parametrize("package", ["torch.func", "functorch"])
@pytest.mark.parametrize(
    ("loss", "scale", "told"),
    [
        ("torch.log(out_of(params, x) - y).mean()", CLIPPED, "log_of_negative"),
        ("(out_of(params, x) * 0).mean().sqrt()", CLIPPED, "sqrt_gradient_at_zero"),
        (SQUARE, "(norm - norm) / (norm - norm)", "divide_by_zero"),
    ],
)
def test_a_fault_under_function_transforms_is_told_operation_and_line(
    tmp_path: Path, loss: str, scale: str, told: str, package: str
) -> None:
    program = TRANSFORMED.format(loss=loss, scale=scale)
    program = program.replace("functional_call,", f"functional_call\nfrom {package} import")
    status, _, said = run(tmp_path, program, "--fail")
    assert status == 1
    assert f"[{told}]" in said
    assert (f"return {loss}" if scale == CLIPPED else f"scale = {scale}") in said
    assert "bad_label" not in said


@pytest.mark.tier(2)
def test_function_transforms_give_what_they_do_and_clean_ones_are_clean(tmp_path: Path) -> None:
    program = (
        TRANSFORMED.format(loss=SQUARE, scale=CLIPPED)
        + """
print(hessian(lambda x: (x ** 3).sum())(torch.arange(3.0)).sum().item(), vmap(torch.dot).__name__)
print(torch.compile(vmap(grad(lambda x: x.sin())), backend="eager", fullgraph=True)(torch.ones(2)))
@torch.compile(backend="eager", fullgraph=True)
def slopes(x):
    return torch.vmap(torch.func.grad(lambda x: x.sin()))(x)
print(slopes(torch.ones(2)))
"""
    )
    status, out, said = run(tmp_path, program, "--fail")
    assert status == 0
    assert "AnynanWarning" not in said
    assert out.splitlines()[-3:] == ["18.0 dot", *["tensor([0.5403, 0.5403])"] * 2]


WRITES = """
import torch
torch.manual_seed(0)
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Linear(1, 1)
    def forward(self, x):
        apart = (x - x[:1]).square().sum(1, keepdim=True)
        x += self.scale(apart) / divisor
        return x
model = Layer()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for i in range(4):
    divisor = torch.tensor(float({finite}))
    x = torch.randn(6, 2)
    loss = model(x.detach()).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    print(loss.item())
"""


def test_a_model_that_writes_into_its_input_is_run_again_with_what_it_was(tmp_path: Path) -> None:
    said = run(tmp_path, WRITES.format(finite="i != 2"))[2]
    assert "op divide" in said
    assert "x += self.scale(apart) / divisor" in said
    assert "[divide_by_zero]" in said
    assert "[replay-input-changed]" not in said


def test_an_input_that_the_call_itself_made_bad_is_not_said_to_have_come_in(
    tmp_path: Path,
) -> None:
    first = run(tmp_path, WRITES.format(finite="i > 5"))[2].partition("anynan: ")[0]
    assert "first appeared in the forward pass of step 0" in first
    assert "[replay-input-changed]" in first
    assert "bad input" not in first
    assert "came in" not in first


COMPILED = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), {between}, torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
@torch.compile(backend="eager")
def loss_of(x):
    return {loss}
for i in range(3):
    loss = loss_of(torch.randn(8, 4))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    print(loss.item(), getattr(model[1], "num_batches_tracked", i))
"""


@pytest.mark.tier(2)
def test_a_compiled_function_that_runs_a_model_names_its_operation(tmp_path: Path) -> None:
    loss = "torch.log(model(x) - 9).mean()"
    said = run(tmp_path, COMPILED.format(loss=loss, between="torch.nn.Dropout(0.1)"))[2]
    told = said.split("AnynanWarning: ")[1:]
    assert "op log" in told[0]
    assert f"return {loss}" in told[0]
    assert all("2 times" in each or "3 times" in each for each in told[1:])


COMPILED_STEP = """
import torch
torch.manual_seed(0)
between = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.1))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), between, torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
def update(loss):
    optimizer.zero_grad(); loss.backward(); optimizer.step()
@torch.compile(backend="eager")
def step(model, x, scale):
    loss = torch.sqrt((model(x) * scale) ** 2).mean()
    {inside}
    return loss
for i in range(3):
    loss = step(model, torch.randn(8, 4), float(i != 1))
    {outside}
print([float(x.nan_to_num(7).sum()) for x in model.state_dict().values()])
print(torch.rand(1), optimizer.state[model[0].bias]["step"])
"""


@pytest.mark.tier(2)
@pytest.mark.parametrize("inside", [True, False])
def test_a_compiled_function_that_runs_a_model_names_the_operation_of_a_gradient(
    inside: bool, tmp_path: Path
) -> None:
    update = ("update(loss)", "pass")
    program = COMPILED_STEP.format(inside=update[not inside], outside=update[inside])
    plain = [sys.executable, "-c", program]
    printed = subprocess.run(plain, capture_output=True, text=True, check=True).stdout
    _, out, said = run(tmp_path, program)
    assert out == printed
    assert "op gradient of sqrt" in said.split("AnynanWarning: ")[1]
    assert "loss = torch.sqrt((model(x) * scale) ** 2).mean()" in said
    assert "[sqrt_gradient_at_zero]" in said
    assert "1 bad in 3 steps" in said


@pytest.mark.tier(2)
@pytest.mark.parametrize("loss", ["torch.log(model(x) - 9).mean()", "model(x).square().mean()"])
def test_a_compiled_function_writes_its_buffers_once(tmp_path: Path, loss: str) -> None:
    program = COMPILED.format(loss=loss, between="torch.nn.BatchNorm1d(8)")
    status, out, said = run(tmp_path, program, "--fail")
    assert status == ("log" in loss)
    assert ("AnynanWarning" in said) == ("log" in loss)
    assert [line.split()[1] for line in out.splitlines()] == [f"tensor({i})" for i in (1, 2, 3)]


def test_a_loss_beside_targets_that_are_set_by_numpy_names_its_operation(tmp_path: Path) -> None:
    program = """
import numpy, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
for i in range(2):
    loss = 0
    for out in model(torch.randn(2, 5, 4)):
        target = torch.full((5,), 2)  # the first is gone as the second comes
        target[numpy.array([0, 3])] = torch.tensor([1, 0])
        loss = loss + torch.nn.functional.cross_entropy(out, target)
        loss = loss + torch.log(out[numpy.array([1])] - 9).mean()
    loss.backward()
"""
    said = run(tmp_path, program)[2]
    assert "op log" in said
    assert "[log_of_negative]" in said


LOSS = """
import torch
import torch.nn.functional as F
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(2):
    out, ones = model(torch.full((8, 4), 1e4)), torch.ones(8, 1)
    loss = {loss}
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        ("F.poisson_nll_loss(out.abs(), ones)", "op exp "),  # not drawn, whatever its name is
        ("F.normalize(out * 0, eps=0.0).sum()", "op divide "),
        ("torch.log(torch.cosh(out)).mean()", "tried with cosh(clip(x, -79, 79)) the loss is"),
    ],
)
def test_a_loss_names_its_operation_and_a_fix_that_holds(
    tmp_path: Path, loss: str, told: str
) -> None:
    first = run(tmp_path, LOSS.format(loss=loss))[2].partition("anynan: ")[0]
    assert told in first
    assert f"loss = {loss}" in first


def test_a_warning_comes_once_though_its_operation_runs_again(tmp_path: Path) -> None:
    said = run(tmp_path, LOSS.format(loss="out.mean() * ones[:1].std()"))[2]
    assert "[variance_of_one]" in said
    assert said.count("UserWarning: std()") == 1


def test_a_slope_names_no_wrapper_that_it_went_through(tmp_path: Path) -> None:
    said = run(tmp_path, LOSS.format(loss="((out * 0) ** 0.5).mean()"))[2]
    assert "op gradient of pow" in said
    assert "via" not in said


GIVEN = """
import torch
torch.manual_seed(0)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)
    def forward(self, x, t):
        return self.last(torch.sigmoid(self.first({taken})))
model, t = Model(), torch.zeros(5, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.rand(5, 2), {given}).square().mean()
optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


@pytest.mark.parametrize("taken", ["t", "torch.cat([x[:, 1:], t[:, 1:]], 1)"])
@pytest.mark.parametrize(
    ("given", "cause"), [("torch.log(t)", "log_of_zero"), ("torch.exp(t + 99)", "exp_overflow")]
)
def test_an_inf_that_the_program_hands_to_a_model_is_told_where_it_was_made(
    tmp_path: Path, taken: str, given: str, cause: str
) -> None:
    first = run(tmp_path, GIVEN.format(taken=taken, given=given))[2].partition("anynan: ")[0]
    assert f"[{cause}]" in first
    assert given in first


@pytest.mark.parametrize("kept", ["weights / weights.sum()", "torch.ones(4)"])
@pytest.mark.parametrize("scale", ["scale", "self.scale"])
def test_a_tensor_that_the_model_reaches_is_told_where_it_was_made(
    tmp_path: Path, scale: str, kept: str
) -> None:
    program = f"""
    import torch
    weights = torch.zeros(4)
    class Model(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * {scale}
    model = Model(4, 4)
    scale = model.scale = {kept}
    model(torch.randn(8, 4)).sum().backward()
    print(model.scale is scale, torch.equal(scale, torch.ones(4)), vars(scale))
    """
    _, out, said = run(tmp_path, program)
    bad = "weights" in kept
    assert out == f"True {not bad} {{}}\n"
    assert ("op divide" in said and kept in said) is bad


def test_what_goes_through_a_sparse_product_is_followed(tmp_path: Path) -> None:
    program = """
    import torch
    links = torch.eye(3).to_sparse()
    class Graph(torch.nn.Linear):
        def forward(self, x):
            x = torch.spmm(links, torch.spmm(links, super().forward(x) / (x - x)))
            return torch.exp(-x) * x
    Graph(4, 4)(torch.randn(3, 4)).sum().backward()
    """
    said = run(tmp_path, program)[2]
    assert "op divide" in said and "Cannot access storage" not in said


def test_a_buffer_that_is_used_long_after_it_was_made_is_no_label(tmp_path: Path) -> None:
    program = """
    import torch
    class Schedule(torch.nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            beta = torch.linspace(0.1, 0.9, 4)
            self.register_buffer("noise", torch.sqrt(beta - 0.5))
    model = Schedule()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(5):
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    with torch.no_grad():
        print((model(torch.randn(8, 4)) * model.noise.gather(0, torch.arange(4))).mean().item())
    """
    said = run(tmp_path, program)[2]
    assert "op sqrt" in said and "torch.sqrt(beta - 0.5)" in said
    assert "labels" not in said


def test_what_the_program_makes_of_an_array_before_its_model_is_told(tmp_path: Path) -> None:
    program = """
    import numpy as np, torch
    torch.manual_seed(0)
    policy, seen = torch.nn.Linear(4, 2), np.empty(4, np.float32)
    for i in range(3):
        seen[:] = np.linspace(i - 2, i, 4)
        out = policy(torch.from_numpy(seen).float().add(2).log())
        seen[:] = 0
        out.sum().backward()
    """
    _, _, said = run(tmp_path, program)
    assert "op log" in said
    assert "torch.from_numpy(seen).float().add(2).log()" in said
    assert "[log_of_zero]" in said


def test_a_second_run_leaves_what_a_library_keeps_with_weights_as_it_was(tmp_path: Path) -> None:
    program = """
    import torch
    model = torch.nn.Linear(2, 1, bias=False)
    w, optimizer = model.weight, torch.optim.SGD(model.parameters(), lr=1e-3)
    w.calls, w.samples, w.names = 0, None, []
    def called(module, args, out):
        w.calls += 1
        w.names.append("forward")
    def sampled(module, inward, outward):
        w.calls -= 1
        if w.samples is not None:
            raise ValueError("the samples of the step before are there still")
        w.samples = outward[0].detach()
    model.register_forward_hook(called); model.register_full_backward_hook(sampled)
    for i in range(3):
        model(torch.ones(4, 2)).mul(0).sum().sqrt().backward()
        print(w.calls, len(w.samples), w.names)
        w.samples = None
        optimizer.step(); optimizer.zero_grad()
    """
    status, out, said = run(tmp_path, program)
    assert status == 0
    assert out.splitlines() == [f"0 4 {['forward'] * (i + 1)}" for i in range(3)]
    assert "AnynanWarning" in said
