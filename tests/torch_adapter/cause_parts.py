"""Models that fail, and what an event says of it."""

import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anynan import AnomalyError, Event


class Scale(nn.Module):
    """Pass values on unchanged, through a weight, so that gradients flow."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Body(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


class Net(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = Scale()
        self.body = Body(call)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.scale(x))  # type: ignore[no-any-return]


def caught(run: Callable[..., object], *args: Any, **named: Any) -> Any:
    with pytest.raises(AnomalyError) as error:
        run(*args, **named)
    return error.value.event


def check_line(event: Event, function: Callable[..., Any]) -> None:
    """Hold that the operation's line is the one marked in a function."""
    source, code = event.operation.source, function.__code__
    marked = code.co_firstlineno
    while not (text := linecache.getline(code.co_filename, marked)).endswith("# bad\n"):
        marked += 1
    assert (source.file, source.line) == (code.co_filename, marked)
    assert source.text == text.strip()


CIRCUMSTANCES: set[str] = {"outside_the_model"}


def circumstance(*tags: str) -> Callable[[Any], Any]:
    CIRCUMSTANCES.update(tags)
    return lambda function: function
