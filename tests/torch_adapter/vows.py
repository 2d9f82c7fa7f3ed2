"""A small model that fails when it is told to."""

from torch import nn

from tests.torch_adapter.training import Fault


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Fault(), nn.Linear(8, 2))
