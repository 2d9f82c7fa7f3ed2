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
from anynan._trace.op import Op
from anynan.torch.observe import observe
from tests.failing import failure
from tests.torch_adapter.cause_parts import Body as Call
from tests.torch_adapter.training import assert_same, bad, batch, everything


class Body(nn.Module):
    """Run a function between two layers, in its own ``forward``."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.function, self.last = nn.Linear(4, 4), function, nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self.first(x)))


def model_event(function: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> anynan.Event:
    model = Body(function)
    anynan.torch.track(model, advanced=anynan.Advanced(**options))
    return failure(lambda: model(batch()).square().mean().backward())


def operation(event: anynan.Event) -> anynan.events.Operation:
    assert event.operation is not None, event.notes
    return event.operation


class Squash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wrong: bool) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.log(-1 - x.abs()) if wrong else x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad / (x - x), None


@torch.no_grad()
def out_argument(x: torch.Tensor) -> torch.Tensor:
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


BODIES: list[tuple[Any, str, str, str]] = [
    (lambda x: Squash.apply(x, True), "forward", "log",
     "return torch.log(-1 - x.abs()) if wrong else x * 1"),
    (lambda x: Squash.apply(x, False), "backward", "divide", "return grad / (x - x), None"),
    (out_argument, "forward", "sqrt", "torch.sqrt(-1 - x.abs(), out=y)"),
    (assignment, "forward", "log", "y[1] = torch.log(-1 - x[1].abs())"),
    (hook, "backward", "divide", "y.register_hook(lambda grad: grad / (grad - grad))"),
    (lambda x: F.normalize(x * 0, eps=0.0), "forward", "divide",
     '(lambda x: F.normalize(x * 0, eps=0.0), "forward", "divide",'),
]  # fmt: skip


@pytest.mark.parametrize(("body", "phase", "name", "text"), BODIES, ids=lambda x: str(x)[:20])
def test_the_line_that_made_it_is_named(body: Any, phase: str, name: str, text: str) -> None:
    event = model_event(body)
    assert (event.layer, event.phase, operation(event).name) == ("", phase, name)
    assert (event.operation.source.file, event.operation.source.text) == (__file__, text)


def test_in_place() -> None:
    op = operation(model_event(lambda x: (-1 - x.abs()).log_()))
    assert op.name == "log"
    assert op.inputs[0].nan == 0 and op.inputs[0].max <= -1, "as it was before"


def test_the_operands_of_a_number_minus_a_tensor_are_in_the_order_of_the_code() -> None:
    op = operation(model_event(lambda x: 2e38 - (x * 0 - 3e38)))
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


def test_keep_too_small_is_said() -> None:
    event = model_event(lambda x: x + torch.sqrt(0 * x), keep=0)
    assert operation(event).name == "sqrt" and any("keep=" in note for note in event.notes)


def test_dropout_is_reproduced() -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), Call(lambda x: 1 / x.abs()))
    x = batch(2)
    with anynan.torch.track(model, advanced=anynan.Advanced(backward=False)), torch.no_grad():
        torch.manual_seed(5)
        op = operation(failure(model, x))
    torch.manual_seed(5)
    out = model(x)
    assert op.output.posinf == int(out.isinf().sum()) > 0
    assert op.output.first_bad == tuple(out.isinf().nonzero()[0].tolist())


@pytest.mark.parametrize("read", ["auto", "end"])
def test_autocast_is_entered_again(read: Any) -> None:
    model = Body(lambda x: torch.log(-1 - x.abs()))
    tracker = anynan.torch.track(model, advanced=anynan.Advanced(read=read))

    def run() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(batch())
        tracker.flush()  # after autocast has ended

    op = operation(failure(run))
    assert (op.name, op.inputs[0].dtype) == ("log", "bfloat16")
    assert not torch.is_autocast_enabled("cpu")


def test_a_reader_that_cannot_be_kept_is_said(tmp_path: Path) -> None:
    file = tmp_path / "numbers.txt"
    file.write_text("-1\n2\n3\n")
    model = Body(torch.log)
    with file.open() as lines:

        def step() -> torch.Tensor:
            return model(torch.full((1, 4), float(next(lines)))).sum()

        event = failure(anynan.torch.track(step))
        assert next(lines) == "2\n"
    assert operation(event).name == "log"  # of the model's own call, whose input is known
    assert any("`lines`" in note and "as an argument" in note for note in event.notes)


def test_an_input_changed_in_place_is_said() -> None:
    model = Body(lambda x: torch.log(-1 - x.abs()))
    tracker = anynan.torch.track(model, advanced=anynan.Advanced(read="end"))
    x = batch()
    model(x)
    x.zero_()
    event = failure(tracker.flush)
    assert any("changed in place" in note for note in event.notes)


def test_a_layer_called_past_the_model_is_said() -> None:
    model = Body(torch.tanh)
    anynan.torch.track(model)
    event = failure(lambda: model.first(torch.full((1, 4), torch.nan)))
    assert (event.layer, event.operation) == (None, None)  # it was given what is bad
    assert "first received a bad input" in str(event.cause)
    assert any("past the model" in note for note in event.notes)


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
    for track in (lambda step: step, partial(anynan.torch.track, level=level, action="record")):
        step, models = adversarial()
        run = track(step)
        run(torch.ones(3, 2))
        states.append([model.state_dict() for model in models])
    assert_same(*states)
    (event,) = bad(run)
    assert (event.operation.name, event.cause.tag) == ("log", "log_of_zero")
    assert "critic(maker(x))" in event.operation.source.text


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
        with pytest.warns(anynan.AnynanWarning, match="scripted or traced take no hooks"):
            tracker = anynan.torch.track(target)
        event = failure(tracker, batch())
        assert (event.operation.name, event.notes) == ("log", ())
        assert int(scripted.norm.num_batches_tracked) == count + 1
        tracker.remove()
    with pytest.raises(TypeError, match="track the module that it was made from"):
        anynan.torch.track(scripted)


# What products see of such a run, operation by operation, and what is left.


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.counter = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counter += 1
        h = F.dropout(self.norm(self.up(x)), 0.5)
        return torch.relu_(h) * x


class Training:
    def __init__(self) -> None:
        self.model = Gated()
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss

    def state(self) -> Any:
        return everything([self.model], [self.optimizer]) | {"own": self.model.counter}


def test_a_gradient_names_its_forward_operation_and_an_update_its_phase() -> None:
    ops: list[tuple[str, int, int | None, str]] = []
    see = lambda op: ops.append((op.name, op.number, op.forward, op.phase))  # noqa: E731
    observe(Training().step, (torch.randn(3, 4),), {}, see)
    (forward,) = [n for name, n, _, phase in ops if (name, phase) == ("linear", "forward")]
    gradients = {of for name, _, of, phase in ops if (name, phase) == ("linear", "backward")}
    assert gradients == {forward}
    assert [phase for name, *_, phase in ops if name == "addcdiv"] == ["optimizer"] * 4
    assert ("mean", "loss") in {(name, phase) for name, *_, phase in ops}


def test_a_training_step_is_left_as_it_was_bit_for_bit() -> None:
    training, x = Training(), torch.randn(3, 4)
    for _ in range(2):
        before, held = training.state(), [*training.model.parameters()]
        versions = [p._version for p in held]
        found = observe(training.step, (x,), {}, lambda op: None)
        assert (found.error, found.notes) == (None, [])
        assert_same(before, training.state())
        assert [p._version for p in held] == versions
        # What it gives does not depend on who looks; and once more with an optimizer's state.
        assert torch.equal(found.value.detach(), training.step(x).detach())


def test_an_exception_of_the_observers_is_raised_and_all_is_put_back() -> None:
    training, x = Training(), torch.randn(3, 4)
    before = training.state()

    def stop(op: Op) -> None:
        if op.phase == "optimizer":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        observe(training.step, (x,), {}, stop)
    assert_same(before, training.state())
