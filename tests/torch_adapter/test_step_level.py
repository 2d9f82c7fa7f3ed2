"""``level="step"``: nothing inside a model is touched, and the report is the same."""

import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import anynan
from tests.failing import failure
from tests.torch_adapter.training import LINES, Fault, seed, train

pytestmark = pytest.mark.tier(2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.fault, self.last = Fault(), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.fault(self.norm(self.first(x))))


@pytest.fixture(autouse=True)
def _compiles_anew() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    seed()
    yield
    torch.compiler.reset()


def training(model: nn.Module) -> Callable[[], torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return lambda: train(model, optimizer, torch.randn(8, 4))


def compiled_graphs(way: str, level: str | None) -> tuple[int, list[int], int]:
    """Train compiled, and count graphs, their nodes, and what breaks them."""
    torch.compiler.reset()
    counters.clear()
    sizes: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        sizes.append(len(graph.graph.nodes))
        return graph.forward

    seed()
    model: Any = Net()
    if way == "outer":
        model = torch.compile(model, backend=backend)
    else:
        model.compile(backend=backend)
    step = training(model)
    with warnings.catch_warnings(action="error", category=anynan.AnynanWarning):
        if level is not None:
            anynan.torch.track(model, level=level)
        for _ in range(3):
            step()
    return len(sizes), sizes, sum(counters["graph_break"].values())


@pytest.mark.parametrize("way", ["outer", "in place"])
def test_a_compiled_graph_is_the_one_without_anynan(way: str) -> None:
    plain = compiled_graphs(way, None)
    assert compiled_graphs(way, "step") == plain


def test_graphs_that_are_there_are_used_and_the_fault_is_named() -> None:
    model = Net()
    compiled = torch.compile(model, backend="eager")
    step = training(compiled)
    step()
    graphs = counters["stats"]["unique_graphs"]
    with anynan.torch.track(compiled, level="step"):
        step()
        assert counters["stats"]["unique_graphs"] == graphs, "nothing is compiled again"
        model.last.weight.data.fill_(3e38)
        assert failure(step).layer == "last"


def test_a_model_called_inside_compiled_code_is_watched_by_its_gradients_and_that_is_said() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    step = training(torch.compile(model, backend="eager"))  # before it is tracked: not followed
    with anynan.torch.track(model, level="step"):
        with pytest.warns(anynan.AnynanWarning, match=r"track what torch\.compile returned"):
            step()
        model[1].weight.data.fill_(3e38)
        failure(step)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_parts_called_past_the_model_are_watched_from_the_second_step(phase: str) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        x = model.norm(model.first(torch.randn(8, 4)))
        model.last(model.fault(x)).square().mean().backward()
        optimizer.step()

    with anynan.torch.track(model, level="step") as tracker:
        for _ in range(3):  # nothing was compiled yet, or the calls might be in there
            step()
        model.fault.armed = phase
        event = failure(step)
        assert (event.step, event.layer, event.phase) == (3, "fault", phase)
        assert event.operation.source.text == LINES[phase]
        assert "its parts are called past it" in " ".join(tracker.report().split())


@pytest.mark.filterwarnings("ignore:anynan. anynan did not see the model's own call")
def test_of_weights_alone_the_likeliest_is_named_and_that_it_is_likely_is_said() -> None:
    """Parts that are called past the model leave no call to run again."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.fault.armed = "backward"
    with anynan.torch.track(model, level="step"):
        x = model.norm(model.first(torch.randn(8, 4)))
        model.last(model.fault(x)).square().mean().backward()
        event = failure(optimizer.step)
    assert (event.layer, event.phase, event.parameter) == ("norm", "backward", "norm.bias")
    assert (event.operation, event.summary.shape, event.trail) == (None, (4,), ())
    assert event.notes[-1] == (
        "the gradients of 4 of 6 weights are bad, and it is not known which was first, probably "
        "that of norm.bias: mostly a backward pass runs up the model's list; level='layer' reads "
        "them in the order in which they are computed [many-weights]"
    )


@pytest.mark.parametrize(("way", "most"), [("model", 0), ("function", 1)])
def test_a_clean_step_seldom_takes_over_the_handler_of_interrupts(way, most, monkeypatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    step = training(model)
    with anynan.torch.track(model if way == "model" else step) as tracker:
        run = step if way == "model" else tracker
        for _ in range(3):
            run()
        held = []
        real = signal.signal
        monkeypatch.setattr(signal, "signal", lambda *args: held.append(1) or real(*args))
        for _ in range(5):
            run()
        assert len(held) <= 5 * most * 2  # it is taken, and given back
