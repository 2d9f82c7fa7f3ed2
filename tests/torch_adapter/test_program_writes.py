"""What the program itself writes into weights, under ``anynan run``."""

import re
from pathlib import Path

import pytest

from tests.torch_adapter.forked import run

WRITTEN = """
import torch
torch.manual_seed(0)
net = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
model, target = net(), net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(3):
    with torch.no_grad():
        wanted = target(torch.ones(8, 4))
    loss = (model(torch.randn(8, 4)) - wanted).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    for p, q in zip(model.parameters(), target.parameters()):
        {write}
"""
WRITERS = [
    ("p.data.clamp_(-0.1, 0.1).div_(p.data.norm() * 0)", "divide"),
    ("q.data.copy_(q.data * 0.9 + p.data / (i - 1 and 10))", "divide"),
    ("with torch.no_grad(): p.view(-1)[:1].div_(0.0)", "divide"),
    ("p.detach()[0].mul_(float('nan'))", "multiply"),
    ("model.state_dict()['0.weight'][0].div_(0.0)", "divide"),
]


@pytest.mark.parametrize(("write", "name"), WRITERS)
def test_what_the_program_writes_into_weights_by_hand_is_not_put_to_the_optimizer(
    tmp_path: Path, write: str, name: str
) -> None:
    status, _, said = run(tmp_path, WRITTEN.format(write=write), "--fail")
    assert status == 1
    assert f"op {name}" in said
    assert write[:60] in said
    assert "by the optimizer" not in said


OPTIMIZER = """
import torch
torch.manual_seed(0)
def orthogonal(g):
    return g / g.norm()
class Own(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.add_(orthogonal(p.grad), alpha=-1e-3)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(4, 8), torch.nn.Linear(8, 8)
    def forward(self, x, scale):
        return self.used(x) + self.unused(self.used(x)) * scale
model = Net()
{tracked}
optimizer = Own(model.parameters(), {{}})
for i in range(4):
    loss = model(torch.randn(4, 4), 1.0 if i < 2 else 0.0).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


@pytest.mark.parametrize("tracked", ["", "import anynan; anynan.torch.track(model, action='warn')"])
def test_an_optimizer_of_the_programs_own_is_told_its_operation(
    tmp_path: Path, tracked: str
) -> None:
    _, _, said = run(tmp_path, OPTIMIZER.format(tracked=tracked))
    assert "op divide" in said
    assert "return g / g.norm()" in said
    assert "[divide_by_zero]" in said
    assert "what it gave was written into unused." in said


LARGE = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(33, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1))
optimizer, w = torch.optim.Adam(model.parameters(), lr=0.001), model[0].weight
for i in range(3):
    loss = model(torch.randn(8, 33)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    if i == 1:
        with torch.no_grad():
            {write}
"""


@pytest.mark.parametrize(
    ("write", "name"),
    [
        ("w.div_(torch.zeros(()))", "divide"),
        ("w.div_(w * 0)", "divide"),  # with what it was: no copy of so much is kept
        ("w[0, 0] = float('nan')", "copy|fill"),  # by PyTorch's version
        ("w.data[0] = float('inf')", "copy|fill"),
        ("w.data.div_(w.data.clamp(max=0) * 3)", "divide"),
        ("w.data.mul_(0.9).add_(torch.zeros(4096, 33).log())", "log"),
        ("w.data = w.data / 0", "assign"),
    ],
)
def test_what_the_program_writes_into_a_large_weight_is_not_put_to_the_optimizer(
    tmp_path: Path, write: str, name: str
) -> None:
    _, _, said = run(tmp_path, LARGE.format(write=write))
    assert re.search(rf"op ({name}) script\.py:11", said.replace(f"{tmp_path}/", ""))
    assert "by the optimizer" not in said
    assert "what it gave was written into 0.weight [written-into]" in said
    assert "min 1" not in said, "numbers that stand for what is not known are not told"


