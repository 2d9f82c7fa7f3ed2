"""Time a tracked Keras model in fit beside what users would otherwise pick: graph, XLA, first call.

A residual network of 40 layers on TensorFlow with adam, trained by the function that ``fit``
calls for each batch. The variants take turns, batch by batch, each in a process of its own: a
check of all numerics holds for a whole process, and so does what watching changes. Run it with
nothing else on the machine: ``make bench``.
"""

import contextlib
import itertools
import multiprocessing as mp
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tests.benchmarks.timing import machine, options, over, publish, ratios, seconds, table
from tests.flat import split

BLOCKS, WIDTH, BATCH, KINDS, FIRST_CALLS = 13, 256, 256, 10, 2
GOALS = {
    "graph": "<= 1.05",
    "graph, first": "<= 1.5",
    "XLA": "step <= 1.03, layer <= 1.10",
    "XLA, first": "<= 1.5",
}


def network(blocks: int, *, jit: bool) -> Any:
    """Build the model: again and again a norm, a dense layer and a sum, then a head."""
    import keras

    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((WIDTH,))
    for _ in range(blocks):
        y = keras.layers.LayerNormalization()(x)
        x = keras.layers.Add()([x, keras.layers.Dense(WIDTH, activation="gelu")(y)])
    model = keras.Model(inputs, keras.layers.Dense(KINDS)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=jit)
    model.optimizer.build(model.trainable_variables)
    return model


def plain(model: Any) -> list[Any]:
    return []


def tracked(model: Any, **chosen: Any) -> list[Any]:
    """Run under the default tracker, or under one with other options."""
    import anynan

    anynan.keras.track(model, **split(chosen))
    return []


def monitor(model: Any) -> list[Any]:
    import anynan

    return [anynan.keras.Monitor()]


def terminate(model: Any) -> list[Any]:
    """Run with Keras' callback, which looks at the loss only."""
    import keras

    return [keras.callbacks.TerminateOnNaN()]


def check_numerics(model: Any) -> list[Any]:
    import tensorflow as tf

    tf.debugging.enable_check_numerics()
    return []


BASE = "fit, no tracking"
VARIANTS: dict[str, Callable[[Any], list[Any]]] = {
    BASE: plain,
    'anynan track(model, level="step")': partial(tracked, level="step"),
    "anynan track(model)": tracked,
    "anynan Monitor()": monitor,
    "anynan, backward=False": partial(tracked, backward=False),
    "TerminateOnNaN": terminate,
    "enable_check_numerics": check_numerics,
}


class Fit:
    """Do what ``fit`` does, batch by batch."""

    def __init__(self, name: str, blocks: int = BLOCKS, *, jit: bool) -> None:
        import keras
        import numpy as np
        import tensorflow as tf

        self.model = network(blocks, jit=jit)
        self._make = VARIANTS[name]
        random = np.random.default_rng(0)
        x = random.normal(size=(BATCH, WIDTH)).astype("float32")
        y = random.integers(0, KINDS, BATCH)
        self._batches = iter(tf.data.Dataset.from_tensors((x, y)).repeat())
        self._wrap = keras.callbacks.CallbackList
        self._number = itertools.count()

    def first(self) -> None:
        self._callbacks = self._wrap(self._make(self.model), model=self.model)
        self.model.make_train_function()
        self._callbacks.on_train_begin()
        self._callbacks.on_epoch_begin(0)
        self.step()

    def step(self) -> None:
        number = next(self._number)
        self._callbacks.on_train_batch_begin(number)
        logs = self.model.train_function(self._batches)
        self._callbacks.on_train_batch_end(number, {k: float(v) for k, v in logs.items()})

    def end(self) -> None:
        """Let go of the model."""
        import anynan

        self._callbacks.on_train_end()
        with contextlib.suppress(ValueError):
            anynan.untrack(self.model)


def serve(name: str, threads: int, pipe: Any) -> None:
    """Answer, in a process of its own: "step" trains on, all else begins anew."""
    import tensorflow as tf

    warnings.simplefilter("ignore")
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    fit: Fit | None = None
    for asked in iter(pipe.recv, "end"):
        if asked == "step":
            assert fit is not None
            fit.step()
            pipe.send(None)
            continue
        if fit is not None:
            fit.end()
        fit = Fit(name, 1 if asked == "warm" else BLOCKS, jit=asked == "xla")
        try:
            pipe.send(seconds(fit.first))
        except tf.errors.InvalidArgumentError:
            pipe.send(None)


def ask(pipe: Any, what: str) -> Any:
    pipe.send(what)
    return pipe.recv()


@contextlib.contextmanager
def processes(threads: int) -> Iterator[dict[str, Any]]:
    os.environ.update(KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="3")
    context = mp.get_context("spawn")
    pipes: dict[str, Any] = {}
    for name in VARIANTS:
        pipes[name], theirs = context.Pipe()
        context.Process(target=serve, args=(name, threads, theirs), daemon=True).start()
    yield pipes
    for pipe in pipes.values():
        pipe.send("end")


def measure(rounds: int, threads: int) -> dict[str, dict[str, float]]:
    """Return the times of each variant over those of ``fit`` as it is, by what was measured."""
    results: dict[str, dict[str, float]] = {}
    with processes(threads) as pipes:
        for name in pipes:
            ask(pipes[name], "warm")  # TensorFlow's own first call takes longer
        for way, title in (("graph", "graph"), ("xla", "XLA")):
            first: dict[str, list[float]] = {}
            for _ in range(FIRST_CALLS):
                for name, pipe in pipes.items():
                    took = ask(pipe, way)
                    if took is not None:
                        first.setdefault(name, []).append(took)
            runs = {name: partial(ask, pipes[name], "step") for name in first}
            results[title] = ratios(runs, BASE, rounds)
            results[f"{title}, first"] = over(BASE, first)
    return results


def main() -> None:
    import keras
    import tensorflow as tf

    chosen = options(__doc__)
    threads = chosen.threads or os.cpu_count() or 1
    results = measure(chosen.rounds, threads)
    software = f"TensorFlow {tf.__version__}", f"Keras {keras.__version__}"
    text = (
        f"{machine(f'{threads} threads', *software)}; medians of {chosen.rounds} interleaved "
        f"batches and of {FIRST_CALLS} first calls, tracing and compiling included.\n\n"
        f"{table(results, 'variant', GOALS)}\n"
    )
    publish("keras", text, chosen.write)


if __name__ == "__main__":
    main()
