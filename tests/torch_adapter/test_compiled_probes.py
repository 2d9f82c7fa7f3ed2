"""Probes in a graph, as a backend compiles them."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import anynan
from anynan import AnynanWarning
from anynan._steps.tracked import inside
from anynan.torch.graphs.compiler import eager
from anynan.torch.graphs.fixed import Board
from tests.torch_adapter.compiling import BACKEND, Net, named, train

pytestmark = pytest.mark.tier(2)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield
    torch.compiler.reset()


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_function_transforms_inside_a_graph_are_said(transform: str) -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    x = torch.randn(3, 4)

    def mapped(x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(model)(x)

    def slope(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda y: model(y).sum())(x)

    fn = mapped if transform == "vmap" else slope
    expected = fn(x)
    tracker = anynan.torch.track(model)
    got = torch.compile(fn, backend=BACKEND, fullgraph=True)(x)
    assert torch.allclose(got, expected)
    with pytest.warns(AnynanWarning, match="inside a function transform"):
        tracker.remove()


# The slots themselves.


def test_slots_of_ten_thousand_layers_are_small() -> None:
    board = Board([str(i) for i in range(10_000)], torch.device("cpu"))
    assert board._memory.nbytes < 1_000_000


@dataclass
class Pair:
    one: torch.Tensor
    other: Any


class Boxes(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return {"a": x, "b": [x * 2, None, Pair(x * 3, x.detach().long())], "c": x[:0]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("value", "kind"),
    [(math.nan, "nan"), (math.inf, "posinf"), (-math.inf, "neginf"), (1e4, None)],
)
def test_the_probe_law_holds_in_graphs(dtype: Any, value: float, kind: str | None) -> None:
    model = Boxes()
    tracker = anynan.torch.track(model, action="record", advanced=anynan.Advanced(replay=False))
    call = torch.compile(lambda x: model(x), backend=BACKEND, fullgraph=True)
    x = torch.ones(3, 3, dtype=dtype)
    x[1, 1] = value
    with torch.no_grad():
        call(x)
    tracker.flush()
    (reading,) = [
        inside(tracker).judge.rows().reading(i) for i in range(len(inside(tracker).judge.rows().lo))
    ]
    assert (reading.kind, reading.site.dtype) == (kind, str(dtype).removeprefix("torch."))
    if kind is None:
        assert reading.hi == pytest.approx(3e4, rel=0.01)
    tracker.remove()


def test_large_doubles_are_finite() -> None:
    model = Boxes()
    with anynan.torch.track(model) as tracker:
        call = torch.compile(lambda x: model(x), backend=BACKEND, fullgraph=True)
        with torch.no_grad():
            call(torch.full((2, 2), 1e300, dtype=torch.float64))
    assert tracker.count("bad") == 0


def test_statistics_beyond_the_ends_are_said_to_be_missing() -> None:
    net = Net()
    tracker = anynan.torch.track(net, advanced=anynan.Advanced(stats=("rms", "max")))
    call = torch.compile(net, backend=BACKEND)
    with pytest.warns(
        AnynanWarning,
        match=r"compiled code measures only min, max and absmax, not Advanced\(stats=rms\)",
    ):
        train(call, net, 1)
    tracker.remove()


# With the real compiler.


def test_inductor_fuses_the_probes() -> None:
    from torch._inductor.utils import run_and_get_code

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.ReLU(), nn.Sigmoid(), nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    kernels, arrays, outputs = [], [], []
    x = torch.randn(64, 64)
    for tracked in (False, True):
        torch.compiler.reset()
        model = Chain()
        tracker = anynan.torch.track(model) if tracked else None
        call = torch.compile(model, fullgraph=True)
        with torch.no_grad():
            output, (code,) = run_and_get_code(call, x)
        outputs.append(output)
        kernels.append(code.count("async_compile.cpp_pybinding("))
        arrays.append(code.count("empty_strided_cpu((64, 64)"))
        if tracker is not None:
            readings = named(tracker)
            tracker.remove()
    assert kernels == arrays == [1, 1]
    assert torch.equal(*outputs)
    for layer, y in [("layers.0", x.relu()), ("layers.2", x.relu().sigmoid().tanh())]:
        low, high = readings[(layer, "forward", "output")]
        assert (low, high) == pytest.approx((float(y.min()), float(y.max())), rel=1e-6)


@pytest.mark.parametrize("paused", [False, True])
def test_a_model_that_is_compiled_after_it_was_tracked_is_followed(paused: bool) -> None:
    class Log(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(x)

    model = nn.Sequential(nn.Linear(2, 2), Log())  # a class of PyTorch's own is compiled with hooks
    tracker = anynan.torch.track(model, action="record")
    compiled: Any = torch.compile(model, backend="eager")
    if paused:
        tracker.pause()
        tracker.resume()
    nn.init.zeros_(model[0].weight)
    nn.init.ones_(model[0].bias)
    compiled(torch.ones(3, 2)).sum().backward()
    nn.init.constant_(model[0].bias, -1.0)
    compiled(torch.ones(3, 2)).sum().backward()
    tracker.flush()
    event = tracker.events[0]
    assert (event.layer, event.operation.name) == ("1", "log")
    assert [reading.layer for reading in tracker.history.select(phase="input")] == [""]
    tracker.remove()
    assert not compiled._forward_hooks
    assert not compiled._forward_pre_hooks


def test_of_second_runs_in_several_threads_the_last_lets_compiled_code_run_again() -> None:
    compiled = torch.compile(lambda x: torch.compiler.is_compiling(), backend=BACKEND)
    first, second = eager(), eager()
    with first:
        second.__enter__()
        assert not compiled(torch.ones(1))
    assert not compiled(torch.ones(1))
    second.__exit__(None, None, None)
    assert compiled(torch.ones(1))
