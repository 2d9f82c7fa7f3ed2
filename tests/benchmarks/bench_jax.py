"""Time a tracked JAX training step beside what users would otherwise pick: run and compile.

A transformer of four flax blocks with adam, in two sizes. The variants take turns step by step in
one process; the compile time is that of fresh first calls, which take turns too, the failing
step's that of the call in which an overflow is reported. Memory is counted, not timed. Run it with
nothing else on the machine: ``make bench``.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.experimental import checkify

import anynan
from anynan._steps.tracked import inside
from tests.benchmarks.timing import machine, options, over, publish, ratios, seconds, table
from tests.flat import split

HEADS, BLOCKS, LETTERS, FIRST_CALLS = 4, 4, 64, 3
# Width, sequences and their length. The larger one is the model that PyTorch is timed with.
SIZES = {"d=128 B=8 T=64": (128, 8, 64), "d=256 B=8 T=128": (256, 8, 128)}
SMALL, LARGE = SIZES
GOALS = {
    SMALL: "step <= 1.02, layer <= 1.05",
    LARGE: "step <= 1.02, layer <= 1.05",
    f"first call, {SMALL}": "step <= 1.15, layer <= 1.5",
}


class Block(nn.Module):
    """Attention, then a small network at every position."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        mask = nn.make_causal_mask(x[..., 0])
        y = nn.LayerNorm(name="norm1")(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, name="attention")(y, mask=mask)
        y = nn.Dense(4 * x.shape[-1], name="up")(nn.LayerNorm(name="norm2")(x))
        return x + nn.Dense(x.shape[-1], name="down")(nn.gelu(y))


class Model(nn.Module):
    width: int

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(LETTERS, self.width, name="token")(tokens)
        for i in range(BLOCKS):
            x = Block(name=f"block_{i}")(x)
        return nn.Dense(LETTERS, name="head")(nn.LayerNorm(name="norm")(x))


OPTIMIZER = optax.adam(1e-3)


