"""JAX itself: control flow, custom rules, donation, low precision, linear algebra, pytrees."""

import dataclasses
from functools import partial

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


@program("scan_over_steps", round=Expected(("divide",), "divide_by_zero"))
def scan_over_steps(bug: str) -> Loop:
    optimizer = optax.adam(1e-2)

    def step(params, state, batches):
        def one(carry, x):
            params, state = carry

            def loss(params):
                h = jnp.tanh(x @ params["w"] + params["b"])
                if bug == "round":
                    h = h / jnp.where(jnp.abs(x).max() > 50, 0.0, 1.0)  # fault: round
                return (h**2).mean()

            value, slopes = jax.value_and_grad(loss)(params)
            update, state = optimizer.update(slopes, state)
            return (optax.apply_updates(params, update), state), value

        (params, state), values = lax.scan(one, (params, state), batches)
        return params, state, values

    def start():
        batches = jnp.stack([X] * 5)
        if bug == "round":
            batches = batches.at[3, 0, 0].set(100.0)
        return weights(), optimizer.init(weights()), batches

    return Loop(step, start, lambda args, out: (out[0], out[1], args[2]), 0, pick=("w",))


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


@program("custom_vjp", rule=Expected(("divide",), "divide_by_zero", phase="backward"))
def custom_vjp(bug: str) -> Loop:
    @jax.custom_vjp
    def clipped(x):
        return x

    def forward(x):
        return x, x

    def backward(x, slope):
        if bug == "rule":
            return (slope / jnp.linalg.norm(slope * 0),)
        return (jnp.clip(slope, -1, 1),)

    clipped.defvjp(forward, backward)

    def loss(params, x):
        h = clipped(x @ params["w"])  # fault: rule
        return (h**2).mean()

    return trained(loss)


@program("custom_jvp", scaled=Expected(("exp",), "exp_overflow"))
def custom_jvp(bug: str) -> Loop:
    @jax.custom_jvp
    def softplus(x):
        if bug == "scaled":
            x = x * 1000
        return jnp.log(1.0 + jnp.exp(x))  # fault: scaled

    softplus.defjvps(lambda t, out, x: t * (1 - 1 / (1 + jnp.exp(x))))
    return trained(lambda params, x: softplus(x @ params["w"]).mean())


@program("double_where", trap=Expected(("sqrt",), None, phase="backward"))
def double_where(bug: str) -> Loop:
    def loss(params, x):
        h = x @ params["w"]
        h = h * (h > 0)
        if bug == "trap":
            return jnp.where(h > 0, jnp.sqrt(h), 0.0).mean()  # fault: trap
        return jnp.where(h > 0, jnp.sqrt(jnp.where(h > 0, h, 1.0)), 0.0).mean()

    return trained(loss)


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


@program("power_iteration", round=Expected(("divide",), "divide_by_zero"))
def power_iteration(bug: str) -> Loop:
    def step(matrix, vector):
        def body(carry):
            v, i, _ = carry
            w = matrix @ v
            if bug == "round":
                w = jnp.where(i == 7, w * 0, w)
            u = w / jnp.linalg.norm(w)  # fault: round
            return u, i + 1, jnp.linalg.norm(u - v) + (1.0 if bug else 0.0)

        v, i, _ = lax.while_loop(lambda c: (c[1] < 20) & (c[2] > 1e-6), body, (vector, 0, jnp.inf))
        return v @ matrix @ v, i

    return Loop(step, lambda: (X.T @ X + jnp.eye(4), jnp.ones(4) / 2))


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


def low_precision(bug: str, name: str) -> Loop:
    dtype = jnp.dtype(name)

    def loss(params, x):
        h = x.astype(dtype).astype(jnp.float32) @ params["w"]
        if bug == "cast":
            h = (h * 1e6).astype(dtype)  # fault: cast
        return (h.astype(dtype).astype(jnp.float32) ** 2).mean()

    return trained(loss)


CASTS = ("cast", "astype", "convert_element_type")


@program("low_precision_bfloat16")
def bfloat16(bug: str) -> Loop:
    return low_precision(bug, "bfloat16")


@program("low_precision_float16", cast=Expected(CASTS, "overflow_in_dtype"))
def float16(bug: str) -> Loop:
    return low_precision(bug, "float16")


@program("low_precision_e4m3", cast=Expected(CASTS, "overflow_in_dtype"))
def e4m3(bug: str) -> Loop:
    return low_precision(bug, "float8_e4m3fn")


@program("low_precision_e5m2", cast=Expected(CASTS, "overflow_in_dtype"))
def e5m2(bug: str) -> Loop:
    return low_precision(bug, "float8_e5m2")


