"""The exact answer: a failing step is run again, and the operation and the line are named."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anynan
from anynan import AnynanWarning, NonFiniteError


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
    anynan.torch.track(model, **options)

    def run() -> None:
        model(batch()).square().mean().backward()
        optimizer.step()

    return failing(run)


def step_event(step: Callable[..., Any], *args: Any, **options: Any) -> anynan.Event:
    tracker = anynan.torch.track(step, **options)
    return failing(lambda: tracker(*args))


def operation(event: anynan.Event) -> anynan.Operation:
    assert event.operation is not None, event.notes
    return event.operation


def line(event: anynan.Event) -> str:
    source = operation(event).source
    assert source is not None
    assert source.file == __file__
    return source.text


# Forward: operation, line, operands, first bad index.


@pytest.mark.parametrize("read", ["immediate", "step"])
def test_functional_code_in_a_parents_forward(read: Any) -> None:
    def negative_log(x: torch.Tensor) -> torch.Tensor:
        y = x.abs() + 1
        return torch.log(-y) * 2  # the line to name

    event = model_event(negative_log, read=read)
    assert (event.layer, event.phase, event.kind) == ("", "forward", "nan")
    assert operation(event).name == "log"
    assert line(event) == "return torch.log(-y) * 2  # the line to name"
    source = operation(event).source
    assert source is not None
    assert source.function == "negative_log"
    assert source.line == negative_log.__code__.co_firstlineno + 2
    assert event.spread.surfaced == "forward last", "the layer after it showed it first"


def test_operands_and_first_bad_index() -> None:
    def divide(x: torch.Tensor) -> torch.Tensor:
        below = torch.ones(3, 4)
        below[1, 2] = 0
        return x / below

    event = model_event(divide)
    op = operation(event)
    assert op.name == "divide"
    assert op.output is not None
    assert op.output.first_bad == (1, 2)
    assert [(item.shape, item.dtype) for item in op.inputs] == [((3, 4), "float32")] * 2
    assert op.inputs[1].zero == 1
    assert op.inputs[0].nan + op.inputs[0].posinf + op.inputs[0].neginf == 0
    assert event.cause is not None
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
    assert event.cause is not None
    assert event.cause.tag == "softmax_fully_masked"
    assert event.cause.evidence == "1 row is -inf throughout"


def test_the_loss_outside_every_layer() -> None:
    model = nn.Linear(4, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        loss = torch.sqrt(-1 - out.square().mean())  # no root of that
        loss.backward()
        return loss

    event = step_event(step, batch())
    assert (event.layer, event.phase, event.kind) == (None, "loss", "nan")
    assert operation(event).name == "sqrt"
    assert line(event) == "loss = torch.sqrt(-1 - out.square().mean())  # no root of that"


def test_a_python_float_that_a_step_returns() -> None:
    model = nn.Linear(4, 1)

    def step(x: torch.Tensor) -> float:
        return (model(x).sum() * 0 - 1).log().item()

    event = step_event(step, batch())
    assert (event.layer, event.phase, event.kind) == (None, "loss", "nan")


class Squash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wrong: bool) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.log(-1 - x.abs()) if wrong else x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        zero = x - x
        return grad / zero, None


def test_custom_function_forward() -> None:
    event = model_event(lambda x: Squash.apply(x, True))
    assert (event.layer, event.phase, operation(event).name) == ("", "forward", "log")
    assert line(event) == "return torch.log(-1 - x.abs()) if wrong else x * 1"


def test_custom_function_backward() -> None:
    event = model_event(lambda x: Squash.apply(x, False))
    assert (event.layer, event.phase, operation(event).name) == ("", "backward", "divide")
    assert line(event) == "return grad / zero, None"


def test_in_place() -> None:
    def in_place(x: torch.Tensor) -> torch.Tensor:
        y = -1 - x.abs()
        y.log_()
        return y

    event = model_event(in_place)
    op = operation(event)
    assert op.name == "log"
    assert line(event) == "y.log_()"
    assert op.inputs[0].nan == 0, "the operand is shown as it was before"
    assert op.inputs[0].max is not None
    assert op.inputs[0].max <= -1


def test_out_argument() -> None:
    def out(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = torch.empty_like(x)
            torch.sqrt(-1 - x.abs(), out=y)
        return y

    event = model_event(out)
    assert operation(event).name == "sqrt"
    assert line(event) == "torch.sqrt(-1 - x.abs(), out=y)"


def test_index_assignment_of_a_computed_value() -> None:
    def assign(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[1] = torch.log(-1 - x[1].abs())
        return y

    event = model_event(assign)
    assert operation(event).name == "log"
    assert line(event) == "y[1] = torch.log(-1 - x[1].abs())"


def test_first_inf_and_first_nan_are_both_named() -> None:
    def overflow(x: torch.Tensor) -> torch.Tensor:
        big = torch.exp(x.abs() + 100)
        also = big.clone()
        return big - also

    event = model_event(overflow)
    assert (operation(event).name, event.kind) == ("exp", "posinf")
    assert line(event) == "big = torch.exp(x.abs() + 100)"
    assert event.then is not None
    assert event.then.name == "subtract"
    assert event.then.source is not None
    assert event.then.source.text == "return big - also"


def test_an_overflow_in_one_layer_and_its_nan_in_the_next() -> None:
    class Overflow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.exp(x.abs() + 100)

    model = nn.Sequential(Overflow(), nn.LayerNorm(4))
    anynan.torch.track(model)
    event = failing(lambda: model(batch()))
    assert (event.layer, operation(event).name) == ("0", "exp")


# Composites.


def test_attention_that_sees_no_key() -> None:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            out, _ = self.attn(x, x, x, key_padding_mask=mask)
            return out

    model = Attend()
    anynan.torch.track(model)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    mask[1] = True
    event = failing(lambda: model(torch.randn(2, 3, 4), mask))
    assert (event.layer, operation(event).name) == ("attn", "softmax")
    assert line(event) == "out, _ = self.attn(x, x, x, key_padding_mask=mask)"
    source = operation(event).source
    assert source is not None
    assert source.via is not None
    assert "torch/nn/functional.py" in source.via
    assert event.cause is not None
    assert event.cause.tag == "softmax_fully_masked"


def test_normalize_names_the_inner_division() -> None:
    event = model_event(lambda x: F.normalize(x * 0, eps=0.0))
    assert operation(event).name == "divide"
    assert line(event) == "event = model_event(lambda x: F.normalize(x * 0, eps=0.0))"


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
    assert event.layer is not None
    assert event.layer.startswith("0")
    op = operation(event)
    if mode != "inference":
        assert (event.layer, op.name) == ("0.linear2", "linear")
    assert op.source is not None


def test_recurrent_network() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.RNN(4, 3, batch_first=True, nonlinearity="relu")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out, _ = self.rnn(x)
            return out

    model = Recurrent()
    with torch.no_grad():
        model.rnn.weight_hh_l0.fill_(1e3)
        model.rnn.weight_ih_l0.fill_(1)
    anynan.torch.track(model)
    event = failing(lambda: model(torch.ones(2, 30, 4)))
    assert (event.layer, event.phase, event.kind) == ("rnn", "forward", "posinf")
    assert line(event) == "out, _ = self.rnn(x)"
    assert event.cause is not None
    assert event.cause.tag == "overflow_in_dtype"


def test_after_an_lstm() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 3, num_layers=2, dropout=0.5, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out, (hidden, _) = self.lstm(x)
            return out.sum(1) + torch.sqrt(0 * hidden[-1])

    model = Recurrent()
    anynan.torch.track(model)
    event = failing(lambda: model(torch.randn(2, 5, 4)).sum().backward())
    assert (event.layer, event.phase, operation(event).name) == ("", "backward", "sqrt")
    assert line(event) == "return out.sum(1) + torch.sqrt(0 * hidden[-1])"


# Backward: reported at the forward line that made it.


@pytest.mark.parametrize("read", ["immediate", "step"])
def test_backward_is_reported_at_the_forward_line(read: Any) -> None:
    def root(x: torch.Tensor) -> torch.Tensor:
        y = x * 0
        return x + torch.sqrt(y)

    event = model_event(root, read=read)
    assert (event.layer, event.phase) == ("", "backward")
    assert operation(event).name == "sqrt"
    assert operation(event).raw.startswith("SqrtBackward0")
    assert line(event) == "return x + torch.sqrt(y)"
    assert event.cause is not None
    assert event.cause.tag == "sqrt_gradient_at_zero"


def test_where_gradient_trap() -> None:
    def guarded(x: torch.Tensor) -> torch.Tensor:
        x = F.relu(x) * 0
        return torch.where(x > 0, torch.sqrt(x), x)

    event = model_event(guarded)
    assert event.phase == "backward"
    assert (operation(event).name, event.layer) == ("sqrt", "")
    assert line(event) == "return torch.where(x > 0, torch.sqrt(x), x)"
    assert event.cause is not None
    assert event.cause.tag == "where_gradient_trap"


def test_a_guarded_forward_value_is_the_origin_of_a_bad_gradient() -> None:
    def guarded(x: torch.Tensor) -> torch.Tensor:
        x = F.relu(x) * 0
        return torch.where(x > 0, torch.log(x), x)

    event = model_event(guarded)
    assert (event.phase, event.kind, operation(event).name) == ("forward", "neginf", "log")
    assert line(event) == "return torch.where(x > 0, torch.log(x), x)"
    assert event.spread.surfaced == "backward first"
    assert event.cause is not None
    assert event.cause.tag == "where_gradient_trap"


def test_backward_fault_in_a_tracked_step_outside_every_layer() -> None:
    model = nn.Linear(4, 2)

    def step(x: torch.Tensor) -> torch.Tensor:
        error = model(x) - model(x).detach()
        loss = torch.sqrt(error.square().sum())
        loss.backward()
        return loss

    event = step_event(step, batch())
    assert (event.layer, event.phase) == (None, "backward")
    assert operation(event).name == "sqrt"
    assert line(event) == "loss = torch.sqrt(error.square().sum())"


def test_user_hook_that_makes_a_nan() -> None:
    def hooked(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(lambda grad: grad / (grad - grad))
        return y + 1

    event = model_event(hooked)
    assert event.phase == "backward"
    assert operation(event).name == "divide"
    assert line(event) == "y.register_hook(lambda grad: grad / (grad - grad))"


def test_an_incoming_bad_gradient_is_said() -> None:
    model = Body(torch.tanh)
    anynan.torch.track(model)
    out = model(batch())
    event = failing(lambda: torch.sqrt(0 * out).sum().backward())
    assert (event.layer, event.phase) == (None, "backward")
    assert operation(event).name == "sqrt"
    assert line(event) == "event = failing(lambda: torch.sqrt(0 * out).sum().backward())"


def test_keep_too_small_is_said() -> None:
    event = model_event(lambda x: x + torch.sqrt(0 * x), keep=0)
    assert operation(event).name == "sqrt"
    assert any("keep=" in note for note in event.notes)


def test_keep_large_enough_says_nothing() -> None:
    event = model_event(lambda x: x + torch.sqrt(0 * x))
    assert not event.notes


# Random numbers.


@pytest.mark.parametrize("read", ["immediate", "step"])
def test_dropout_is_reproduced(read: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), Reciprocal())
    anynan.torch.track(model, read=read, action="raise", backward=False)
    x = batch(2)
    torch.manual_seed(5)
    with torch.no_grad():
        event = failing(lambda: model(x))
        anynan.torch.untrack(model)
        torch.manual_seed(5)
        out = model(x)
    op = operation(event)
    assert op.output is not None
    assert op.output.posinf == int(out.isinf().sum()) > 0
    assert op.output.first_bad == tuple(out.isinf().nonzero()[0].tolist())


class Reciprocal(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1 / x.abs()


def test_every_generator_is_reproduced() -> None:
    class Drawn:  # a replay leaves what a class holds alone
        numbers: ClassVar[list[tuple[float, float, float]]] = []

    def noisy(x: torch.Tensor) -> torch.Tensor:
        numbers = random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002
        Drawn.numbers.append(numbers)
        return torch.log(-1 - x.abs()) * sum(numbers)

    event = model_event(noisy)
    assert operation(event).name == "log"
    assert len(Drawn.numbers) == 3, "once, once more in the replay, and once with the fix"
    assert Drawn.numbers[0] == Drawn.numbers[1]


# What came in bad.


def test_a_bad_row_of_the_batch() -> None:
    model = nn.Linear(4, 2)

    def step(image: torch.Tensor) -> torch.Tensor:
        return model(image).sum()

    x = batch(5)
    x[3, 1] = torch.nan
    event = step_event(step, x)
    assert (event.phase, event.tensor) == ("input", "image")
    assert event.cause is not None
    assert event.cause.tag == "bad_input"
    assert "3" in event.cause.evidence
    assert "row" in event.cause.evidence


def test_a_bad_label() -> None:
    model = nn.Linear(4, 2)

    def step(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), target)

    target = torch.zeros(3, 2)
    target[2, 0] = torch.inf
    event = step_event(step, batch(), target)
    assert (event.phase, event.tensor, event.kind) == ("input", "target", "posinf")
    assert event.cause is not None
    assert event.cause.tag == "bad_label"


def test_a_mask_in_the_batch_is_fine_until_it_does_harm() -> None:
    model = nn.Linear(3, 3)

    @anynan.torch.track
    def step(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (model(x) + mask).softmax(-1).sum()

    mask = torch.zeros(3, 3)
    mask[0, 1:] = -torch.inf
    step(torch.randn(3, 3), mask)
    mask[1] = -torch.inf
    event = failing(lambda: step(torch.randn(3, 3), mask))
    assert operation(event).name == "softmax"
    assert event.cause is not None
    assert event.cause.tag == "softmax_fully_masked"


def test_a_bad_parameter() -> None:
    model = Body(torch.tanh)
    anynan.torch.track(model)
    with torch.no_grad():
        model(batch())
        model.last.bias[1] = torch.nan
        event = failing(lambda: model(batch()))
    assert (event.phase, event.parameter, event.layer) == ("parameter", "last.bias", "last")
    assert event.summary is not None
    assert event.summary.first_bad == (1,)
    assert event.cause is not None
    assert event.cause.tag == "bad_parameter"
    assert event.since == (0, 1)


def test_bad_running_statistics() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    anynan.torch.track(model)
    model[1].running_mean[2] = torch.nan
    event = failing(lambda: model(batch()))
    assert (event.phase, event.parameter, event.layer) == ("parameter", "1.running_mean", "1")
    assert event.cause is not None
    assert event.cause.tag == "running_statistics_bad"


def test_good_running_statistics_and_bad_arithmetic() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, eps=0.0)).eval()
    model[1].running_var[2] = 0  # finite, and nothing to divide by
    anynan.torch.track(model)
    event = failing(lambda: model(batch()))
    assert (event.phase, event.layer, event.parameter) == ("forward", "1", None)
    assert operation(event).name == "batch_norm"


# Updates by hand.


@pytest.mark.parametrize(("exact", "step"), [(True, 0), (False, 1)])
@pytest.mark.parametrize("read", ["immediate", "step"])
def test_hand_written_update(exact: bool, step: int, read: Any) -> None:
    model = nn.Linear(4, 2)

    def update(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        for p in model.parameters():
            assert p.grad is not None
            p.data -= 0.1 * p.grad / (p.grad - p.grad)
            p.grad = None

    tracker = anynan.torch.track(update, parameters=exact, read=read)
    event = failing(lambda: (tracker(batch()), tracker(batch())))
    assert event.phase == "parameter"
    assert event.parameter in ("weight", "bias")
    assert event.since == (0, step)


# Modes.


def test_autocast_is_entered_again() -> None:
    model = Body(lambda x: torch.log(-1 - x.abs()))
    anynan.torch.track(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        event = failing(lambda: model(batch()))
    op = operation(event)
    assert op.name == "log"
    assert op.inputs[0].dtype == "bfloat16"


def test_deferred_replay_after_autocast_has_ended() -> None:
    model = Body(lambda x: torch.log(-1 - x.abs()))
    tracker = anynan.torch.track(model, read="step")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(batch())
    event = failing(tracker.check)
    assert operation(event).inputs[0].dtype == "bfloat16"
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
    tracker = anynan.torch.track(model, read="step")
    x = batch()
    model(x)
    x.zero_()
    event = failing(tracker.check)
    assert any("changed in place" in note for note in event.notes)


def test_a_batch_taken_apart_by_the_step_is_whole_again_in_the_replay() -> None:
    model = nn.Linear(4, 2)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        labels = batch.pop("labels")
        return torch.log(-1 - (model(**batch) - labels).abs()).sum()

    event = step_event(step, {"input": batch(), "labels": torch.zeros(3, 2)})
    assert operation(event).name == "log"
    assert not event.notes


def test_a_layer_called_past_the_model_is_said() -> None:
    model = Body(torch.tanh)
    anynan.torch.track(model)
    event = failing(lambda: model.first(torch.full((1, 4), torch.nan)))
    assert (event.layer, event.operation) == (None, None)  # it was given what is bad
    assert "what first was given" in str(event.cause)
    assert any("past the model" in note for note in event.notes)


def test_replaying_is_true_only_in_the_replay() -> None:
    class Seen:
        told: ClassVar[list[bool]] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        Seen.told.append(anynan.replaying())
        return torch.log(-1 - x.abs())

    assert not anynan.replaying()
    model_event(look)
    assert Seen.told == [False, True, True]
    assert not anynan.replaying()


def test_a_replay_that_raises_tells_what_and_stays_at_the_layer() -> None:
    def fragile(x: torch.Tensor) -> torch.Tensor:
        if anynan.replaying():
            msg = "only once"
            raise RuntimeError(msg)
        return torch.log(-1 - x.abs())

    event = model_event(fragile)
    assert event.kind == "nan"
    assert event.operation is None
    assert any("RuntimeError: only once" in note for note in event.notes)


def test_the_same_failure_is_replayed_a_few_times_only() -> None:
    class Calls:
        told: ClassVar[list[bool]] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        Calls.told.append(anynan.replaying())
        return torch.log(-1 - x.abs())

    model = Body(look)
    tracker = anynan.torch.track(model, action="record")
    with torch.no_grad():
        for _ in range(8):
            model(batch())
    # Each time once as it was, and once with the fix.
    assert sum(Calls.told) == 6
    (event,) = tracker.events
    assert (event.times, event.operation.name) == (8, "log")


# Nothing to report.


def masked_softmax(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(4, 4).triu(1).bool()
    return (x[:, None, :] * x[:, :, None]).masked_fill(mask, -torch.inf).softmax(-1).sum(1)


def where_guard(x: torch.Tensor) -> torch.Tensor:
    safe = torch.where(x > 0, x, 1.0)
    return torch.where(x > 0, torch.log(safe), 0.0)


def forward_guard(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.where(x > 0, torch.log(x), 0.0)


def nan_to_num(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.nan_to_num(x / 0, posinf=1.0, neginf=-1.0)


def running_maximum(x: torch.Tensor) -> torch.Tensor:
    best = torch.full((4,), -math.inf)
    return torch.maximum(best, x)


def logsumexp_with_mask(x: torch.Tensor) -> torch.Tensor:
    mask = torch.tensor([0.0, -math.inf, 0.0, 0.0])
    return x + torch.logsumexp(x + mask, -1, keepdim=True)


def attention_with_additive_mask(x: torch.Tensor) -> torch.Tensor:
    q = x.view(1, 1, -1, 4)
    mask = torch.full((q.shape[2],) * 2, -math.inf).triu(1)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).view(-1, 4)


def clamped(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x.detach() + 1000).clamp(max=1.0) * x


def top_k(x: torch.Tensor) -> torch.Tensor:
    least = x.topk(2).values[:, -1:]
    return x.masked_fill(x < least, -math.inf).softmax(-1)


@pytest.mark.parametrize(
    "function",
    [
        masked_softmax,
        where_guard,
        forward_guard,
        nan_to_num,
        running_maximum,
        logsumexp_with_mask,
        attention_with_additive_mask,
        clamped,
        top_k,
    ],
)
@pytest.mark.parametrize("level", ["layer", "operation"])
def test_what_the_program_handles_is_not_reported(function: Any, level: Any) -> None:
    model = Body(function)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with anynan.torch.track(model, level=level) as tracker:
        for _ in range(2):
            model(batch()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not [event for event in tracker.events if event.severity == "bad"]
    if level == "layer":
        assert not tracker.events


def test_an_inf_that_leaves_a_layer_as_a_mask_is_a_suspect() -> None:
    class Mask(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.masked_fill(x < 0, -math.inf)

    model = nn.Sequential(Mask(), nn.Softmax(-1))
    with anynan.torch.track(model) as tracker, torch.no_grad():
        model(torch.tensor([[1.0, -1.0]]))
    assert [(event.layer, event.kind, event.severity) for event in tracker.events] == [
        ("0", "neginf", "suspect")
    ]


def test_a_mask_from_the_same_layer_does_not_stop_the_replay() -> None:
    class Shift(nn.Module):
        def forward(self, x: torch.Tensor, by: float) -> torch.Tensor:
            return x + by

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = Shift()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            masked = self.shift(x, -math.inf)
            weights = (x.abs() + 1).log() - masked
            return self.shift(weights * 0, 0.0) + x

    model = Model()
    anynan.torch.track(model)
    event = failing(lambda: model(batch()))
    assert operation(event).name == "subtract"
    assert line(event) == "weights = (x.abs() + 1).log() - masked"
    assert event.then is not None
    assert event.then.name == "multiply"
    assert event.spread.surfaced == "forward shift"


def test_a_placed_positive_inf_is_a_suspect_and_replayed_once() -> None:
    replays: list[bool] = []

    class Distances(nn.Module):
        """Give Inf where there is no edge, as for shortest paths."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            replays.append(anynan.replaying())
            return x.masked_fill(x < 0, math.inf)

    class Nearest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.distances = Distances()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.distances(x).min(-1).values

    model = Nearest()
    with anynan.torch.track(model) as tracker, torch.no_grad():
        for _ in range(3):
            model(torch.tensor([[1.0, -1.0]]))
    assert {(event.layer, event.kind, event.severity) for event in tracker.events} == {
        ("distances", "posinf", "suspect")
    }
    assert sum(replays) == 1
    assert "only placed values" in tracker.report()


