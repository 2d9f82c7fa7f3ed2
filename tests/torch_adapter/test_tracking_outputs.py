"""Outputs, inputs and calls of every shape are read."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import anynan
from anynan import NonFiniteError
from tests.torch_adapter.stepping import Net, batch
from tests.torch_adapter.training import bad

# Shapes of inputs and outputs.


@dataclass
class Answer:
    logits: torch.Tensor
    note: str = ""
    hidden: Any = None


class Returns(nn.Module):
    """Return a bad tensor inside some container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> Any:
        good, wrong = x * self.scale, torch.log(-1 - (x * self.scale).abs())
        if self.kind == "tensor":
            return wrong
        if self.kind == "tuple":
            return good, (None, wrong)
        if self.kind == "dict":
            return {"count": torch.tensor(3), "logits": wrong}
        if self.kind == "dataclass":
            return Answer(good, "text", [good, wrong])
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=good, hidden_states=(good, wrong))


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        ("tensor", "output"),
        ("tuple", "output[1][1]"),
        ("dict", "output['logits']"),
        ("dataclass", "output.hidden[1]"),
        ("modeloutput", "output['hidden_states'][1]"),
    ],
)
def test_outputs_of_every_shape(kind: str, tensor: str) -> None:
    if kind == "modeloutput":
        pytest.importorskip("transformers")
    model = nn.ModuleDict({"inside": Returns(kind)})
    outer = Wrap(model["inside"])
    anynan.torch.track(outer)
    with pytest.raises(NonFiniteError) as caught:
        outer(batch())
    event = caught.value.event
    assert event.layer == "inside"
    assert event.tensor.replace('"', "'") in (
        tensor,
        tensor.replace("['hidden_states']", ".hidden_states"),
    )
    assert event.operation.name == "log"


class Wrap(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inside(*args, **kwargs)


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass"])
def test_gradients_of_outputs_of_every_shape(kind: str) -> None:
    class Make(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {
                "tuple": (x, x * 2),
                "dict": {"a": x, "b": x * 2},
                "dataclass": Answer(x, hidden=x * 2),
            }[kind]

    class Use(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.make = nn.Linear(4, 4), Make()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.make(self.first(x))
            second = {
                "tuple": lambda: out[1],
                "dict": lambda: out["b"],
                "dataclass": lambda: out.hidden,
            }[kind]()
            return torch.sqrt(0 * second).sum()

    model = Use()
    anynan.torch.track(model)
    with pytest.raises(NonFiniteError) as caught:
        model(batch()).backward()
    event = caught.value.event
    assert event.phase == "backward"
    assert event.operation.name == "sqrt"


def test_keyword_inputs_are_named() -> None:
    model = Wrap(Net())
    anynan.torch.track(model)
    x = batch()
    x[1, 2] = torch.nan
    with pytest.raises(NonFiniteError) as caught:
        model(x=x)
    event = caught.value.event
    assert (event.phase, event.tensor, event.kind) == ("input", "x", "nan")
    assert event.cause.tag == "bad_input"
    assert "row" in str(caught.value)


def test_positional_inputs_are_named_after_the_argument() -> None:
    class Two(nn.Module):
        def forward(self, image: torch.Tensor, extra: dict[str, torch.Tensor]) -> torch.Tensor:
            return image + extra["mask"]

    model = Two()
    anynan.torch.track(model)
    with pytest.raises(NonFiniteError) as caught:
        model(batch(), {"mask": torch.full((4,), torch.nan)})
    assert caught.value.event.tensor == "extra['mask']"


# Shapes of models.


def test_shared_module_counts_its_calls() -> None:
    class Log(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(x)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = Log()
            self.alias = self.shared

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.alias(self.shared(1 + x.abs()) - 100)

    model = Twice()
    tracker = anynan.torch.track(model, action="record")
    with torch.no_grad():
        model(batch())
    (event,) = bad(tracker)
    assert event.layer in ("shared", "alias")
    assert event.call == 1
    assert [r.call for r in tracker.history if r.layer == event.layer] == [0, 1]


def test_reentrant_module() -> None:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            if not depth:
                return torch.log(-1 - self.leaf(x).abs())
            return self(x, depth - 1) + 1

    model = Tree()
    tracker = anynan.torch.track(model, action="record")
    with torch.no_grad():
        model(batch())
    (event,) = bad(tracker)
    assert event.layer == ""
    assert event.operation.name == "log"
    assert tracker.history.steps() == [0]
    assert len([r for r in tracker.history if r.phase == "input"]) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("read", ["immediate", "end"])
def test_without_gradients(mode: Any, read: Any) -> None:
    model = Net().eval()
    tracker = anynan.torch.track(model, advanced=anynan.Advanced(read=read))
    with mode():
        model(batch())
        model(batch())
    assert tracker.history.steps() == [0, 1]
    model.fault.armed = "forward"
    with mode(), pytest.raises(NonFiniteError) as caught:
        model(batch())
    event = caught.value.event
    assert (event.layer, event.step, event.operation.name) == ("fault", 2, "log")
    # And outside inference mode again, with the same slots.
    model.fault.armed = None
    model(batch()).sum().backward()
