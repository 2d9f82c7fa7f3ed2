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


def batch(rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 4)


def loss_of(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(batch()).square().mean()
    return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


def snapshot(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(before: list[torch.Tensor], model: nn.Module) -> bool:
    return all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
