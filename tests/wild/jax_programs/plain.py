"""JAX itself, as users put it together: solvers, private gradients, diffusion, molecules, MAML."""

import dataclasses

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


@program("masks")
def masks(bug: str) -> Loop:
    """-Inf and +Inf where they are meant: masks, running extremes, logsumexp, top_k."""

    def step(x):
        scores = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), x @ x.T, -jnp.inf)
        running = lax.associative_scan(jnp.maximum, scores, axis=1)
        least = lax.fori_loop(0, 6, lambda i, low: jnp.minimum(low, x[i].sum()), jnp.inf)
        total = jax.nn.softmax(scores, -1).sum() + jax.nn.logsumexp(scores, -1).sum() + least
        total = total + jnp.max(scores, initial=-jnp.inf)
        return total + jnp.where(jnp.isinf(running), 0, running).sum(), lax.top_k(scores, 2)[0]

    return Loop(step, lambda: (X,))


@program("conjugate_gradients")
def conjugate_gradients(bug: str) -> Loop:
    def step(matrix, b):
        return jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, b, maxiter=10)[0]

    return Loop(step, lambda: (X.T @ X + jnp.eye(4), jnp.ones(4)))


@program("linear_algebra", indefinite=Expected(("cholesky",)))
def linear_algebra(bug: str) -> Loop:
    def value(matrix):
        if bug == "indefinite":
            matrix = matrix - 50 * jnp.eye(4)
        root = jnp.linalg.cholesky(matrix)  # fault: indefinite
        total = -jnp.log(jnp.diag(root)).sum() + jnp.linalg.eigh(matrix)[0].sum()
        return total + jnp.linalg.slogdet(matrix)[1] + jnp.linalg.solve(matrix, jnp.ones(4)).sum()

    return Loop(lambda matrix: jax.value_and_grad(value)(matrix), lambda: (X.T @ X + jnp.eye(4),))


@program("diffusion", ratio=Expected(("divide",), "divide_by_zero"))
def diffusion(bug: str) -> Loop:
    kept = jnp.cumprod(1 - jnp.linspace(1e-4, 0.2, 10))
    if bug == "ratio":
        kept = kept.at[0].set(1.0)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))

    def step(params, average, state, x, rng):
        rng, times, noise = jax.random.split(rng, 3)
        t = jax.random.randint(times, (6,), 0, 1 if bug == "ratio" else 10)
        e = jax.random.normal(noise, x.shape)
        noisy = jnp.sqrt(kept[t])[:, None] * x + jnp.sqrt(1 - kept[t])[:, None] * e
        ratio = kept[t] / (1 - kept[t])  # fault: ratio

        def loss(params):
            error = (jnp.tanh(noisy @ params["w"] + params["b"]) - e) ** 2
            return (ratio * error.mean(-1)).mean()

        value, slopes = jax.value_and_grad(loss)(params)
        update, state = optimizer.update(slopes, state, params)
        params = optax.apply_updates(params, update)
        average = jax.tree.map(lambda a, p: 0.99 * a + 0.01 * p, average, params)
        return params, average, state, rng, value

    def start():
        return weights(), weights(), optimizer.init(weights()), X, jax.random.key(2)

    return Loop(step, start, lambda args, out: (*out[:3], args[3], out[3]), 0, pick=("w",))


@jax.tree_util.register_pytree_with_keys_class
class Turn:
    def __init__(self, value, name):
        self.value, self.name = value, name

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("value"), self.value),), self.name

    @classmethod
    def tree_unflatten(cls, name, children):
        return cls(children[0], name)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    params: dict
    turn: Turn
    count: jax.Array


@program("pytree_classes", norm=Expected(("divide",), "divide_by_zero"))
def pytree_classes(bug: str) -> Loop:
    def step(state, x):
        def loss(params, turn):
            size = jnp.linalg.norm(turn.value * (0 if bug == "norm" else 1))
            unit = turn.value / size  # fault: norm
            return ((x @ params["w"]) * unit).mean()

        value, (slopes, turned) = jax.value_and_grad(loss, (0, 1))(state.params, state.turn)
        moved = descend(state.params, slopes), descend(state.turn, turned)
        return State(*moved, state.count + 1), value

    def start():
        return State(weights(), Turn(jnp.array([1.0, 0, 0, 0]), "first"), jnp.int32(0)), X

    return Loop(step, start, lambda args, out: (out[0], args[1]), 0, pick=("params", "w"))


@program("molecules", norm=Expected(("sqrt", "norm", "vector_norm"), phase="backward"))
def molecules(bug: str) -> Loop:
    """Forces between particles: a distance is 0 on the diagonal, and its slope infinite."""

    def energy(places):
        apart = places[:, None] - places[None]
        if bug == "norm":
            far = jnp.linalg.norm(apart, axis=-1)  # fault: norm
        else:
            far = jnp.sqrt((apart**2).sum(-1) + jnp.eye(5))
        return jnp.where(jnp.eye(5, dtype=bool), 0.0, 1.0 / (far + jnp.eye(5))).sum() / 2

    def step(places, speeds):
        force = -jax.grad(energy)(places)
        return places + 0.01 * speeds, speeds + 0.01 * force

    return Loop(
        step, lambda: (jax.random.normal(KEY, (5, 3)), jnp.zeros((5, 3))), lambda args, out: out
    )


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


@program("meta_learning", inner=Expected(("divide",), "divide_by_zero"))
def meta_learning(bug: str) -> Loop:
    """MAML: a gradient through steps of an inner descent."""

    def inner(params, x):
        out = jnp.tanh(x @ params["w"] + params["b"])
        if bug == "inner":
            out = out / (out - out)  # fault: inner
        return (out**2).mean()

    def loss(params, x):
        def descended(params, _):
            return descend(params, jax.grad(inner)(params, x)), None

        return inner(lax.scan(descended, params, None, length=2)[0], x)

    return trained(loss)
