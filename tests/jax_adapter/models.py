"""Small models and steps that several tests share."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + jnp.tanh(nn.Dense(4, name="up")(x))


class Net(nn.Module):
    """Two blocks and a head; ``bad`` says what the head does with its numbers."""

    bad: str = ""

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = Block(name=f"block_{i}")(x)
        return Head(self.bad, name="head")(x)


class Head(nn.Module):
    bad: str

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(2, name="out", use_bias=False)(x)
        if self.bad == "log":
            return jnp.log(x)
        if self.bad == "root":
            return jnp.sqrt(x * x)
        return x


OPTIMIZER = optax.adam(1e-2)


def made(bad=""):
    """Give a training step, its state and a batch."""
    net = Net(bad)
    x = jnp.linspace(-1, 1, 12).reshape(3, 4)
    params = net.init(jax.random.key(0), x)
    state = OPTIMIZER.init(params)

    def train_step(params, opt_state, x):
        def loss_fn(params):
            return jnp.mean(net.apply(params, x) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return train_step, params, state, x


def adam():
    """Give a step that trains one weight by a gradient of x, and its state."""

    def step(p, o, x):
        grads = jax.grad(lambda p: (x * p["w"]).sum())(p)
        updates, o = OPTIMIZER.update(grads, o)
        return optax.apply_updates(p, updates), o

    p = {"w": jnp.ones(2)}
    return step, p, OPTIMIZER.init(p)


def same(a, b):
    equal = jax.tree.map(lambda x, y: bool(jnp.array_equal(x, y, equal_nan=True)), a, b)
    return jax.tree.all(equal) and jax.tree.structure(a) == jax.tree.structure(b)
