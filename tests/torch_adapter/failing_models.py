"""Models that fail, and what a replay says of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anynan
from anynan import NonFiniteError
from tests.flat import split


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
