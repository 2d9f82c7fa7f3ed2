"""JAX itself, as users put it together: a solver, private gradients, an implicit slope."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tests.wild.jax_programs.program import Expected, Loop, descend, program

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (6, 4))


def weights() -> dict[str, jax.Array]:
    return {"w": jax.random.normal(KEY, (4, 4)) / 2, "b": jnp.zeros(4)}


def trained(loss, rate: float = 0.1, start=lambda: (weights(), X)) -> Loop:
    """Descend a loss of the weights and a batch."""

    def step(params, x):
        value, slopes = jax.value_and_grad(loss)(params, x)
        return descend(params, slopes, rate), value

    return Loop(step, start, lambda args, out: (out[0], args[1]), 0, pick=("w",))


@program("private_gradients", norm=Expected(("divide",), "divide_by_zero"))
def private_gradients(bug: str) -> Loop:
    """DP-SGD: gradients of each example under vmap and checkpoint, clipped by their norm."""

    @jax.checkpoint
    def net(params, x):
        return jax.nn.relu(x @ params["w"]) @ params["w"].T

    def step(params, x):
        slopes = jax.vmap(jax.grad(lambda p, x: (net(p, x) ** 2).sum()), (None, 0))(params, x)
        norms = jax.vmap(optax.global_norm)(slopes)
        scale = jnp.minimum(1.0, 1.0 / norms)
        if bug == "norm":
            scale = 1.0 / (norms * 0)  # fault: norm
        clipped = jax.tree.map(lambda g: jnp.einsum("i,i...->...", scale, g) / len(x), slopes)
        return descend(params, clipped), norms

    return Loop(step, lambda: (weights(), X), lambda args, out: (out[0], args[1]), 0, pick=("w",))


@program("conjugate_gradients")
def conjugate_gradients(bug: str) -> Loop:
    def step(matrix, b):
        return jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, b, maxiter=10)[0]

    return Loop(step, lambda: (X.T @ X + jnp.eye(4), jnp.ones(4)))


@program("implicit_slope")
def implicit_slope(bug: str) -> Loop:
    """A fixed point whose derivative is solved for, with custom_root."""

    def loss(params, x):
        a = jnp.tanh(params["w"][0, 0])
        root = lax.custom_root(
            lambda y: y - jnp.cos(a * y),
            jnp.float32(0.5),
            lambda f, y: lax.fori_loop(0, 20, lambda _, y: y - f(y) / 2, y),
            lambda g, y: y / g(1.0),
        )
        return (root - x.mean()) ** 2

    return trained(loss)
