"""The exact answer: a failing step is run again, and the operation and the line are named."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anynan
from tests.torch_adapter.failing_models import (
    batch,
    failing,
    line,
    model_event,
    operation,
    step_event,
)

# Forward: operation, line, operands, first bad index.


class Squash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wrong: bool) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.log(-1 - x.abs()) if wrong else x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad / (x - x), None


def out_argument(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = torch.empty_like(x)
        torch.sqrt(-1 - x.abs(), out=y)
    return y


def assignment(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[1] = torch.log(-1 - x[1].abs())
    return y


def hook(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda grad: grad / (grad - grad))
    return y + 1


def library(x: torch.Tensor) -> torch.Tensor:
    return F.normalize(x * 0, eps=0.0)


BODIES: list[tuple[Any, str, str, str]] = [
    (lambda x: Squash.apply(x, True), "forward", "log",
     "return torch.log(-1 - x.abs()) if wrong else x * 1"),
    (lambda x: Squash.apply(x, False), "backward", "divide", "return grad / (x - x), None"),
    (out_argument, "forward", "sqrt", "torch.sqrt(-1 - x.abs(), out=y)"),
    (assignment, "forward", "log", "y[1] = torch.log(-1 - x[1].abs())"),
    (hook, "backward", "divide", "y.register_hook(lambda grad: grad / (grad - grad))"),
    (library, "forward", "divide", "return F.normalize(x * 0, eps=0.0)"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "phase", "name", "text"), BODIES, ids=lambda x: str(x)[:20])
def test_the_line_that_made_it_is_named(body: Any, phase: str, name: str, text: str) -> None:
    event = model_event(body)
    assert (event.layer, event.phase, operation(event).name) == ("", phase, name)
    assert line(event) == text


def test_in_place() -> None:
    def in_place(x: torch.Tensor) -> torch.Tensor:
        y = -1 - x.abs()
        y.log_()
        return y

    event = model_event(in_place)
    op = operation(event)
    assert (op.name, line(event)) == ("log", "y.log_()")
    assert op.inputs[0].nan == 0, "the operand is shown as it was before"
    assert op.inputs[0].max is not None
    assert op.inputs[0].max <= -1


def test_operands_and_first_bad_index() -> None:
    def divide(x: torch.Tensor) -> torch.Tensor:
        below = torch.ones(3, 4)
        below[1, 2] = 0
        return x / below

    event = model_event(divide)
    op = operation(event)
    assert op.name == "divide"
    assert op.output.first_bad == (1, 2)
    assert [(item.shape, item.dtype) for item in op.inputs] == [((3, 4), "float32")] * 2
    assert op.inputs[1].zero == 1
    assert op.inputs[0].nan + op.inputs[0].posinf + op.inputs[0].neginf == 0
    assert event.cause.tag == "divide_by_zero"
    assert "[1, 2]" in event.cause.evidence


def test_the_operands_of_a_number_minus_a_tensor_are_in_the_order_of_the_code() -> None:
    event = model_event(lambda x: 2e38 - (x * 0 - 3e38))
    op = operation(event)
    assert op.name == "subtract"
    assert [item.absmax for item in op.inputs] == pytest.approx([2e38, 3e38])


def test_rows_that_are_masked_in_part_are_not_counted() -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(3, 4).triu(-1).bool()  # of the last row all but the first
        mask[0, 0] = False
        mask[1, 0] = True
        return x.masked_fill(mask, -math.inf).softmax(-1)

    event = model_event(attend)
    assert event.cause.tag == "softmax_fully_masked"
    assert event.cause.evidence == "1 row is -inf throughout"


def test_a_python_float_that_a_step_returns() -> None:
    model = nn.Linear(4, 1)

    def step(x: torch.Tensor) -> float:
        return (model(x).sum() * 0 - 1).log().item()

    event = step_event(step, batch())
    assert (event.layer, event.phase, event.kind) == (None, "loss", "nan")


# Composites.


@pytest.mark.parametrize("mode", ["train", "eval", "inference"])
def test_transformer_encoder_layer(mode: str) -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True))
    model.train(mode == "train")
    with torch.no_grad():
        model[0].linear1.weight.mul_(1e25)
        model[0].linear2.weight.mul_(1e25)
    anynan.torch.track(model)
    context = torch.inference_mode() if mode == "inference" else torch.enable_grad()
    with context:
        event = failing(lambda: model(torch.randn(2, 3, 4)))
    assert event.layer.startswith("0")
    op = operation(event)
    if mode != "inference":
        assert (event.layer, op.name) == ("0.linear2", "linear")
    assert op.source is not None


# Backward: reported at the forward line that made it.


def test_a_guarded_forward_value_is_the_origin_of_a_bad_gradient() -> None:
    def guarded(x: torch.Tensor) -> torch.Tensor:
        x = F.relu(x) * 0
        return torch.where(x > 0, torch.log(x), x)

    event = model_event(guarded)
    assert (event.phase, event.kind, operation(event).name) == ("forward", "neginf", "log")
    assert line(event) == "return torch.where(x > 0, torch.log(x), x)"
    assert event.spread.surfaced == "backward first"
    assert event.cause.tag == "where_gradient_trap"


def test_keep_too_small_is_said() -> None:
    event = model_event(lambda x: x + torch.sqrt(0 * x), keep=0)
    assert operation(event).name == "sqrt"
    assert any("keep=" in note for note in event.notes)
