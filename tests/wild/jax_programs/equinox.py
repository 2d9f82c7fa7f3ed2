"""equinox: a module as a pytree, under a filtered transformation that donates."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from tests.wild.jax_programs.program import Expected, Loop, program

KEY = jax.random.key(0)


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
