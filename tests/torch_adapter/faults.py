"""Layers that fail in a chosen step and pass, and what trains them."""

from typing import Any

import torch
from torch import nn

import anynan


class Fault(nn.Module):
    """Pass values through, or make a NaN of them when armed."""

    def __init__(self, where: str = "forward") -> None:
        super().__init__()
        self.where = where
        self.armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.armed:
            return x
        if self.where == "forward":
            return torch.log(-1 - x.abs())
        # Finite values, and the gradient of a root at zero.
        return x + torch.sqrt(0 * x)


class Net(nn.Module):
    def __init__(self, where: str = "forward") -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.fault = Fault(where)
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.fault(self.first(x)))


def batch(rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 4)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor | None = None) -> Any:
    loss = model(batch() if x is None else x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def hooks_on(model: nn.Module) -> int:
    return sum(
        len(held)
        for module in model.modules()
        for name, held in vars(module).items()
        if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))
        and isinstance(held, dict)
    )


def bad(tracker: anynan.Tracker) -> list[anynan.Event]:
    return [event for event in tracker.events if event.severity == "bad"]
