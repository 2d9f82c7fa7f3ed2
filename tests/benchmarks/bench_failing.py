"""Time the step that fails, and the steps after it, beside clean ones.

Each program has a twin that stays clean; one batch of the other holds a NaN, with an action that
goes on, so its weights are NaN from then on. The two take turns, step by step. Each framework runs
in a process of its own. Run it with nothing else on the machine: ``make bench ARGS=failing``, and
one framework alone with ``python -m tests.benchmarks.bench_failing --part jax``.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import anynan
from anynan._steps.tracked import inside
from tests.benchmarks.timing import machine, options, publish, rows, seconds

COLUMNS = (
    "program", "size", "other objects", "level", "clean step, ms", "bad step, s",
    "of a clean step", "of a first call", "later steps",
)  # fmt: skip
GOALS = ("goal", "", "", "", "", "PyTorch <= 2", "PyTorch <= 40", "JAX, Keras <= 3", "<= 1.20")
LEVELS = ("step", "layer", "operation")

# Runs a step: with a batch that holds a NaN, or with a good one.
Step = Callable[[bool], object]


def measure(
    make: Callable[[], Step], program: str, size: str, level: str, heap: int = 0, rounds: int = 60
) -> list[str]:
    """Measure a program beside its clean twin; give the cells of the table.

    ``make`` gives a step that is tracked already, of weights of its own; ``heap`` is how many
    objects the process holds beside it.
    """
    held = [[number] for number in range(heap // 2)]  # each holds an int of its own, too
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twin, other = make(), make()
        first = seconds(twin, False)
        for step in (twin, other, twin, other):
            step(False)
        clean = statistics.median(seconds(twin, False) for _ in range(rounds))
        bad = seconds(other, True)
        other(False)  # it sees what was left behind
        pairs = [(seconds(twin, False), seconds(other, False)) for _ in range(rounds)]
    after, later = (statistics.median(column) for column in zip(*pairs, strict=True))
    del held
    found = bad / clean, bad / first, later / after
    return [
        program, size, f"{heap:,}".replace(",", " "), level,
        f"{1e3 * clean:.2f}", f"{bad:.2f}", *(f"{ratio:.2f}" for ratio in found),
    ]  # fmt: skip


def torch_rows() -> Iterator[list[str]]:
    """Measure a PyTorch model and a training step, over layers and over the heap."""
    import torch
    from torch import nn

    torch.set_num_threads(1)

    def make(kind: str, depth: int, level: Any) -> Step:
        layers = [layer for _ in range(depth // 2) for layer in (nn.Linear(64, 64), nn.ReLU())]
        model = nn.Sequential(*layers, nn.Linear(64, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def train(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        target: Any = model if kind == "model" else train
        tracker: Any = anynan.torch.track(target, level=level, action="record")
        run = train if kind == "model" else tracker

        def step(bad: bool) -> None:
            assert not inside(tracker).paused  # and it lives as long as the step
            x = torch.randn(32, 64)
            if bad:
                x[0, 0] = float("nan")
            run(x)

        return step

    sizes = (10, 0), (100, 0), (400, 0), (100, 1_000_000), (100, 4_000_000)
    for kind, level, (depth, heap) in itertools.product(("model", "step"), LEVELS, sizes):
        made, rounds = partial(make, kind, depth, level), 8 if level == "operation" else 60
        yield measure(made, f"PyTorch, track({kind})", f"{depth} layers", level, heap, rounds)


def array_rows() -> Iterator[list[str]]:
    import numpy as np

    def make(count: int, level: Any) -> Step:
        def total(*arrays: Any) -> Any:
            return sum(np.sqrt(x).sum() for x in arrays)

        tracked = anynan.track(total, level=level, action="record")
        good = [np.ones(1000) for _ in range(count)]
        spoilt = [np.full(1000, np.nan), *good[1:]]
        return lambda bad: tracked(*(spoilt if bad else good))

    for level, count in itertools.product(LEVELS, (1, 5, 50, 200)):
        made = partial(make, count, level)
        yield measure(made, "NumPy, track(function)", f"{count} arguments", level)


def jax_rows() -> Iterator[list[str]]:
    """Measure a jitted JAX training step, over its layers, and a whole training."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    def make(depth: int, level: Any) -> Step:
        def loss_of(params: Any, x: Any) -> Any:
            for weight in params:
                x = jnp.tanh(x @ weight)
            return (x**2).mean()

        def train(params: Any, x: Any) -> Any:
            loss, grads = jax.value_and_grad(loss_of)(params, x)
            return [p - 1e-3 * g for p, g in zip(params, grads, strict=True)], loss

        tracked: Any = anynan.jax.track(jax.jit(train), level=level, action="record")
        state = [[jnp.eye(64) for _ in range(depth)]]

        def step(bad: bool) -> None:
            x = np.ones((32, 64), np.float32)
            if bad:
                x[0, 0] = np.nan
            state[0], loss = tracked(state[0], x)
            jax.block_until_ready(loss)

        return step

    for level, depth in itertools.product(LEVELS[:2], (5, 50)):
        yield measure(partial(make, depth, level), "JAX, track(step)", f"{depth} layers", level)
    for level in LEVELS[:2]:
        yield measure(partial(nested, level), "JAX, track(training)", "3 loops, nested", level)


