"""Outputs, inputs and calls of every shape are read."""

from collections.abc import Callable
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


def model_output(one: torch.Tensor, other: torch.Tensor) -> Any:
    library = pytest.importorskip("transformers.modeling_outputs")
    return library.BaseModelOutput(last_hidden_state=one, hidden_states=(one, other))


# What makes an output of two tensors, and the name of the second.
SHAPES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], str]] = {
    "tensor": (lambda one, other: other, ""),
    "tuple": (lambda one, other: (one, (None, other)), "[1][1]"),
    "dict": (lambda one, other: {"count": torch.tensor(3), "logits": other}, "['logits']"),
    "dataclass": (lambda one, other: Answer(one, "text", [one, other]), ".hidden[1]"),
    "model output": (model_output, "['hidden_states'][1]"),
}


class Shaped(nn.Module):
    """Return two tensors, the second one bad, inside some container."""

    def __init__(self, make: Any, wrong: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.make, self.wrong, self.scale = make, wrong, nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> Any:
        x = x * self.scale
        return self.make(x, self.wrong(x))


class Wrap(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inside(*args, **kwargs)


@pytest.mark.parametrize("kind", SHAPES)
def test_outputs_of_every_shape(kind: str) -> None:
    make, name = SHAPES[kind]
    outer = Wrap(Shaped(make, lambda x: torch.log(-1 - x.abs())))
    anynan.torch.track(outer)
    with pytest.raises(NonFiniteError) as caught:
        outer(batch())
    event = caught.value.event
    assert (event.layer, event.tensor, event.operation.name) == ("inside", f"output{name}", "log")


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass"])
def test_gradients_of_outputs_of_every_shape(kind: str) -> None:
    make, name = SHAPES[kind]
    model = Wrap(Shaped(make, lambda x: x * 2))
    anynan.torch.track(model)
    second = eval(f"out{name}", {"out": model(batch())})
    with pytest.raises(NonFiniteError) as caught:
        torch.sqrt(0 * second).sum().backward()
    event = caught.value.event
    assert (event.phase, event.operation.name) == ("backward", "sqrt")


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
