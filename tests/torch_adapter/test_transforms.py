"""Traced graphs and function transforms: no check inside, the right result, and it is said."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import anynan
from anynan import AnynanWarning
from tests.failing import failure
from tests.torch_adapter.training import Fault, assert_same

# PyTorch's own, about what it uses itself.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), Fault(), nn.Linear(8, 4))


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def operations(graph: Any) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op != "placeholder"]


def export(model: nn.Module) -> Any:
    """Make a graph of the model, and give it with the result of a run of it; so do the next two."""
    program = torch.export.export(model, (X,))
    return operations(program.graph), program.module()(X)


def fx(model: nn.Module) -> Any:
    program = make_fx(model)(X)
    return operations(program.graph), program(X)


def script(model: nn.Module) -> Any:
    program = torch.jit.trace(model, X)
    return str(program.inlined_graph), program(X)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        pytest.param(export, "torch.export", marks=pytest.mark.tier(2)),
        (fx, "make_fx"),
        (script, "torch.jit.trace"),
    ],
)
def test_a_traced_graph_has_no_check(make: Callable[[nn.Module], Any], name: str) -> None:
    plain = make(net())
    model = net()
    tracker = anynan.torch.track(model, advanced=anynan.Advanced(read="end"))
    with pytest.warns(AnynanWarning) as said:
        traced = make(model)
        make(model)
    if make is not script:  # its graph carries a running number
        assert_same(plain, traced)
    else:
        assert "aminmax" not in traced[0]
        assert_same(plain[1], traced[1])
    (note,) = tracker.notes
    assert f"not watched inside {name}" in note
    assert len([item for item in said if item.category is AnynanWarning]) == 1
    assert note in " ".join(tracker.report().split())
    watches(model, tracker)


def watches(model: Any, tracker: anynan.Tracker) -> None:
    """Hold that an ordinary call is still watched."""
    model(X).sum().backward()
    model[2].armed = "forward"
    event = failure(lambda: [model(X).sum().backward(), tracker.flush()])
    assert event.layer == "2"


STEPS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "vmap": lambda model, x: torch.vmap(model)(x),
    "grad": lambda model, x: torch.func.grad(lambda z: model(z).sum())(x),
    "jacrev": lambda model, x: torch.vmap(torch.func.jacrev(model))(x),
    "jacfwd": lambda model, x: torch.vmap(torch.func.jacfwd(model))(x),
    "hessian": lambda model, x: torch.vmap(torch.func.hessian(lambda z: model(z).sum()))(x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
    "vjp": lambda model, x: torch.func.vjp(model, x)[1](torch.ones_like(x))[0],
}
BY_FORWARD = ("jvp", "jacfwd", "hessian")


@pytest.mark.parametrize(
    ("name", "read"), list(zip(STEPS, itertools.cycle(["immediate", "end"]), strict=False))
)
def test_a_function_transform_is_said_once(name: str, read: Any) -> None:
    plain = STEPS[name](net(), X)
    model = net()
    tracker = anynan.torch.track(model, advanced=anynan.Advanced(read=read))
    with pytest.warns(AnynanWarning, match="inside a function transform") as said:
        transformed = STEPS[name](model, X)
        STEPS[name](model, X)
    assert len(said) == len(tracker.notes) == 1
    assert_same(plain, transformed)
    watches(model, tracker)


class Ratio(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y / x


class Length(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        r = (x * x).sum(-1, keepdim=True).sqrt()
        return super().forward(x) * r


@pytest.mark.filterwarnings(
    "ignore:anynan. the model's layers are not read inside a function transform"
)
@pytest.mark.parametrize(
    ("kind", "name", "level"),
    [
        (kind, name, ("step", "layer", "operation")[(at + nth) % 3])
        for at, kind in enumerate((Ratio, Length))
        for nth, name in enumerate(STEPS)
        if (kind, name) != (Length, "vmap")
    ],
)
def test_a_step_runs_again_inside_its_transforms(kind: Any, name: str, level: Any) -> None:
    def step(x: Tensor) -> None:
        STEPS[name](model, x).square().mean().backward()

    torch.manual_seed(0)
    model = kind(2, 2)
    tracker = anynan.torch.track(step, level=level)
    x = torch.randn(4, 2)
    step(x)
    tracker(x)
    x[2] = 0
    event = failure(tracker, x)
    found = (event.operation.name, event.cause.tag, event.operation.source.text)
    root = "r = (x * x).sum(-1, keepdim=True).sqrt()"
    if kind is Ratio:
        assert found == ("divide", "divide_by_zero", "return y / x")
    elif name in BY_FORWARD:  # the slope is made as the value is, of a division
        assert found == ("divide", "divide_by_zero", root)
    else:
        assert found == ("sqrt", "norm_gradient_at_zero", root)
    assert not event.notes


def test_fake_tensors_are_said_once() -> None:
    model, mode = net(), FakeTensorMode(allow_non_fake_inputs=True)
    tracker = anynan.torch.track(model)
    with mode, pytest.warns(AnynanWarning, match="fake tensors") as said:
        assert model(mode.from_tensor(X)).shape == (3, 4)
    assert len(said) == 1
    watches(model, tracker)


@pytest.mark.parametrize("read", ["immediate", "end"])
def test_forward_mode_differentiation_is_watched(read: Any) -> None:
    @forward_ad.dual_level()
    def tangent(model: nn.Module) -> Tensor:
        return forward_ad.unpack_dual(model(forward_ad.make_dual(X, X))).tangent.detach()

    model: Any = net()
    plain = tangent(model)
    tracker = anynan.torch.track(model, advanced=anynan.Advanced(read=read))
    assert_same(plain, tangent(model))
    assert not tracker.notes
    model[2].armed = "forward"
    event = failure(lambda: [tangent(model), tracker.flush()])
    assert (event.layer, event.operation.name) == ("2", "log")
