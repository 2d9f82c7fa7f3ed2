"""The vows of an adapter, kept by MLX's."""

import mlx.core as mx
import numpy as np
from mlx import nn, optimizers
from mlx.utils import tree_flatten

import anynan
from tests.conformance.contract import Contract, Subject
from tests.flat import split


class Log(nn.Module):
    def __call__(self, x):
        return mx.log(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.log, self.head = nn.Linear(2, 3), Log(), nn.Linear(3, 1)
        self.embed.weight, self.embed.bias = mx.ones((3, 2)), mx.ones(3)
        self.drop = nn.Dropout(0.5)

    def __call__(self, x):
        return self.head(self.drop(self.log(self.embed(x))))


def subject():
    mx.random.seed(7)
    net, optimizer = Net(), optimizers.Adam(0.01)
    gradients = nn.value_and_grad(net, lambda x: mx.square(net(x)).mean())

    def step(x):
        loss, slopes = gradients(x)
        optimizer.update(net, slopes)
        mx.eval(net.parameters(), optimizer.state)
        return loss

    def state():
        found = {f"weight {name}": np.array(x) for name, x in tree_flatten(net.parameters())}
        found |= {f"state {name}": np.array(x) for name, x in tree_flatten(optimizer.state)}
        return found | {"random": np.array(mx.random.state[0])}

    good, bad = mx.array([[1.0, 2.0], [3.0, 4.0]]), mx.array([[1.0, 2.0], [-3.0, -4.0]])
    owners = (mx, mx.linalg, mx.random, mx.fast, mx.array, nn, nn.losses, optimizers.Optimizer,
              optimizers.Adam, Log, Net, nn.Linear, nn.Dropout, nn.Module)  # fmt: skip
    return Subject(net, step, good, bad, state, owners)


class TestMlx(Contract):
    def make(self):
        return subject()

    def track(self, target, **options):
        return anynan.mlx.track(target, **split(options))
