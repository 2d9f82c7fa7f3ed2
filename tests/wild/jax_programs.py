"""Programs in JAX's libraries, written as their users write them.

None makes an array when it is imported, as JAX then starts threads, and cases are forked.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.dynamic_scale import DynamicScale

PROGRAMS: dict[str, "Program"] = {}


@dataclass(frozen=True)
class Loop:
    """A step, its first arguments, and those of the next step from the last and its results.

    Attributes:
        weights: The position of the weights in the arguments; None where there are none.
        jitted: False if the step comes as it has to be called: jitted with options of its own.
        pick: Words of the weight that is spoilt after the first step.
    """

    step: Callable[..., Any]
    start: Callable[[], tuple[Any, ...]]
    advance: Callable[[tuple[Any, ...], Any], tuple[Any, ...]] = lambda args, _: args
    weights: int | None = None
    jitted: bool = False
    pick: tuple[str, ...] = ()


@dataclass(frozen=True)
class Expected:
    """What a report has to say of a fault, whose line ends in ``# fault: <name>``.

    The layer is None where it is not known.
    """

    operation: str
    cause: str
    layer: str | None = None


@dataclass(frozen=True)
class Program:
    build: Callable[[str], Loop]
    faults: dict[str, Expected] = field(default_factory=dict)


def program(**faults: Expected) -> Callable[[Callable[[str], Loop]], Callable[[str], Loop]]:
    """Register what builds a program, clean for ``""``, or with the named fault."""

    def register(build: Callable[[str], Loop]) -> Callable[[str], Loop]:
        PROGRAMS[build.__name__] = Program(build, faults)
        return build

    return register


def key():
    return jax.random.key(0)


def drawn(*shape):
    return jax.random.normal(key(), shape)


def trained(loss, optimizer, start, pick=()) -> Loop:
    """Descend a loss of weights and a batch, both of which ``start`` gives."""

    def step(params, state, *batch):
        value, slopes = jax.value_and_grad(loss)(params, *batch)
        update, state = optimizer.update(slopes, state, params)
        return optax.apply_updates(params, update), state, value

    def begin():
        params, *batch = start()
        return params, optimizer.init(params), *batch

    return Loop(step, begin, lambda args, out: (*out[:2], *args[2:]), 0, pick=pick)


# JAX itself


def weights():
    return {"w": drawn(4, 4) / 2, "b": jnp.zeros(4)}


@program(norm=Expected("divide", "divide_by_zero"))
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
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, clipped), norms

    def start():
        return weights(), drawn(6, 4)

    return Loop(step, start, lambda args, out: (out[0], args[1]), 0, pick=("w",))


@program()
def conjugate_gradients(bug: str) -> Loop:
    def step(matrix, b):
        return jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, b, maxiter=10)[0]

    return Loop(step, lambda: (drawn(6, 4).T @ drawn(6, 4) + jnp.eye(4), jnp.ones(4)))


@program()
def implicit_slope(bug: str) -> Loop:
    """A fixed point whose derivative is solved for, with custom_root."""

    def loss(params, x):
        a = jnp.tanh(params["w"][0, 0])
        root = jax.lax.custom_root(
            lambda y: y - jnp.cos(a * y),
            jnp.float32(0.5),
            lambda f, y: jax.lax.fori_loop(0, 20, lambda _, y: y - f(y) / 2, y),
            lambda g, y: y / g(1.0),
        )
        return (root - x.mean()) ** 2

    return trained(loss, optax.sgd(0.1), lambda: (weights(), drawn(6, 4)), ("w",))


# optax


@program()
def optax_wrapped(bug: str) -> Loop:
    """Take each step with several optimizers, which call, skip and hold others."""
    moved = {"moved": optax.adam(1e-2), "still": optax.set_to_zero()}
    plateau = optax.contrib.reduce_on_plateau(patience=1)
    optimizers = {
        "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
        "lbfgs": optax.lbfgs(),
        "multi_steps": optax.MultiSteps(optax.adam(1e-2), 2),
        "multi_transform": optax.multi_transform(moved, {"w": "moved", "b": "still"}),
        "plateau": optax.chain(optax.adafactor(1e-2), plateau),
        "schedule_free": optax.contrib.schedule_free_adamw(1e-3),
    }
    made = {name: optax.with_extra_args_support(each) for name, each in optimizers.items()}

    def loss(params, x):
        return ((x @ params["w"] + params["b"] - 1) ** 2).mean()

    def step(params, states, x):
        values, params, states = {}, dict(params), dict(states)
        for name, optimizer in made.items():
            values[name], grad = jax.value_and_grad(loss)(params[name], x)
            given = {"value": values[name], "grad": grad, "value_fn": lambda p: loss(p, x)}
            update, states[name] = optimizer.update(grad, states[name], params[name], **given)
            params[name] = optax.apply_updates(params[name], update)
        return params, states, values

    def start():
        params = {name: weights() for name in made}
        return params, {name: made[name].init(params[name]) for name in made}, drawn(6, 4)

    return Loop(step, start, lambda args, out: (out[0], out[1], args[2]))


# equinox and diffrax: modules as pytrees, in a filtered transformation that donates


def filtered(loss, optimizer, start, pick) -> Loop:
    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, state):
        value, slopes = eqx.filter_value_and_grad(lambda m: loss(m, *batch))(model)
        update, state = optimizer.update(slopes, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, update), state, value

    def begin():
        model, *batch = start()
        return batch, model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    return Loop(step, begin, lambda args, out: (args[0], out[0], out[1]), 1, jitted=True, pick=pick)


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


@program(norm=Expected("divide", "divide_by_zero", ""))
def equinox_attention(bug: str) -> Loop:
    def start():
        attend = eqx.nn.MultiheadAttention(2, 8, key=key())
        mlp = eqx.nn.MLP(8, 1, 16, 1, key=key())
        return Attention(attend, mlp, eqx.nn.RMSNorm(8), bug), drawn(3, 5, 8)

    def loss(model, x):
        return (jax.vmap(model)(x) ** 2).mean()

    return filtered(loss, optax.lion(1e-3), start, ("mlp", "layers", "weight"))


class Slope(eqx.Module):
    mlp: eqx.nn.MLP
    bug: str = eqx.field(static=True)

    def __call__(self, t, y, args):
        slope = self.mlp(y)
        if self.bug == "start":
            slope = slope / (t - t)  # fault: start
        return slope


class Ode(eqx.Module):
    slope: Slope

    def __call__(self, ts, y0):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(self.slope),
            diffrax.Tsit5(),
            t0=ts[0],
            t1=ts[-1],
            dt0=ts[1] - ts[0],
            y0=y0,
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
            saveat=diffrax.SaveAt(ts=ts),
            max_steps=16,
            throw=False,
        ).ys


@program(start=Expected("divide", "divide_by_zero", "slope"))
def diffrax_neural_ode(bug: str) -> Loop:
    def start():
        model = Ode(Slope(eqx.nn.MLP(2, 2, 8, 2, jnp.tanh, key=key()), bug))
        return model, jnp.linspace(0, 1, 5), drawn(3, 5, 2)

    def loss(model, ts, ys):
        return ((jax.vmap(model, (None, 0))(ts, ys[:, 0]) - ys) ** 2).mean()

    return filtered(loss, optax.adam(1e-2), start, ("mlp", "layers", "weight"))


# flax linen


class Block(nn.Module):
    bug: str = ""
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, mask):
        h = nn.LayerNorm(dtype=self.dtype)(x)
        if self.bug == "masked":
            scores = jnp.where(jnp.zeros_like(mask[:, 0]) > 0, h @ h.mT, -jnp.inf)
            h = jax.nn.softmax(scores, axis=-1) @ h  # fault: masked
        else:
            attend = nn.MultiHeadDotProductAttention(2, dtype=self.dtype, dropout_rate=0.1)
            h = attend(h, h, mask=mask, deterministic=False)
        x = x + h
        h = nn.gelu(nn.Dense(32, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)))
        if self.bug == "overflow":
            h = jnp.exp(h * 1000)  # fault: overflow
        h = nn.Dense(x.shape[-1], dtype=self.dtype)(h)
        return x + nn.Dropout(0.1, deterministic=False)(h)


class Language(nn.Module):
    bug: str = ""
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(20, 16, dtype=self.dtype, name="tok")
        places = self.param("pos", nn.initializers.normal(0.02), (tokens.shape[1], 16))
        x = embed(tokens) + places.astype(self.dtype)
        mask = nn.make_causal_mask(tokens)
        for i in range(2):
            x = Block(self.bug if i else "", self.dtype, name=f"block_{i}")(x, mask)
        return embed.attend(nn.LayerNorm(name="ln_f")(x))


def language(bug: str, dtype: Any) -> Loop:
    net = Language(bug, dtype)
    schedule = optax.warmup_cosine_decay_schedule(0, 1e-3, 5, 20)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

    def loss(params, tokens, rng):
        logits = net.apply({"params": params}, tokens[:, :-1], rngs={"dropout": rng})
        return optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), tokens[:, 1:]
        ).mean()

    def start():
        tokens = jax.random.randint(key(), (4, 9), 0, 20)
        made = net.init({"params": key(), "dropout": key()}, tokens[:, :-1])
        return made["params"], tokens, jax.random.key(1)

    return trained(loss, optimizer, start, ("block_1", "Dense_0", "kernel"))


@program(
    masked=Expected("softmax", "softmax_fully_masked", "block_1"),
    overflow=Expected("exp", "exp_overflow", "block_1"),
)
def linen_language(bug: str) -> Loop:
    return language(bug, jnp.float32)


@program()
def linen_language_float16(bug: str) -> Loop:
    return language(bug, jnp.float16)


class Layer(nn.Module):
    bug: str = ""

    @nn.compact
    def __call__(self, x, _):
        h = nn.relu(nn.Dense(8)(nn.LayerNorm()(x)))
        if self.bug == "sum":
            h = h / jnp.sum(jnp.zeros_like(h), -1, keepdims=True)  # fault: sum
        return x + h, None


class Stacked(nn.Module):
    bug: str = ""

    @nn.compact
    def __call__(self, x):
        stack = nn.scan(
            nn.remat(Layer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
            in_axes=nn.broadcast,
        )
        return stack(self.bug, name="layers")(x, None)[0].mean(-1)


@program(sum=Expected("divide", "divide_by_zero", "layers"))
def linen_remat_scan(bug: str) -> Loop:
    net = Stacked(bug)

    def loss(params, x):
        return ((net.apply(params, x) - 1) ** 2).mean()

    def start():
        return net.init(key(), drawn(3, 8)), drawn(3, 8)

    return trained(loss, optax.adam(1e-2), start, ("layers", "Dense_0", "kernel"))


class Normed(nn.Module):
    bug: str = ""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(8, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        h = nn.GroupNorm(num_groups=2)(nn.Conv(8, (3, 3))(x))
        if self.bug == "slope":
            h = jnp.sqrt(nn.relu(h))  # fault: slope
        return nn.SpectralNorm(nn.Dense(3))(nn.relu(x + h).mean((1, 2)), update_stats=train)


@program(slope=Expected("sqrt", "sqrt_gradient_at_zero", ""))
def linen_normed(bug: str) -> Loop:
    """Statistics that a step updates beside the weights."""
    net, optimizer = Normed(bug), optax.rmsprop(1e-3, momentum=0.9)

    def step(variables, state, x, y):
        def loss(params):
            out, new = net.apply({**variables, "params": params}, x, True, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(out, y).mean(), new

        (value, new), slopes = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        update, state = optimizer.update(slopes, state, variables["params"])
        return {"params": optax.apply_updates(variables["params"], update), **new}, state, value

    def start():
        x = drawn(4, 8, 8, 3)
        variables = net.init(key(), x, False)
        return dict(variables), optimizer.init(variables["params"]), x, jnp.array([0, 1, 2, 0])

    pick = "params", "Conv_1", "kernel"
    return Loop(step, start, lambda args, out: (*out[:2], *args[2:]), 0, pick=pick)


@program()
def linen_scaled_loss(bug: str) -> Loop:
    """DynamicScale: steps whose gradients overflow are meant to be dropped."""
    net = nn.Dense(3, dtype=jnp.float16)

    def step(params, scale, x):
        def loss(params):
            return (net.apply(params, x).astype(jnp.float32) ** 2).mean()

        scale, fine, value, slopes = scale.value_and_grad(loss)(params)
        moved = jax.tree.map(lambda p, g: p - 0.1 * g, params, slopes)
        kept = jax.tree.map(lambda new, old: jnp.where(fine, new, old), moved, params)
        return kept, scale, value

    def start():
        x = drawn(5, 4)
        return net.init(key(), x), DynamicScale(scale=2.0**24), x

    return Loop(step, start, lambda args, out: (*out[:2], args[2]), 0)
