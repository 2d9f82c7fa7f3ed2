"""A small training, and what compares two."""

import torch
from torch import nn

from tests.torch_adapter.training import Fault


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.fault = Fault()
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.fault(self.first(x)).tanh())


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Fault(), nn.Linear(8, 2))


def batch(rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 4)


def loss_of(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(batch()).square().mean()
    return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor | None = None
) -> torch.Tensor:
    loss: torch.Tensor = model(batch() if x is None else x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def snapshot(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(before: list[torch.Tensor], model: nn.Module) -> bool:
    return all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def hooks_on(model: nn.Module) -> int:
    return sum(
        len(held)
        for module in model.modules()
        for name, held in vars(module).items()
        if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))
        and isinstance(held, dict)
    )
