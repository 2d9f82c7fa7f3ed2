"""Models that are compiled, and what compares them."""

from typing import Any

import torch
from torch import nn

BACKEND = "aot_eager"  # traces as inductor does, forward and backward, and compiles in no time


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.linear = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.log(self.linear(self.norm(x)) + 10)


class Net(nn.Module):
    def __init__(self, size: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(size, size)
        self.blocks = nn.ModuleList(Block(size) for _ in range(depth))
        self.head = nn.Linear(size, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(call: Any, net: Net, steps: int, *, batch: int = 4) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    for i in range(steps):
        optimizer.zero_grad()
        call(torch.randn(batch + i % 2, 8)).square().mean().backward()
        optimizer.step()


def named(tracker: Any) -> dict[tuple[Any, ...], tuple[float, float]]:
    """Give the last step's readings of layers by name."""
    return {
        (r.layer, r.phase, r.site.tensor): (r.lo, r.hi)
        for r in tracker.history.last()
        if r.site.parameter is None
    }
