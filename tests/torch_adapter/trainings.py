"""Trainings that meet a bad batch."""

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from tests.torch_adapter.training import Fault, everything, seed

every_interval = pytest.mark.parametrize("every", [1, 4])
SPOILED = 6


class Marked(nn.Module):
    """Go bad on the batch whose first value is the mark."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.fault = Fault()
        self.fault.at = 1
        self.fault.armed = how

    def forward(self, x: Tensor, raw: Tensor) -> Tensor:
        out: Tensor = self.fault(x, int(raw[0, 0] == 7))
        return out


class Net(nn.Module):
    def __init__(self, how: str = "forward") -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.2)
        self.marked = Marked(how)
        self.last = nn.Linear(4, 2)
        self.calls = 0
        self.kept: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.kept.append(self.calls)
        h = self.drop(self.norm(self.first(x)).tanh())
        out: Tensor = self.last(self.marked(h, x))
        return out


class Training:
    """A training run with everything that has a state."""

    def __init__(self, how: str = "forward", optimizer: Any = None) -> None:
        seed()
        self.model = Net(how)
        make = optimizer or functools.partial(torch.optim.AdamW, lr=0.01)
        self.optimizer = make(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=0.1, total_steps=500
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self.average = AveragedModel(self.model)
        self.generator = torch.Generator().manual_seed(1)
        self.numpy = np.random.default_rng(1)
        self.python = random.Random(1)

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        noise = torch.rand(1, generator=self.generator).item() + self.numpy.random()
        noise += self.python.random() + random.random() + float(np.random.rand())  # noqa: NPY002
        loss: Tensor = self.model(x).square().mean() * noise
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.average.update_parameters(self.model)
        return loss

    def state(self) -> dict[str, Any]:
        keepers = [self.optimizer, self.schedule, self.scaler]
        return {
            **everything([self.model, self.average], keepers),
            "generators": (
                self.generator.get_state(),
                self.numpy.bit_generator.state,
                self.python.getstate(),
            ),
            "attributes": (self.model.calls, list(self.model.kept)),
            "optimizer attributes": sorted(vars(self.optimizer)),
        }

    def identities(self) -> list[int]:
        held: list[Any] = [self.optimizer.state, *self.optimizer.param_groups]
        for p in self.model.parameters():
            held += [p, p.grad, p.data_ptr(), self.optimizer.state.get(p)]
        return [item if isinstance(item, int) else id(item) for item in held]


def batches(spoiled: int | None = SPOILED, count: int = 9) -> list[Tensor]:
    made = list(torch.randn(count, 3, 4, generator=torch.Generator().manual_seed(0)))
    if spoiled is not None:
        made[spoiled][0, 0] = 7
    return made
