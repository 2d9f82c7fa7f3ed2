"""flax linen: a transformer, scan, remat, experts, mutable state."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from tests.wild.jax_programs.program import Expected, Loop, program

KEY = jax.random.key(0)


class Block(nn.Module):
    bug: str = ""
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, mask, train):
        h = nn.LayerNorm(dtype=self.dtype)(x)
        if self.bug == "masked":
            scores = jnp.where(jnp.zeros_like(mask[:, 0]) > 0, h @ h.mT, -jnp.inf)
            h = jax.nn.softmax(scores, axis=-1) @ h  # fault: masked
        else:
            attend = nn.MultiHeadDotProductAttention(
                2, dtype=self.dtype, dropout_rate=0.1, deterministic=not train
            )
            h = attend(h, h, mask=mask)
        x = x + h
        h = nn.gelu(nn.Dense(32, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)))
        if self.bug == "overflow":
            h = jnp.exp(h * 1000)  # fault: overflow
        h = nn.Dense(x.shape[-1], dtype=self.dtype)(h)
        return x + nn.Dropout(0.1, deterministic=not train)(h)


class Language(nn.Module):
    bug: str = ""
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens, train=True):
        embed = nn.Embed(20, 16, dtype=self.dtype, name="tok")
        places = self.param("pos", nn.initializers.normal(0.02), (tokens.shape[1], 16))
        x = embed(tokens) + places.astype(self.dtype)
        mask = nn.make_causal_mask(tokens)
        for i in range(2):
            x = Block(self.bug if i else "", self.dtype, name=f"block_{i}")(x, mask, train)
        return embed.attend(nn.LayerNorm(name="ln_f")(x))


def language(bug: str, dtype: Any, rate: float = 1e-3) -> Loop:
    net = Language(bug, dtype)
    schedule = optax.warmup_cosine_decay_schedule(0, rate, 5, 20)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

    def step(params, state, tokens, rng):
        rng, dropout = jax.random.split(rng)

        def loss(params):
            logits = net.apply({"params": params}, tokens[:, :-1], rngs={"dropout": dropout})
            return optax.softmax_cross_entropy_with_integer_labels(
                logits.astype(jnp.float32), tokens[:, 1:]
            ).mean()

        value, slopes = jax.value_and_grad(loss)(params)
        update, state = optimizer.update(slopes, state, params)
        shown = {"loss": value, "norm": optax.global_norm(slopes)}
        return optax.apply_updates(params, update), state, rng, shown

    def start():
        tokens = jax.random.randint(KEY, (4, 9), 0, 20)
        params = net.init({"params": KEY, "dropout": KEY}, tokens[:, :-1])["params"]
        return params, optimizer.init(params), tokens, jax.random.key(1)

    return Loop(
        step,
        start,
        lambda args, out: (out[0], out[1], args[2], out[2]),
        0,
        pick=("block_1", "Dense_0", "kernel"),
    )


@program(
    "linen_language",
    masked=Expected(("softmax",), "softmax_fully_masked", "block_1", "forward"),
    overflow=Expected(("exp",), "exp_overflow", "block_1", "forward"),
)
def language_float32(bug: str) -> Loop:
    return language(bug, jnp.float32)


@program("linen_language_bfloat16")
def language_bfloat16(bug: str) -> Loop:
    return language(bug, jnp.bfloat16)


@program("linen_language_float16")
def language_float16(bug: str) -> Loop:
    return language(bug, jnp.float16)


class Cell(nn.Module):
    bug: str = ""

    @nn.compact
    def __call__(self, carry, x):
        carry = nn.tanh(nn.Dense(6, name="hh")(carry) + nn.Dense(6, name="xh")(x))
        if self.bug == "round":
            carry = carry / jnp.where(x[..., :1] > 2.5, 0.0, 1.0)  # fault: round
        return carry, carry


class Scanned(nn.Module):
    bug: str = ""

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            Cell,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=1,
            out_axes=1,
        )
        _, out = scan(self.bug, name="cell")(jnp.zeros((x.shape[0], 6)), x)
        return nn.Dense(1, name="head")(out)[..., 0]


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


class Experts(nn.Module):
    """A mixture of experts: routing by top_k, one-hot dispatch."""

    bug: str = ""

    @nn.compact
    def __call__(self, x):
        gate = jax.nn.softmax(nn.Dense(4, name="gate")(x))
        best, which = jax.lax.top_k(gate, 2)
        if self.bug == "gate":
            best = best - best
        best = best / best.sum(-1, keepdims=True)  # fault: gate
        up = self.param("up", nn.initializers.lecun_normal(), (4, x.shape[-1], 8))
        down = self.param("down", nn.initializers.lecun_normal(), (4, 8, x.shape[-1]))
        send = (jax.nn.one_hot(which, 4) * best[..., None]).sum(-2)
        h = nn.gelu(jnp.einsum("btd,edh->bteh", x, up))
        return jnp.einsum("bteh,ehd,bte->bt", h, down, send)


def regression(
    net: nn.Module, shape: tuple[int, ...], bug: str, pick: tuple[str, ...] = ()
) -> Loop:
    optimizer = optax.adam(1e-2)

    def step(params, state, x, y):
        value, slopes = jax.value_and_grad(lambda p: ((net.apply(p, x) - y) ** 2).mean())(params)
        update, state = optimizer.update(slopes, state)
        return optax.apply_updates(params, update), state, value

    def start():
        x = jax.random.normal(KEY, shape)
        if bug == "round":
            x = x.at[1, 5, 0].set(3.0)
        params = net.init(KEY, x)
        return params, optimizer.init(params), x, jnp.ones(shape[:-1])

    return Loop(step, start, lambda args, out: (out[0], out[1], *args[2:]), 0, pick=pick)


@program("linen_scan", round=Expected(("divide",), "divide_by_zero", "cell", "forward"))
def scanned(bug: str) -> Loop:
    return regression(Scanned(bug), (3, 7, 4), bug, ("cell", "xh", "kernel"))


@program("linen_remat_scan", sum=Expected(("divide",), "divide_by_zero", "layers", "forward"))
def stacked(bug: str) -> Loop:
    return regression(Stacked(bug), (3, 8), bug, ("layers", "Dense_0", "kernel"))


@program("linen_experts", gate=Expected(("divide",), "divide_by_zero", "", "forward"))
def experts(bug: str) -> Loop:
    return regression(Experts(bug), (2, 5, 6), bug, ("gate", "kernel"))


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


@program("linen_normed", slope=Expected(("sqrt",), "sqrt_gradient_at_zero", "", "backward"))
def normed(bug: str) -> Loop:
    net, optimizer = Normed(bug), optax.rmsprop(1e-3, momentum=0.9)

    def step(variables, state, x, y):
        def loss(params):
            out, new = net.apply({**variables, "params": params}, x, True, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(out, y).mean(), new

        (value, new), slopes = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        update, state = optimizer.update(slopes, state, variables["params"])
        return {"params": optax.apply_updates(variables["params"], update), **new}, state, value

    def start():
        x = jax.random.normal(KEY, (4, 8, 8, 3))
        variables = net.init(KEY, x, False)
        return dict(variables), optimizer.init(variables["params"]), x, jnp.array([0, 1, 2, 0])

    return Loop(
        step,
        start,
        lambda args, out: (out[0], out[1], *args[2:]),
        0,
        pick=("params", "Conv_1", "kernel"),
    )


@program("linen_scaled_loss")
def scaled_loss(bug: str) -> Loop:
    """DynamicScale: steps whose gradients overflow are meant to be dropped."""
    from flax.training.dynamic_scale import DynamicScale

    net = nn.Dense(3, dtype=jnp.float16)

    def step(params, scale, x):
        def loss(params):
            return (net.apply(params, x).astype(jnp.float32) ** 2).mean()

        scale, fine, value, slopes = scale.value_and_grad(loss)(params)
        moved = jax.tree.map(lambda p, g: p - 0.1 * g, params, slopes)
        kept = jax.tree.map(lambda new, old: jnp.where(fine, new, old), moved, params)
        return kept, scale, value

    def start():
        x = jax.random.normal(KEY, (5, 4))
        return net.init(KEY, x), DynamicScale(scale=2.0**24), x

    return Loop(step, start, lambda args, out: (out[0], out[1], args[2]), 0)
