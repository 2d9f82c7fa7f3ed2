"""How far updates move the weights is told alike, in one step of so many, in every framework."""

import functools
import math
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest

import anynan
from tests.conformance.programs import Asked, Run, with_jax, with_mlx, with_tensorflow, with_torch
from tests.flat import split

X = np.random.default_rng(0).normal(size=(8, 300)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(300, 300)).astype(np.float32) / 30
ASKED = Asked(W, whole=True)


def with_keras(_: Asked, **options: Any) -> Run:
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.Input((300,)), keras.layers.Dense(300), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    tracker = anynan.keras.track(model, **split(options))

    def call(x: Any, rate: float) -> None:
        model.optimizer.learning_rate = rate
        model.fit(x, np.ones((8, 1), np.float32), batch_size=8, verbose=0)

    return Run(tracker, call, model.get_weights)


BACKENDS: dict[str, Callable[..., Run]] = {
    "torch": with_torch,
    "jax": with_jax,
    "tensorflow": with_tensorflow,
    "tensorflow-compiled": functools.partial(with_tensorflow, compiled=True),
    "keras": with_keras,
    "mlx": with_mlx,
}


def norm(arrays: list[Any]) -> float:
    return math.hypot(*(float(np.linalg.norm(x)) for x in arrays))


def moved(before: list[Any], after: list[Any]) -> float:
    return norm([a - b for a, b in zip(after, before, strict=True)])


@pytest.mark.parametrize("library", BACKENDS)
def test_one_step_in_so_many_tells_how_far_the_weights_moved(library: str) -> None:
    run, truth = BACKENDS[library](ASKED, updates=3), {}
    for number in range(8):
        before = run.weights()
        run.call(X, 0.0 if number == 3 else 1e-3 * (number + 1))
        truth[number] = moved(before, run.weights()), norm(before)
    tracker = run.tracker
    tracker.flush()
    seen = tracker.history.updates()
    assert [number for number, _, _ in seen] == [0, 3, 6]
    for number, update, size in seen:
        assert (update, size) == pytest.approx(truth[number], rel=0.1)  # from a sample
    assert "  update    norm" in tracker.report()
    assert "anynan/update_norm" not in tracker.metrics()  # the last step was not looked at
    assert not tracker.events
    tracker.remove()


@pytest.mark.parametrize("library", BACKENDS)
def test_an_update_that_is_dropped_moves_nothing_and_is_not_told(library: str) -> None:
    with closing(BACKENDS[library](ASKED, updates=1, action="skip")) as run:
        run.call(X, 0.01)
        assert len(run.tracker.history.updates()) == 1
        before = run.weights()
        with pytest.warns(anynan.AnynanWarning):
            run.call(np.full_like(X, 1e30), 0.01)
        assert moved(before, run.weights()) == 0
        assert len(run.tracker.history.updates()) == 1


def test_a_function_that_gives_no_weights_back_is_told_so() -> None:
    jnp = pytest.importorskip("jax.numpy")
    with pytest.warns(anynan.AnynanWarning, match=r"updates=\) has nothing to judge"):
        anynan.jax.track(lambda x: x * 2, advanced=anynan.Advanced(updates=10))(jnp.ones(3))


def test_array_code_says_that_it_knows_no_weights() -> None:
    with pytest.raises(TypeError, match="updates= has no meaning for array code"):
        anynan.track(lambda x: x, advanced=anynan.Advanced(updates=10))
