"""The exact answer: a failing step is run again, and the operation and the line are named."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anynan
from anynan import AnynanWarning, NonFiniteError
from tests.flat import split
from tests.torch_adapter.training import assert_same, bad


class Body(nn.Module):
    """Run a function between two layers, in its own ``forward``."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.function = function
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self.first(x)))


def batch(rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 4)


def failing(run: Callable[[], object]) -> anynan.Event:
    with pytest.raises(NonFiniteError) as caught:
        run()
    event = caught.value.event
    assert event.severity == "bad"
    assert str(caught.value)
    return event


def model_event(function: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> anynan.Event:
    """Train a tracked model once; return what stopped it."""
    model = Body(function)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    anynan.torch.track(model, **split(options))

    def run() -> None:
        model(batch()).square().mean().backward()
        optimizer.step()

    return failing(run)


def step_event(step: Callable[..., Any], *args: Any, **options: Any) -> anynan.Event:
    tracker = anynan.torch.track(step, **split(options))
    return failing(lambda: tracker(*args))


def operation(event: anynan.Event) -> anynan.events.Operation:
    assert event.operation is not None, event.notes
    return event.operation


def line(event: anynan.Event) -> str:
    source = operation(event).source
    assert Path(source.file).name.startswith("test_replay")
    return source.text


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


# Composites.


# Backward: reported at the forward line that made it.


def test_keep_too_small_is_said() -> None:
    event = model_event(lambda x: x + torch.sqrt(0 * x), keep=0)
    assert operation(event).name == "sqrt"
    assert any("keep=" in note for note in event.notes)


# Random numbers.


@pytest.mark.parametrize("read", ["immediate", "end"])
def test_dropout_is_reproduced(read: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), Reciprocal())
    anynan.torch.track(model, advanced=anynan.Advanced(read=read, backward=False), action="raise")
    x = batch(2)
    torch.manual_seed(5)
    with torch.no_grad():
        event = failing(lambda: model(x))
        anynan.untrack(model)
        torch.manual_seed(5)
        out = model(x)
    op = operation(event)
    assert op.output.posinf == int(out.isinf().sum()) > 0
    assert op.output.first_bad == tuple(out.isinf().nonzero()[0].tolist())


class Reciprocal(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1 / x.abs()


# What came in bad.


# Updates by hand.


# Modes.


@pytest.mark.parametrize("read", ["auto", "end"])
def test_autocast_is_entered_again(read: Any) -> None:
    model = Body(lambda x: torch.log(-1 - x.abs()))
    tracker = anynan.torch.track(model, advanced=anynan.Advanced(read=read))

    def run() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(batch())
        tracker.flush()  # after autocast has ended

    op = operation(failing(run))
    assert (op.name, op.inputs[0].dtype) == ("log", "bfloat16")
    assert not torch.is_autocast_enabled("cpu")


# What cannot be reproduced is said.


def test_a_reader_that_cannot_be_kept_is_said(tmp_path: Path) -> None:
    file = tmp_path / "numbers.txt"
    file.write_text("-1\n2\n3\n")
    model = Body(torch.log)
    with file.open() as lines:

        def step() -> torch.Tensor:
            return model(torch.full((1, 4), float(next(lines)))).sum()

        event = step_event(step)
        assert next(lines) == "2\n"
    assert operation(event).name == "log"  # of the model's own call, whose input is known
    assert any("`lines`" in note and "as an argument" in note for note in event.notes)


def test_an_input_changed_in_place_is_said() -> None:
    model = Body(lambda x: torch.log(-1 - x.abs()))
    tracker = anynan.torch.track(model, advanced=anynan.Advanced(read="end"))
    x = batch()
    model(x)
    x.zero_()
    event = failing(tracker.flush)
    assert any("changed in place" in note for note in event.notes)


def test_a_layer_called_past_the_model_is_said() -> None:
    model = Body(torch.tanh)
    anynan.torch.track(model)
    event = failing(lambda: model.first(torch.full((1, 4), torch.nan)))
    assert (event.layer, event.operation) == (None, None)  # it was given what is bad
    assert "first received a bad input" in str(event.cause)
    assert any("past the model" in note for note in event.notes)


# Nothing to report.


# What comes after an update in the same step.


def adversarial() -> tuple[Callable[[torch.Tensor], torch.Tensor], list[nn.Module]]:
    """Update a critic and then its opponent, in one step."""
    torch.manual_seed(0)
    maker, critic = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1), nn.Sigmoid())
    optimizers = [torch.optim.Adam(m.parameters(), 0.1) for m in (critic, maker)]

    def step(x: torch.Tensor) -> torch.Tensor:
        scores = critic(x), critic(maker(x).detach())
        (scores[1] - scores[0]).mean().backward()
        optimizers[0].step()
        loss = torch.log(critic(maker(x)) * 0).mean()
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        return loss

    return step, [maker, critic]


@pytest.mark.parametrize("level", ["step", "layer", "operation"])
def test_the_loss_of_a_second_model_after_the_update_of_the_first(level: Any) -> None:
    """The second run goes past the first update, and makes none."""
    states = []
    for tracked in (False, True):
        step, models = adversarial()
        track = partial(anynan.torch.track, level=level, action="record")
        run = track(step) if tracked else step
        run(torch.ones(3, 2))
        states.append([model.state_dict() for model in models])
    assert_same(*states)
    (event,) = bad(run)
    assert event.operation.name == "log"
    assert "critic(maker(x))" in event.operation.source.text
    assert event.cause.tag == "log_of_zero"


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_scripted_part_is_left_alone_and_said() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(self.norm(x))

    scripted = torch.jit.script(Part())  # type: ignore[no-untyped-call]
    model = nn.Sequential(nn.Linear(4, 4), scripted)
    for target in (model, lambda x: model(x).sum(), lambda x: scripted(x).sum()):
        count = int(scripted.norm.num_batches_tracked)
        with pytest.warns(AnynanWarning, match="scripted or traced take no hooks"):
            tracker = anynan.torch.track(target)
        event = failing(lambda tracker=tracker: tracker(batch()))
        assert event.operation.name == "log"
        assert not event.notes
        assert int(scripted.norm.num_batches_tracked) == count + 1
        tracker.remove()
    with pytest.raises(TypeError, match="track the module that it was made from"):
        anynan.torch.track(scripted)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_operation_has_the_same_name_without_gradients(mode: Any) -> None:
    model = nn.Linear(4, 3)

    def evaluate(x: torch.Tensor) -> torch.Tensor:
        with mode():
            return F.cross_entropy(model(x)[:0], torch.zeros(0).long())

    event = step_event(evaluate, batch())
    assert (event.operation.name, event.cause.tag) == ("nll_loss", "empty_mean")
