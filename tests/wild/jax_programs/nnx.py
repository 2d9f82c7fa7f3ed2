"""flax nnx: modules that are changed in place, and split and merged."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tests.wild.jax_programs.program import Expected, Loop, program

KEY = jax.random.key(0)


class Block(nnx.Module):
    def __init__(self, width, rngs, bug=""):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(2, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)
        self.bug = bug

    def __call__(self, x):
        x = x + self.attn(self.norm(x))
        h = jax.nn.gelu(self.up(x))
        if self.bug == "log":
            h = jnp.log(h)  # fault: log
        return x + self.down(h)


class Net(nnx.Module):
    def __init__(self, rngs, bug=""):
        self.conv = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.bn = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.blocks = nnx.List([Block(8, rngs), Block(8, rngs, bug)])
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = self.drop(nnx.relu(self.bn(self.conv(x))))
        x = x.reshape(x.shape[0], -1, 8)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


IMAGES, LABELS = jax.random.normal(KEY, (4, 4, 4, 1)), jnp.array([0, 1, 2, 0])


def loss(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def built(bug: str) -> Net:
    model = Net(nnx.Rngs(0), bug)
    model.train()
    return model


@program("nnx_in_place", log=Expected(("log",), "log_of_negative", "blocks.1", "forward"))
def in_place(bug: str) -> Loop:
    @nnx.jit
    def step(model, optimizer, x, y):
        value, slopes = nnx.value_and_grad(loss)(model, x, y)
        optimizer.update(model, slopes)
        return value

    def start():
        model = built(bug)
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param), IMAGES, LABELS

    return Loop(step, start, weights=0, jitted=True, pick=("blocks", "1", "up", "kernel"))


@program("nnx_split_merge", log=Expected(("log",), "log_of_negative", "blocks.1", "forward"))
def split_merge(bug: str) -> Loop:
    def step(graph, state, x, y):
        model = nnx.merge(graph, state)
        value, slopes = nnx.value_and_grad(loss)(model, x, y)
        moved = jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), slopes)
        nnx.update(model, moved)
        return nnx.state(model), value

    def start():
        return *nnx.split(built(bug)), IMAGES, LABELS

    return Loop(
        jax.jit(step, static_argnums=0),
        start,
        lambda args, out: (args[0], out[0], *args[2:]),
        1,
        jitted=True,
        pick=("blocks", "up", "kernel"),
    )


class Recurrent(nnx.Module):
    def __init__(self, rngs, bug=""):
        self.rnn = nnx.RNN(nnx.GRUCell(3, 6, rngs=rngs))
        self.head = nnx.Linear(6, 3, rngs=rngs)
        self.bug = bug

    def __call__(self, x):
        x = self.rnn(x)
        if self.bug == "root":
            x = jnp.sqrt(x)  # fault: root
        return self.head(x[:, -1])


@program("nnx_recurrent", root=Expected(("sqrt",), "sqrt_of_negative", "", "forward"))
def recurrent(bug: str) -> Loop:
    @nnx.jit
    def step(model, optimizer, x, y):
        value, slopes = nnx.value_and_grad(loss)(model, x, y)
        optimizer.update(model, slopes)
        return value

    def start():
        model = Recurrent(nnx.Rngs(0), bug)
        x = jax.random.normal(KEY, (4, 5, 3))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), x, LABELS

    return Loop(step, start, weights=0, jitted=True, pick=("head", "kernel"))
