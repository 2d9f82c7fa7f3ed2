"""The second run repeats the first: random numbers, batches, weights, autocast."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anynan
from tests.torch_adapter.failing_models import (
    Body,
    batch,
    failing,
    operation,
    step_event,
)

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
    assert event.cause.tag == "softmax_fully_masked"


def test_good_running_statistics_and_bad_arithmetic() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, eps=0.0)).eval()
    model[1].running_var[2] = 0  # finite, and nothing to divide by
    anynan.torch.track(model)
    event = failing(lambda: model(batch()))
    assert (event.phase, event.layer, event.parameter) == ("forward", "1", None)
    assert operation(event).name == "batch_norm"


# Updates by hand.


@pytest.mark.parametrize(("exact", "step"), [(True, 0), (False, 1)])
@pytest.mark.parametrize("read", ["immediate", "end"])
def test_hand_written_update(exact: bool, step: int, read: Any) -> None:
    model = nn.Linear(4, 2)

    def update(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        for p in model.parameters():
            assert p.grad is not None
            p.data -= 0.1 * p.grad / (p.grad - p.grad)
            p.grad = None

    tracker = anynan.torch.track(update, advanced=anynan.Advanced(parameters=exact, read=read))
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
    tracker = anynan.torch.track(model, advanced=anynan.Advanced(read="end"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(batch())
    event = failing(tracker.flush)
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
    tracker = anynan.torch.track(model, advanced=anynan.Advanced(read="end"))
    x = batch()
    model(x)
    x.zero_()
    event = failing(tracker.flush)
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
