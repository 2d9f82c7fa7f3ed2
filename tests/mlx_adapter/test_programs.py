"""Layers, optimizers and transformations of MLX's: a twin that is watched does the same."""

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn, optimizers
from mlx.utils import tree_flatten

import anynan


class Nested(nn.Module):
    """Hold layers and arrays in containers, run a layer twice, and return a container."""

    def __init__(self):
        super().__init__()
        self.blocks = {"a": nn.Linear(8, 8), "b": [nn.Linear(8, 8), nn.Linear(8, 8)]}
        self.scales = [mx.ones(8), mx.ones(8)]

    def __call__(self, x):
        x = self.blocks["a"](self.blocks["a"](x)) * self.scales[0]
        for layer in self.blocks["b"]:
            x = layer(x)
        return {"out": (x * self.scales[1], [x * 2]), "n": 3}


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.groups = nn.Conv2d(3, 4, 3), nn.BatchNorm(4), nn.GroupNorm(2, 4)
        self.pool, self.linear = nn.MaxPool2d(2), nn.Linear(36, 2)

    def __call__(self, x):
        x = self.pool(nn.gelu(self.groups(self.norm(self.conv(x)))))
        return self.linear(x.reshape(x.shape[0], -1))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layers = nn.Embedding(10, 8), nn.TransformerEncoder(1, 8, 2, 16)

    def __call__(self, words):
        mask = nn.MultiHeadAttention.create_additive_causal_mask(words.shape[1])
        return self.layers(self.table(words), mask=mask)


def total(out):
    if isinstance(out, mx.array):
        return mx.square(out).mean()
    parts = out.values() if isinstance(out, dict) else out
    return sum(total(part) for part in parts if not isinstance(part, int))


# Model, shape of the batch.
PROGRAMS = {
    "containers": (Nested, (2, 8)),
    "convolutions": (Images, (2, 8, 8, 3)),
    "words": (Words, (2, 3)),
    "half precision": (Nested, (2, 8)),
}


def program(name):
    make, shape = PROGRAMS[name]
    mx.random.seed(3)
    batch = mx.random.randint(0, 10, shape) if name == "words" else mx.random.normal(shape)
    net, update = make(), optimizers.Adam(1e-3)
    if name == "half precision":
        net.set_dtype(mx.bfloat16)
        batch = batch.astype(mx.bfloat16)
    gradients = nn.value_and_grad(net, lambda x: total(net(x)))

    def step(x):
        value, slopes = gradients(x)
        slopes, _ = optimizers.clip_grad_norm(slopes, 1.0)
        update.update(net, slopes)
        mx.eval(net.parameters(), update.state, value)
        return value

    return net, update, step, batch


def state(net, update):
    arrays = [*tree_flatten(net.parameters()), *tree_flatten(update.state)]
    return {f"{i} {name}": np.array(x.astype(mx.float32)) for i, (name, x) in enumerate(arrays)}


@pytest.mark.parametrize("how", ["layer", "operation", "model"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.tier(2)
def test_a_twin_that_is_watched_does_the_same_and_is_silent(name, how):
    net, update, step, x = program(name)
    plain = [step(x).item() for _ in range(3)]
    expected, drawn = state(net, update), mx.random.state[0].tolist()
    net, update, step, x = program(name)
    level = "layer" if how == "model" else how
    tracker = anynan.mlx.track(net if how == "model" else step, level=level)
    run = step if how == "model" else tracker
    with tracker:
        assert [run(x).item() for _ in range(3)] == plain
        assert (tracker.events, tracker.notes, tracker.step) == ((), (), 3)
    found = state(net, update)
    assert mx.random.state[0].tolist() == drawn
    for key, value in expected.items():
        np.testing.assert_array_equal(value, found[key], err_msg=key)