@program("donated_state", log=Expected(("log",), "log_of_negative"))
def donated_state(bug: str) -> Loop:
    optimizer = optax.adam(1e-2)

    def step(state, x):
        params, moments = state

        def loss(params):
            h = x @ params["w"]
            if bug == "log":
                h = jnp.log(h)  # fault: log
            return (h**2).mean()

        value, slopes = jax.value_and_grad(loss)(params)
        update, moments = optimizer.update(slopes, moments)
        return (optax.apply_updates(params, update), moments), value

    return Loop(
        jax.jit(step, donate_argnums=0),
        lambda: ((weights(), optimizer.init(weights())), X),
        lambda args, out: (out[0], args[1]),
        0,
        jitted=True,
        pick=("0", "w"),
    )


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


@program("pallas_interpreted", log=Expected())
def pallas_interpreted(bug: str) -> Loop:
    from jax.experimental import pallas as pl

    def kernel(x, out):
        out[...] = jnp.log(x[...]) if bug == "log" else jnp.tanh(x[...]) * 2

    shape = jax.ShapeDtypeStruct((6, 4), jnp.float32)
    call = pl.pallas_call(kernel, out_shape=shape, interpret=True)

    def step(params, x):
        h = call(x @ params["w"])  # fault: log
        return jax.tree.map(lambda p: p * 0.99, params), (h**2).mean()

    return Loop(step, lambda: (weights(), X), lambda args, out: (out[0], args[1]), 0, pick=("w",))


@program("complex_numbers")
def complex_numbers(bug: str) -> Loop:
    def step(params, x, rate=0.1, none=None):
        f = jnp.fft.rfft(x, axis=0)
        total = jnp.abs(f).sum() + jnp.real(f * f.conj()).sum()
        total = total + jnp.einsum("ij,jk->", x, params["w"])
        return {"params": params, "none": none, "spectrum": f, "rate": rate}, total

    return Loop(step, lambda: (weights(), X))


@program("prediction", scaled=Expected(("exp",), "exp_overflow"))
def prediction(bug: str) -> Loop:
    def step(x):
        scale = 200 if bug == "scaled" else 1
        return jnp.exp(x * scale)  # fault: scaled

    return Loop(step, lambda: (X,))


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


@program("policy_ratio", ratio=Expected(("exp",), "exp_overflow"))
def policy_ratio(bug: str) -> Loop:
    """PPO: the ratio of new and old probabilities, clipped."""

    def loss(params, batch):
        seen, act, before, gain = batch
        now = jnp.take_along_axis(jax.nn.log_softmax(seen @ params["w"]), act[:, None], 1)[:, 0]
        ratio = jnp.exp(now - before)  # fault: ratio
        return -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain).mean()

    before = jnp.full(6, -200.0 if bug == "ratio" else -1.4)
    batch = X, jnp.zeros(6, int), before, -jnp.ones(6)
    return trained(loss, start=lambda: (weights(), batch))


@program("label_out_of_range", label=Expected(("take",)))
def label_out_of_range(bug: str) -> Loop:
    labels = jnp.array([1, 9 if bug == "label" else 2, 0, 3, 1, 2])

    def loss(params, x):
        logs = jax.nn.log_softmax(x @ params["w"])
        return -jnp.take_along_axis(logs, labels[:, None], 1).mean()  # fault: label

    return trained(loss)


@program("constant", scale=Expected(("multiply",)))
def constant(bug: str) -> Loop:
    scale = jnp.float32(jnp.nan if bug == "scale" else 2.0)

    def step(x):
        return jnp.tanh(x * scale)  # fault: scale

    return Loop(step, lambda: (X,))


@program("branches", branch=Expected(("divide",), "divide_by_zero"))
def branches(bug: str) -> Loop:
    def loss(params, x):
        h = x @ params["w"]
        zero = 0.0 if bug == "branch" else 1.0
        ways = [
            lambda h: h * 2,
            lambda h: h / (zero * h.sum() + (1 - zero) * 0),  # fault: branch
            jnp.tanh,
        ]
        return (lax.switch(1, ways, h) ** 2).mean()

    return trained(loss, rate=1e-3)


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


@program("static_arguments", log=Expected(("log",), "log_of_negative"))
def static_arguments(bug: str) -> Loop:
    @partial(jax.jit, static_argnames=("how",))
    def step(params, x, how=bug):
        h = x @ params["w"]
        if how == "log":
            h = jnp.log(h)  # fault: log
        return {"w": params["w"] - 0.1 * h.mean(), "b": params["b"]}, h.sum()

    return Loop(
        step,
        lambda: (weights(), X),
        lambda args, out: (out[0], args[1]),
        0,
        jitted=True,
        pick=("w",),
    )