def test_warn_prints_the_same_report() -> None:
    model = Body(lambda x: torch.log(-1 - x.abs()))
    anynan.torch.track(model, action="warn")
    with pytest.warns(AnynanWarning) as said, torch.no_grad():
        model(batch())
    text = str(said[0].message)
    assert text.startswith("NaN first appeared in the forward pass of step 0")
    assert "op      log" in text
    assert "model = Body(lambda x: torch.log(-1 - x.abs()))" in text


# What comes after an update in the same step.


def adversarial(bad: bool) -> tuple[Callable[[torch.Tensor], torch.Tensor], list[nn.Module]]:
    """Update a critic and then its opponent, in one step."""
    torch.manual_seed(0)
    maker, critic = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1), nn.Sigmoid())
    optimizers = [torch.optim.Adam(m.parameters(), 0.1) for m in (critic, maker)]

    def step(x: torch.Tensor) -> torch.Tensor:
        scores = critic(x), critic(maker(x).detach())
        (scores[1] - scores[0]).mean().backward()
        optimizers[0].step()
        loss = torch.log(critic(maker(x)) * (0 if bad else 1)).mean()
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        return loss

    return step, [maker, critic]


@pytest.mark.parametrize("level", ["step", "layer", "operation"])
def test_the_loss_of_a_second_model_after_the_update_of_the_first(level: Any) -> None:
    step, _ = adversarial(bad=True)
    event = step_event(step, torch.ones(3, 2), level=level)
    assert event.operation is not None
    assert event.operation.source is not None
    assert event.operation.name == "log"
    assert "critic(maker(x))" in event.operation.source.text
    assert event.cause is not None
    assert event.cause.tag == "log_of_zero"


def test_a_second_run_past_an_update_makes_none() -> None:
    runs = []
    for tracked in (False, True):
        step, models = adversarial(bad=True)
        run = anynan.torch.track(step, action="record") if tracked else step
        run(torch.ones(3, 2))
        runs.append([x.clone() for m in models for x in m.state_dict().values()])
        runs[-1] += [p.grad.clone() for m in models for p in m.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) or (a != a).any() for a, b in zip(*runs, strict=True))
    assert len(runs[0]) == len(runs[1])


def test_a_metric_of_nothing_after_the_update() -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return {"loss": loss, "accuracy": net(x[:0]).argmax(-1).float().mean()}

    event = step_event(step, batch())
    assert event.operation is not None
    assert (event.operation.name, event.tensor) == ("mean", "result['accuracy']")


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
        with pytest.warns(AnynanWarning, match="scripted or traced takes no hooks"):
            tracker = anynan.torch.track(target)
        event = failing(lambda tracker=tracker: tracker(batch()))
        assert event.operation is not None
        assert event.operation.name == "log"
        assert not event.notes
        assert int(scripted.norm.num_batches_tracked) == count + 1
        tracker.remove()
    with pytest.raises(TypeError, match="track the module that it was made from"):
        anynan.torch.track(scripted)
