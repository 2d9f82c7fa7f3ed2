"""What the program itself writes into weights, under ``anynan run``."""

import re

import pytest

from tests.torch_adapter.forked import training

MODEL = """
net = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
model, target = net(), net()
"""
WRITERS = [
    ("p.data.clamp_(-0.1, 0.1).div_(p.data.norm() * 0)", "divide"),
    ("q.data.copy_(q.data * 0.9 + p.data / (i - 1 and 10))", "divide"),
    ("with torch.no_grad(): p.view(-1)[:1].div_(0.0)", "divide"),
    ("p.detach()[0].mul_(float('nan'))", "multiply"),
    ("model.state_dict()['0.weight'][0].div_(0.0)", "divide"),
]


@pytest.mark.parametrize(("write", "name"), WRITERS)
def test_what_the_program_writes_into_weights_by_hand_is_not_put_to_the_optimizer(write, name, run):
    loss = "(model(torch.randn(8, 4)) - target(torch.ones(8, 4)).detach()).square().mean()"
    after = f"for p, q in zip(model.parameters(), target.parameters()):\n    {write}"
    done = run(training(loss, MODEL, after), "--fail")
    done.fails(f"op {name}", write[:60])
    assert "by the optimizer" not in done.said


OPTIMIZER = """
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
model, torch.optim.Own = Net(), Own
"""


@pytest.mark.parametrize("tracked", ["", "import anynan; anynan.torch.track(model, action='warn')"])
def test_an_optimizer_of_the_programs_own_is_told_its_operation(run, tracked: str) -> None:
    loss = "model(torch.randn(4, 4), float(i < 2)).square().mean()"
    done = run(training(loss, OPTIMIZER + tracked, optimizer="Own(model.parameters(), {})"))
    done.tells("op divide", "return g / g.norm()", "[divide_by_zero]")
    done.tells("what it gave was written into unused.")


LARGE = """
model = torch.nn.Sequential(torch.nn.Linear(33, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1))
w = model[0].weight
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
def test_what_is_written_into_a_large_weight_is_not_the_optimizers(write, name, tmp_path, run):
    loss, optimizer = "model(torch.randn(8, 33)).square().mean()", "Adam(model.parameters())"
    after = f"if i == 1:\n    with torch.no_grad():\n        {write}"
    done = run(training(loss, LARGE, after, steps=3, optimizer=optimizer))
    assert re.search(rf"op ({name}) script\.py:10", done.said.replace(f"{tmp_path}/", ""))
    done.tells("what it gave was written into 0.weight [written-into]")
    assert "by the optimizer" not in done.said
    assert "min 1" not in done.said, "numbers that stand for what is not known are not told"


@pytest.mark.parametrize("size", [8, 4096])
def test_what_a_program_without_a_model_writes_into_its_weights_is_told(run, size: int) -> None:
    before = f"w = torch.linspace(-1, 1, {size}).requires_grad_()"
    write = "w.data.div_(w.data.clamp(max=0))"
    done = run(training("w.square().mean()", before, write, optimizer="Adam([w])"))
    done.tells("op divide", write)


MADE = """
import copy
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.scale = torch.nn.Parameter({made})
    def forward(self, x):
        return self.layer(x) * self.scale
model = copy.deepcopy(Net())
"""
SQUARE = "model(torch.randn(8, 4)).square().mean()"


@pytest.mark.parametrize(
    ("made", "loss", "name", "line"),
    [
        ("torch.log(torch.arange(4.0))", SQUARE, "log", 7),
        ("data=torch.ones(4) / torch.zeros(4), requires_grad=True", SQUARE, "divide", 7),
        ("torch.zeros(4).cos()", "model.scale.sub(1).norm().sqrt()", "gradient of sqrt", 13),
    ],
)
def test_a_weight_that_is_made_of_a_bad_tensor_has_the_operation(made, loss, name, line, run):
    kind = "print(type(model.scale).__name__, model.scale.is_leaf, model.scale.requires_grad)"
    done = run(training(loss, MADE.format(made=made), steps=2) + kind, "--fail")
    assert done.status == 1 and done.out.split() == ["Parameter", "True", "True"]
    assert f"op {name} " in done.first and f"script.py:{line} " in done.first
    assert "scale" in done.first


@pytest.mark.parametrize("before", ["", "torch.set_default_device('cpu')"])
def test_a_device_that_the_program_names_for_a_while_ends_where_it_does(run, before: str) -> None:
    program = f"""
    import torch
    model, x = torch.nn.Linear(2, 2), torch.ones(2, 2)
    {before}
    with torch.device("meta"):
        model(x)
        made = torch.nn.Parameter(torch.ones(2))
    print(made.device, torch.ones(2).device)
    torch.set_default_device("meta")
    model(x)
    torch.set_default_device(None)
    print(torch.ones(2).device)
    """
    assert run(program).out.split() == ["meta", "cpu", "cpu"]


BY_HAND = """
import torch
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
        ("p.grad.data.div_(p.grad.data.norm() * (i != 2))", "-0.1", "divide", 8),
        ("p.grad.data.mul_(1e30).mul_(1e30)", "-0.1", "multiply", 8),
        ("pass", "float('inf')", "add", 9),
    ],
)
def test_an_update_by_hand_has_the_operation_of_the_gradient(write, step, name, line, run):
    first = run(BY_HAND.format(write=write, step=step)).first
    assert f"op {name} " in first and f"script.py:{line} " in first
    if name == "add":  # the gradient as it was: the mean of ones, and a little of the weight
        assert re.search(r"input float32 \(1,\) value 1(\.0000\d+|e\+00)? ", first), first