def train_step(params: Any, opt_state: Any, tokens: Any) -> tuple[Any, Any, Any]:
    def loss_fn(params: Any) -> Any:
        width = params["params"]["token"]["embedding"].shape[-1]
        logits = Model(width).apply(params, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def plain() -> Callable[..., Any]:
    return jax.jit(train_step)


def tracked(**chosen: Any) -> Callable[..., Any]:
    """Run under the default tracker, or under one with other options."""
    step: Callable[..., Any] = anynan.jax.track(train_step, **split(chosen))
    return step


def debug_nans() -> Callable[..., Any]:
    """Run with ``jax_debug_nans``, which looks at every result on the host."""
    step = jax.jit(train_step)

    def run(*args: Any) -> Any:
        with jax.debug_nans(True):
            return step(*args)

    return run


def float_checks() -> Callable[..., Any]:
    step = jax.jit(checkify.checkify(train_step, errors=checkify.float_checks))

    def run(*args: Any) -> Any:
        error, out = step(*args)
        error.throw()
        return out

    return run


def callback() -> Callable[..., Any]:
    """Send whether every gradient is finite to the host, every step."""

    def step(params: Any, opt_state: Any, tokens: Any) -> Any:
        out = train_step(params, opt_state, tokens)
        fine = [jnp.isfinite(x).all() for x in jax.tree.leaves(out)]
        jax.debug.callback(lambda ok: None, jnp.stack(fine).all())
        return out

    return jax.jit(step)


BASE = "plain jit"
VARIANTS: dict[str, Callable[[], Callable[..., Any]]] = {
    BASE: plain,
    'anynan track(step, level="step")': functools.partial(tracked, level="step"),
    "anynan track(step)": tracked,
    "anynan, lag=1": functools.partial(tracked, lag=1),
    'anynan, action="skip"': functools.partial(tracked, action="skip"),
    'anynan, stats="absmax"': functools.partial(tracked, stats=("absmax",)),
    'anynan track(step, level="operation")': functools.partial(tracked, level="operation"),
    "jax_debug_nans": debug_nans,
    "checkify.float_checks": float_checks,
    "unconditional debug.callback": callback,
}


SELDOM = ('anynan track(step, level="operation")',)


def arguments(size: str) -> tuple[Any, Any, Any]:
    width, batch, length = SIZES[size]
    tokens = jax.random.randint(jax.random.key(0), (batch, length + 1), 0, LETTERS)
    params = Model(width).init(jax.random.key(0), tokens[:, :-1])
    return params, OPTIMIZER.init(params), tokens


def finished(step: Callable[..., Any], args: tuple[Any, ...]) -> object:
    return jax.block_until_ready(step(*args))


def measure(rounds: int) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return run and first-call times of each variant over those of the plain step.

    And what a failing step takes, over the plain first call.
    """
    args = arguments(SMALL)
    first: dict[str, list[float]] = {}
    steps: dict[str, Callable[..., Any]] = {}
    for number in range(FIRST_CALLS):
        for name, make in VARIANTS.items():
            if number and name in SELDOM:
                continue
            jax.clear_caches()
            steps[name] = step = make()
            first.setdefault(name, []).append(seconds(finished, step, args))
    results = {}
    for size in SIZES:
        fit = arguments(size)
        runs = {name: functools.partial(finished, step, fit) for name, step in steps.items()}
        results[size] = ratios(runs, BASE, rounds, seldom=SELDOM)
    results[f"first call, {SMALL}"] = over(BASE, first)
    failed = over(BASE, {BASE: first[BASE], **failing(steps, args)})
    return results, {name: ratio for name, ratio in failed.items() if name != BASE}


def failing(steps: dict[str, Callable[..., Any]], args: tuple[Any, ...]) -> dict[str, list[float]]:
    """Return how long the report of an overflow takes that began in the third block."""
    params = jax.tree.map(lambda x: x, args[0])
    layer = params["params"]["block_2"]["up"]
    layer["kernel"] = layer["kernel"] * 1e38

    def fails(name: str) -> None:
        with contextlib.suppress(FloatingPointError, checkify.JaxRuntimeError):
            finished(steps[name], (params, *args[1:]))

    names = "anynan track(step)", "jax_debug_nans", "checkify.float_checks"
    return {name: [seconds(fails, name)] for name in names}


def memory() -> tuple[int, int]:
    """Count the bytes that the readings add: to what comes out, and to what is made meanwhile."""
    args = arguments(SMALL)
    tracked = anynan.jax.track(train_step)
    tracked(*args)
    session: Any = inside(tracked).judge.adapter
    (watches,) = session._programs.values()
    watch = watches.get(set())
    leaves = jax.tree.leaves(args)
    mine = watch.run.lower(session.verdicts.table(watch), watch.factors, *leaves).compile()
    plain = jax.jit(train_step).lower(*args).compile()
    a, b = mine.memory_analysis(), cast(Any, plain.memory_analysis())
    return (
        a.output_size_in_bytes - b.output_size_in_bytes,
        a.temp_size_in_bytes - b.temp_size_in_bytes,
    )


def main() -> None:
    chosen = options(__doc__)
    results, reported = measure(chosen.rounds)
    out, meanwhile = memory()
    devices = f"{jax.device_count()} {jax.default_backend()} device(s)"
    failed = "; ".join(f"{name} {ratio:.2f}" for name, ratio in reported.items())
    text = (
        f"{machine(f'JAX {jax.__version__}', devices)}; medians of {chosen.rounds} interleaved "
        f"steps and of {FIRST_CALLS} first calls, tracing and compiling included.\n\n"
        f"{table(results, 'variant', GOALS)}\n\n"
        f"The step in which a layer overflows, over the plain first call: {failed}. anynan's goal "
        "for the compilation of its replay is 2.5, and this is the whole call, report included.\n\n"
        f"Memory that the readings add, counted: {out} bytes to the results of the step, and "
        f"{meanwhile} bytes while it runs.\n"
    )
    publish("jax", text, chosen.write)


if __name__ == "__main__":
    main()
