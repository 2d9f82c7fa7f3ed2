"""``level="step"``: nothing inside a model is touched, and the report is the same."""

import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import anynan
from tests.failing import failure
from tests.torch_adapter.training import LINES, Fault, seed

pytestmark = pytest.mark.tier(2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.fault = Fault()
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.fault(self.norm(self.first(x))))


def training(model: nn.Module) -> Callable[[], torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def hooks(model: nn.Module) -> dict[str, int]:
    return {
        name: len(module._forward_hooks) + len(module._forward_pre_hooks)
        for name, module in model.named_modules()
        if module._forward_hooks or module._forward_pre_hooks
    }


def test_only_the_model_itself_has_hooks() -> None:
    model = Net()
    tracker = anynan.torch.track(model, level="step")
    assert set(hooks(model)) == {""}
    tracker.remove()
    assert not hooks(model)


def compiled_graphs(way: str, level: str | None) -> tuple[int, list[int], int]:
    """Train compiled, and count graphs, their nodes, and what breaks them."""
    torch.compiler.reset()
    counters.clear()
    sizes: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        sizes.append(len(graph.graph.nodes))
        return graph.forward

    seed()
    model = Net()
    step_model: nn.Module = model
    if way == "outer":
        step_model = torch.compile(model, backend=backend)  # type: ignore[assignment]
    else:
        model.compile(backend=backend)
    step = training(step_model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", anynan.AnynanWarning)
        if level is not None:
            anynan.torch.track(step_model, level=level)
        for _ in range(3):
            step()
    return len(sizes), sizes, sum(counters["graph_break"].values())


@pytest.mark.parametrize("way", ["outer", "in place"])
def test_a_compiled_graph_is_the_one_without_anynan(way: str) -> None:
    plain = compiled_graphs(way, None)
    assert compiled_graphs(way, "step") == plain
    torch.compiler.reset()


def test_graphs_that_are_there_are_used_and_the_fault_is_named() -> None:
    torch.compiler.reset()
    counters.clear()
    seed()
    model = Net()
    compiled = torch.compile(model, backend="eager")
    step = training(compiled)
    step()
    graphs = counters["stats"]["unique_graphs"]
    tracker = anynan.torch.track(compiled, level="step")
    step()
    assert counters["stats"]["unique_graphs"] == graphs, "nothing is compiled again"
    with torch.no_grad():
        model.last.weight.fill_(3e38)
    event = failure(step)
    assert event.layer == "last"
    tracker.remove()
    torch.compiler.reset()


def test_a_model_called_inside_compiled_code_is_watched_by_its_gradients_and_that_is_said() -> None:
    torch.compiler.reset()
    seed()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    compiled = torch.compile(model, backend="eager")  # before it is tracked: not followed
    tracker = anynan.torch.track(model, level="step")
    step = training(compiled)
    with pytest.warns(anynan.AnynanWarning, match=r"track what torch\.compile returned"):
        step()
    with torch.no_grad():
        model[1].weight.fill_(3e38)
    with pytest.raises(anynan.NonFiniteError):
        step()
    tracker.remove()
    torch.compiler.reset()


# Where the process compiled anything, the call may be in there, which is a warning.
UNCOMPILED = """
import torch, anynan
from tests.torch_adapter.test_step_level import Net, seed

for phase in ("forward", "backward"):
    seed()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tracker = anynan.torch.track(model, level="step")
    try:
        for step in range(4):
            model.fault.armed = phase if step == 3 else None
            optimizer.zero_grad()
            x = model.norm(model.first(torch.randn(8, 4)))
            model.last(model.fault(x)).square().mean().backward()
            optimizer.step()
    except anynan.NonFiniteError as error:
        event = error.event
        print(event.step, event.phase, event.layer, event.operation.source.text)
    tracker.remove()
    print("its parts are called past it" in " ".join(tracker.report().split()))
"""


@pytest.mark.multiprocess
def test_parts_that_are_called_past_the_model_are_watched_from_the_second_step() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", UNCOMPILED],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    told = [line for way, text in LINES.items() for line in (f"3 {way} fault {text}", "True")]
    assert run.stdout.splitlines() == told, run.stderr


@pytest.mark.filterwarnings("ignore:anynan. anynan did not see the model's own call")
def test_of_weights_alone_the_likeliest_is_named_and_that_it_is_likely_is_said() -> None:
    """Parts that are called past the model leave no call to run again."""
    seed()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = anynan.torch.track(model, level="step")
    model.fault.armed = "backward"
    model.last(model.fault(model.norm(model.first(torch.randn(8, 4))))).square().mean().backward()
    with pytest.raises(anynan.NonFiniteError) as caught:
        optimizer.step()
    tracker.remove()
    event = caught.value.event
    assert (event.layer, event.phase, event.parameter) == ("norm", "backward", "norm.bias")
    assert event.operation is None
    assert event.summary.shape == (4,)
    assert not event.trail
    assert event.notes[-1] == (
        "the gradients of 4 of 6 weights are bad, and it is not known which was first, probably "
        "that of norm.bias: mostly a backward pass runs up the model's list; level='layer' reads "
        "them in the order in which they are computed [many-weights]"
    )


@pytest.mark.parametrize(("way", "most"), [("model", 0), ("function", 1)])
def test_a_clean_step_seldom_takes_over_the_handler_of_interrupts(
    way: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed()
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
