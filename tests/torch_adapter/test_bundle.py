"""Bundles of real failing steps in PyTorch."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import anynan
from anynan._calls.calls import BundleError
from anynan.torch.bundle import DIALECT
from tests.bundles import again


class Net(torch.nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.lin = torch.nn.Linear(4, 3)
        self.fn = fn

    def forward(self, x):
        return self.fn(self.lin(x))


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(5, 4)


def fail(folder: Path, model, x, loss=torch.sum):
    """Save a failing step, and give the script that was written and what it does."""
    with pytest.raises(anynan.NonFiniteError), anynan.torch.track(model, save=folder / "b"):
        loss(model(x)).backward()
    return again(folder / "b")


def held(folder: Path):
    return load_file(folder / "b" / "tensors.safetensors")


def test_a_gradient_is_taken_by_autograd_from_what_arrived(tmp_path, x):
    script, outcome = fail(
        tmp_path, Net(lambda y: torch.sqrt(y * 0)), x, loss=lambda y: (y * 3).sum()
    )
    assert "torch.ops.aten.sqrt.default(tensors['self'])" in script
    assert "torch.autograd.grad(" in script
    assert outcome.same
    assert (held(tmp_path)["operation.grad"] == 3).all()


def test_a_custom_backward(tmp_path, x):
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y * 1

        @staticmethod
        def backward(ctx, grad):
            return grad / (grad - grad)

    script, outcome = fail(tmp_path, Net(Own.apply), x)
    assert "torch.ops.aten.div.Tensor" in script
    assert outcome.same


def test_low_precision_survives(tmp_path, x):
    kind = torch.bfloat16
    fail(tmp_path, Net(lambda y: (y * 1e4).exp()).to(kind), x.to(kind))
    kept = held(tmp_path).items()
    assert {t.dtype for n, t in kept if n.startswith(("operation", "weights"))} == {kind}
    assert again(tmp_path / "b")[1].same


def test_a_bad_weight(tmp_path, x):
    model = Net(lambda y: y)
    with torch.no_grad():
        model.lin.weight[0, 1] = torch.nan
    with pytest.raises(anynan.NonFiniteError, match="saved in"):
        anynan.torch.track(model, save=tmp_path / "b")
    outcome = again(tmp_path / "b")[1]
    line = "saved  weights.lin.weight: (3, 4) torch.float32: 1 NaN, 0 Inf, 0 -Inf, first at [0, 1]"
    assert line in outcome.printed.splitlines()
    assert "no operation is known" in outcome.text


def test_it_holds_the_call_the_layer_and_random_states(tmp_path, x):
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), Net(lambda y: torch.log(y - 100)))
    fail(tmp_path, model, x)
    kept = held(tmp_path)
    assert torch.equal(kept["weights.1.lin.weight"], model[1].lin.weight)
    assert torch.equal(kept["operation.self"], model[1].lin(kept["layer.args[0]"]) - 100)
    assert torch.equal(kept["call.input"], x)
    torch.set_rng_state(kept["random.torch_cpu"])
    assert torch.equal(torch.nn.functional.dropout(x, 0.5), kept["layer.args[0]"])


def test_an_operator_of_somebody_else_is_not_written_as_code(tmp_path, x):
    @torch.library.custom_op("anynan_test_bundle::bad", mutates_args=())
    def bad(y: torch.Tensor) -> torch.Tensor:
        return y * torch.inf

    script, outcome = fail(tmp_path, Net(lambda y: bad(y.detach()) + y), x)
    if "is not run here" in script:
        assert outcome.same is None
        assert "none of PyTorch's own operators" in outcome.text
        assert "after" not in outcome.printed
    else:  # the watcher saw what it is made of
        assert "aten.mul" in script
        assert outcome.same


def test_save_in_except_and_nothing_is_kept_without_it(tmp_path, x):
    model = Net(lambda y: torch.log(y - 100))
    with anynan.torch.track(model):
        with pytest.raises(anynan.NonFiniteError) as caught:
            model(x)
        caught.value.tracker.save(tmp_path / "b")
    assert again(tmp_path / "b")[1].same


def test_no_tensor_is_kept_alive(tmp_path):
    model = Net(lambda y: torch.log(y - 100))
    alive = []
    model.lin.register_forward_pre_hook(lambda _, args: alive.append(weakref.ref(args[0])))
    with torch.no_grad(), anynan.torch.track(model, save=tmp_path / "b", action="record"):
        for _ in range(4):
            model(torch.randn(5, 4))
    gc.collect()
    assert [ref() for ref in alive if ref() is not None] == []
    assert (tmp_path / "b").exists()


def test_dangerous_operators_are_not_called():
    names = "aten.from_file.default", "os.system", "aten.log", "c10d.send.default", "aten.a.b.c"
    for name in names:
        with pytest.raises(BundleError, match="is not run"):
            DIALECT.function(name)
