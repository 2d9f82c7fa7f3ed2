"""equinox: modules as pytrees, filtered transformations, state that is handed on."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from tests.wild.jax_programs.program import Expected, Loop, program

KEY = jax.random.key(0)


class Cnn(eqx.Module):
    layers: list
    bug: str = eqx.field(static=True)

    def __init__(self, key, bug):
        keys = jax.random.split(key, 3)
        self.bug = bug
        self.layers = [
            eqx.nn.Conv2d(1, 3, 4, key=keys[0]),
            eqx.nn.MaxPool2d(2),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(3 * 8 * 8, 16, key=keys[1]),
            jax.nn.sigmoid,
            eqx.nn.LayerNorm(16),
            eqx.nn.Linear(16, 10, key=keys[2]),
            jax.nn.log_softmax,
        ]

    def __call__(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if self.bug == "zero" and i == 5:
                x = 1.0 / (x - x)  # fault: zero
        return x


@program("equinox_cnn", zero=Expected(("divide",), "divide_by_zero", "", "forward"))
def cnn(bug: str) -> Loop:
    optimizer = optax.adamw(1e-3)

    def loss(model, x, y):
        return -jnp.take_along_axis(jax.vmap(model)(x), y[:, None], 1).mean()

    @eqx.filter_jit
    def step(model, state, x, y):
        value, slopes = eqx.filter_value_and_grad(loss)(model, x, y)
        update, state = optimizer.update(slopes, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, update), state, value

    def start():
        model = Cnn(KEY, bug)
        x = jax.random.normal(KEY, (5, 1, 12, 12))
        return model, optimizer.init(eqx.filter(model, eqx.is_array)), x, jnp.arange(5)

    return Loop(
        step,
        start,
        lambda args, out: (out[0], out[1], *args[2:]),
        0,
        jitted=True,
        pick=("layers", "4", "weight"),
    )


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear
    bug: str = eqx.field(static=True)

    def __call__(self, x):
        def turn(carry, row):
            carry = self.cell(row, carry)
            if self.bug == "root":
                carry = jnp.sqrt(carry)  # fault: root
            return carry, None

        carry, _ = jax.lax.scan(turn, jnp.zeros(4), x)
        return jax.nn.sigmoid(self.head(carry))[0]


@program("equinox_scan", root=Expected(("sqrt",), "sqrt_of_negative", "", "forward"))
def recurrent(bug: str) -> Loop:
    optimizer = optax.adam(1e-2)

    @eqx.filter_jit
    def step(model, state, x, y):
        @eqx.filter_value_and_grad
        def loss(model):
            p = jax.vmap(model)(x)
            return -(y * jnp.log(p) + (1 - y) * jnp.log(1 - p)).mean()

        value, slopes = loss(model)
        update, state = optimizer.update(slopes, state)
        return eqx.apply_updates(model, update), state, value

    def start():
        model = Recurrent(eqx.nn.GRUCell(2, 4, key=KEY), eqx.nn.Linear(4, 1, key=KEY), bug)
        state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        return model, state, jax.random.normal(KEY, (5, 6, 2)), jnp.array([0.0, 1, 0, 1, 1])

    return Loop(
        step,
        start,
        lambda args, out: (out[0], out[1], *args[2:]),
        0,
        jitted=True,
        pick=("head", "weight"),
    )


class Normed(eqx.Module):
    up: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    down: eqx.nn.Linear

    def __call__(self, x, state):
        x, state = self.norm(jax.nn.relu(self.up(x)), state)
        return self.down(x), state


@program("equinox_batch_norm")
def batch_norm(bug: str) -> Loop:
    @eqx.filter_jit
    def step(model, state, x):
        def loss(model, state):
            over = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
            y, state = over(x, state)
            return (y**2).mean(), state

        (value, state), slopes = eqx.filter_value_and_grad(loss, has_aux=True)(model, state)
        update = jax.tree.map(lambda slope: -0.1 * slope, slopes)
        return eqx.apply_updates(model, update), state, value

    def start():
        def make():
            norm = eqx.nn.BatchNorm(8, "batch", mode="batch")
            return Normed(eqx.nn.Linear(3, 8, key=KEY), norm, eqx.nn.Linear(8, 1, key=KEY))

        return *eqx.nn.make_with_state(make)(), jax.random.normal(KEY, (5, 3))

    return Loop(
        step,
        start,
        lambda args, out: (out[0], out[1], args[2]),
        0,
        jitted=True,
        pick=("up", "weight"),
    )


class Attention(eqx.Module):
    attend: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norm: eqx.nn.RMSNorm
    bug: str = eqx.field(static=True)

    def __call__(self, x):
        h = jax.vmap(self.norm)(x)
        x = x + self.attend(h, h, h, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)))
        if self.bug == "norm":
            x = x / jnp.linalg.norm(x * 0, axis=-1, keepdims=True)  # fault: norm
        return jax.vmap(self.mlp)(x).mean()


@program("equinox_attention", norm=Expected(("divide",), "divide_by_zero", "", "forward"))
def attention(bug: str) -> Loop:
    optimizer = optax.lion(1e-3)

    @eqx.filter_jit(donate="all-except-first")
    def step(x, model, state):
        value, slopes = eqx.filter_value_and_grad(lambda m: (jax.vmap(m)(x) ** 2).mean())(model)
        update, state = optimizer.update(slopes, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, update), state, value

    def start():
        model = Attention(
            eqx.nn.MultiheadAttention(2, 8, key=KEY),
            eqx.nn.MLP(8, 1, 16, 1, key=KEY),
            eqx.nn.RMSNorm(8),
            bug,
        )
        state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        return jax.random.normal(KEY, (3, 5, 8)), model, state

    return Loop(
        step,
        start,
        lambda args, out: (args[0], out[0], out[1]),
        1,
        jitted=True,
        pick=("mlp", "layers", "weight"),
    )
