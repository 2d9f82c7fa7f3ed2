"""Losses that are modules, learning rates and function transforms, under ``anynan run``."""

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
"""
    )
    status, out, said = run(tmp_path, program, "--fail")
    assert status == 0
    assert "AnynanWarning" not in said
    assert out.splitlines()[-2:] == ["18.0 dot", "tensor([0.5403, 0.5403])"]


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
@pytest.mark.parametrize("loss", ["torch.log(model(x) - 9).mean()", "model(x).square().mean()"])
def test_a_compiled_function_names_its_operation_and_writes_its_buffers_once(
    tmp_path: Path, loss: str
) -> None:
    program = COMPILED.format(loss=loss, between="torch.nn.BatchNorm1d(8)")
    status, out, said = run(tmp_path, program, "--fail")
    assert status == ("log" in loss)
    assert (f"op log {tmp_path}" in said and f"return {loss}" in said) == ("log" in loss)
    assert ("AnynanWarning" in said) == ("log" in loss)
    assert [line.split()[1] for line in out.splitlines()] == [f"tensor({i})" for i in (1, 2, 3)]


GIVEN = """
import torch
torch.manual_seed(0)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)
    def forward(self, x, t):
        return self.last(torch.sigmoid(self.first(torch.cat([x[:, 1:], t[:, 1:]], 1))))
model, t = Model(), torch.zeros(5, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.rand(5, 2), torch.log(t)).square().mean()
optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def test_an_inf_that_the_program_hands_to_a_model_is_told_where_it_was_made(
    tmp_path: Path,
) -> None:
    first = run(tmp_path, GIVEN)[2].partition("anynan: ")[0]
    assert "[log_of_zero]" in first
    assert "torch.log(t)" in first


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