def nested(level: Any) -> Step:
    """Make a whole training in one jit: loops over updates, epochs and batches."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax

    def loss_of(params: Any, x: Any) -> Any:
        for weight, bias in params:
            x = jnp.tanh(x @ weight + bias)
        scaled = (x - x.mean()) / x.std()
        return jnp.mean(jnp.minimum(scaled * jnp.exp(x), jnp.clip(jnp.exp(x), 0.8, 1.2)))

    def update(state: Any, x: Any) -> Any:
        params, means = state
        grads = jax.grad(loss_of)(params, x)
        means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, grads)
        return (jax.tree.map(lambda p, m: p - 1e-3 * m, params, means), means), None

    def train(state: Any, x: Any) -> Any:
        def epochs(state: Any, key: Any) -> Any:
            batches = jax.random.permutation(key, x).reshape(4, 16, 8)
            return lax.scan(update, state, batches)

        def updates(state: Any, key: Any) -> Any:
            return lax.scan(epochs, state, jax.random.split(key, 2))[0], None

        return lax.scan(updates, state, jax.random.split(jax.random.key(0), 3))[0]

    tracked: Any = anynan.jax.track(jax.jit(train), level=level, action="record")
    params = [(jnp.eye(8), jnp.zeros(8)) for _ in range(6)]
    held = [(params, jax.tree.map(jnp.zeros_like, params))]
    good = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)

    def step(bad: bool) -> None:
        held[0] = tracked(held[0], np.where(np.arange(8) == 0, np.nan, good) if bad else good)
        jax.block_until_ready(held[0])

    return step


def keras_rows() -> Iterator[list[str]]:
    """Measure what ``fit`` does for a batch, on the backend of this process."""
    import keras
    import numpy as np

    def make(depth: int, level: Any) -> Step:
        layers = [keras.layers.Dense(32, activation="tanh") for _ in range(depth)]
        model = keras.Sequential([keras.Input((32,)), *layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        tracker = anynan.keras.track(model, level=level, action="record")

        def step(bad: bool) -> None:
            assert not inside(tracker).paused
            x = np.ones((32, 32), np.float32)
            if bad:
                x[0, 0] = np.nan
            model.train_on_batch(x, np.ones((32, 1), np.float32))

        return step

    name = f"Keras on {keras.backend.backend()}"
    for level, depth in itertools.product(LEVELS[:2], (5, 20)):
        yield measure(partial(make, depth, level), name, f"{depth} layers", level)


PARTS: dict[str, Callable[[], Iterator[list[str]]]] = {
    "torch": torch_rows,
    "arrays": array_rows,
    "jax": jax_rows,
    "keras-tensorflow": keras_rows,
    "keras-torch": keras_rows,
    "keras-jax": keras_rows,
}


def run_apart(part: str) -> list[list[str]]:
    environ = os.environ | {"KERAS_BACKEND": part.removeprefix("keras-")}
    command = [sys.executable, "-m", "tests.benchmarks.bench_failing", "--part", part]
    done = subprocess.run(command, check=True, env=environ, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line[:2] == '["']


def main() -> None:
    chosen = options(__doc__)
    if chosen.part is not None:
        for cells in PARTS[chosen.part]():
            print(json.dumps(cells), flush=True)
        return
    found = rows(COLUMNS, GOALS, *(cells for part in PARTS for cells in run_apart(part)))
    publish("failing", f"{machine('one thread of PyTorch')}.\n\n{found}\n", chosen.write)


if __name__ == "__main__":
    main()