@pytest.mark.parametrize("size", [8, 4096])
def test_what_a_program_without_a_model_writes_into_its_weights_is_told(
    tmp_path: Path, size: int
) -> None:
    program = f"""
    import torch
    w = torch.linspace(-1, 1, {size}).requires_grad_()
    optimizer = torch.optim.Adam([w])
    for i in range(3):
        loss = w.square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        w.data.div_(w.data.clamp(max=0))
    """
    _, _, said = run(tmp_path, program)
    assert "op divide" in said
    assert "w.data.div_(w.data.clamp(max=0))" in said


MADE = """
import copy
import torch
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.scale = torch.nn.Parameter({made})
    def forward(self, x):
        return self.layer(x) * self.scale
model = copy.deepcopy(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(2):
    loss = {loss}
    optimizer.zero_grad(); loss.backward(); optimizer.step()
print(type(model.scale).__name__, model.scale.is_leaf, model.scale.requires_grad)
"""
SQUARE = "model(torch.randn(8, 4)).square().mean()"


@pytest.mark.parametrize(
    ("made", "loss", "name", "line"),
    [
        ("torch.log(torch.arange(4.0))", SQUARE, "log", 9),
        ("data=torch.ones(4) / torch.zeros(4), requires_grad=True", SQUARE, "divide", 9),
        ("torch.zeros(4).cos()", "model.scale.sub(1).norm().sqrt()", "gradient of sqrt", 15),
    ],
)
def test_a_weight_that_is_made_of_a_bad_tensor_has_the_operation(
    tmp_path: Path, made: str, loss: str, name: str, line: int
) -> None:
    status, out, said = run(tmp_path, MADE.format(made=made, loss=loss), "--fail")
    assert status == 1 and out.split() == ["Parameter", "True", "True"]
    first = said.partition("AnynanWarning")[2].partition("anynan: ")[0]
    assert f"op {name} " in first and f"script.py:{line} " in first
    assert "scale" in first


DEVICE = """
import torch
model = torch.nn.Linear(2, 2)
{before}
with torch.device("meta"):
    model(torch.ones(2, 2, device="cpu"))
    made = torch.nn.Parameter(torch.ones(2))
print(made.device, torch.ones(2).device)
torch.set_default_device("meta")
model(torch.ones(2, 2, device="cpu"))
torch.set_default_device(None)
print(torch.ones(2).device)
"""


@pytest.mark.parametrize("before", ["", "torch.set_default_device('cpu')"])
def test_a_device_that_the_program_names_for_a_while_ends_where_it_does(
    tmp_path: Path, before: str
) -> None:
    out = run(tmp_path, DEVICE.format(before=before))[1]
    assert out.split() == ["meta", "cpu", "cpu"]


BY_HAND = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
for i in range(4):
    model(torch.ones(8, 4)).mean().backward()
    for p in model.parameters():
        p.grad.data.add_(p.data, alpha=1e-4)
        {write}
        p.data.add_(p.grad.data, alpha=-0.1 if i != 2 else {step})
        p.grad.data.zero_()
"""


@pytest.mark.parametrize(
    ("write", "step", "name", "line"),
    [
        ("p.grad.data.div_(p.grad.data.norm() * (i != 2))", "-0.1", "divide", 9),
        ("p.grad.data.mul_(1e30).mul_(1e30)", "-0.1", "multiply", 9),
        ("pass", "float('inf')", "add", 10),
    ],
)
def test_an_update_by_hand_has_the_operation_that_spoiled_the_gradient(
    tmp_path: Path, write: str, step: str, name: str, line: int
) -> None:
    told = run(tmp_path, BY_HAND.format(write=write, step=step))[2]
    first = told.partition("AnynanWarning")[2].partition("anynan: ")[0]
    assert f"op {name} " in first and f"script.py:{line} " in first
    if name == "add":  # the gradient as it was: the mean of ones, and a little of the weight
        assert re.search(r"input float32 \(1,\) value 1(\.0000\d+|e\+00)? ", first), first
