"""A gradient that the program wrote to after the backward pass."""

from typing import Any

import pytest
import torch
from torch import nn

import anynan


def clipped(width: int, write: Any) -> anynan.Event:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, width, bias=False), nn.ReLU(), nn.Linear(width, width, bias=False)
    )
    optimizer = torch.optim.SGD(model.parameters())
    with anynan.torch.track(model, action="record") as tracker:
        (model(torch.randn(5, 4)).square().mean() * 1e25).backward()
        gradients = [p.grad for p in model.parameters()]
        norm = torch.sqrt(sum(grad.pow(2).sum() for grad in gradients))  # finite numbers, Inf
        write(model, gradients, norm)
        optimizer.step()
    (event,) = tracker.events
    return event


@pytest.mark.parametrize("width", [8, 100])
@pytest.mark.parametrize(
    "write",
    [
        lambda _, gradients, norm: [grad.mul_(norm / norm) for grad in gradients],
        lambda _, gradients, norm: torch._foreach_mul_(gradients, norm / norm),
        lambda _, gradients, norm: [grad.copy_(grad / norm * norm) for grad in gradients],
        lambda model, _, norm: [
            setattr(p, "grad", p.grad / norm * norm) for p in model.parameters()
        ],
    ],
    ids=["in place", "all at once", "copied", "replaced"],
)
def test_what_clipping_made_of_finite_gradients_is_told(width: int, write: Any) -> None:
    event = clipped(width, write)
    assert event.operation is not None
    assert event.operation.name == "pow"
    assert event.operation.source is not None
    assert "grad.pow(2).sum()" in event.operation.source.text


def test_a_gradient_written_past_the_framework_is_said_to_be_unexplained() -> None:
    def write(_: Any, gradients: list[torch.Tensor], __: Any) -> None:
        gradients[0].numpy()[:] = torch.nan

    event = clipped(100, write)
    assert event.operation is None
    (note,) = (note for note in event.notes if "gradient-finite" in note)
    assert "it may have been written to after the backward pass" in note.lower()
    assert not any("replay-clean" in note for note in event.notes)


def test_a_step_that_writes_past_the_framework_is_no_other_run() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters())

    @anynan.torch.track(action="record")
    def step(x: torch.Tensor) -> None:
        model(x).mean().backward()
        model.weight.grad.numpy()[:] = torch.nan  # type: ignore[union-attr]
        optimizer.step()

    step(torch.ones(2, 4))
    (event,) = step.events
    assert any("operation-unseen" in note for note in event.notes)
    assert not any("did not reproduce" in note for note in event.notes)
