"""How far updates move the weights is told alike, in one step of so many, in every framework."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import anynan
from tests.flat import split

X = np.random.default_rng(0).normal(size=(8, 300)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(300, 300)).astype(np.float32) / 30

# A tracker, a training step with a learning rate, and what the weights are.
Made = tuple[Any, Callable[..., Any], Callable[[], list[Any]]]


def with_torch(**options: Any) -> Made:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 1))
    model[0].weight.data = torch.from_numpy(W.copy())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(rate: float, x: Any = X) -> None:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        model(torch.from_numpy(x)).square().mean().backward()
        optimizer.step()

    tracker = anynan.torch.track(model, **split(options))
    return tracker, step, lambda: [p.detach().numpy().copy() for p in model.parameters()]


def with_jax(**options: Any) -> Made:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    last = jnp.full((300, 1), 0.1, jnp.float32)
    held = {"params": {"first": {"w": jnp.asarray(W)}, "last": {"w": last}}}

    def loss(params: Any, x: Any) -> Any:
        return jnp.square(x @ params["first"]["w"] @ params["last"]["w"]).mean()

    def train(params: Any, x: Any, rate: Any) -> Any:
        value, slope = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - rate * g, params, slope), value

    tracker = anynan.jax.track(jax.jit(train, donate_argnums=0), **split(options))

    def step(rate: float, x: Any = X) -> None:
        held["params"], _ = tracker(held["params"], jnp.asarray(x), jnp.float32(rate))

    return tracker, step, lambda: [np.array(x) for x in jax.tree.leaves(held["params"])]


def with_tensorflow(*, compiled: bool = False, **options: Any) -> Made:
    tf = pytest.importorskip("tensorflow")

    class Model(tf.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.first = tf.Variable(W, name="first")
            self.last = tf.Variable(np.full((300, 1), 0.1, np.float32), name="last")

        def __call__(self, x: Any) -> Any:
            return x @ self.first @ self.last

    import keras

    model, optimizer = Model(), keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    def train(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    tracker = anynan.tensorflow.track(model, **split(options))
    run = tf.function(train) if compiled else train

    def step(rate: float, x: Any = X) -> None:
        optimizer.learning_rate = rate
        run(tf.constant(x))

    return tracker, step, lambda: [v.numpy().copy() for v in model.trainable_variables]


def with_keras(**options: Any) -> Made:
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.Input((300,)), keras.layers.Dense(300), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    tracker = anynan.keras.track(model, **split(options))

    def step(rate: float, x: Any = X) -> None:
        model.optimizer.learning_rate = rate
        model.fit(x, np.ones((8, 1), np.float32), batch_size=8, verbose=0)

    return tracker, step, model.get_weights


def with_mlx(**options: Any) -> Made:
    mx = pytest.importorskip("mlx.core")
    from mlx import nn, optimizers, utils

    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 1))
    model.layers[0].weight = mx.array(W)
    optimizer = optimizers.SGD(0.1)
    gradients = nn.value_and_grad(model, lambda x: mx.square(model(x)).mean())

    def step(rate: float, x: Any = X) -> None:
        optimizer.learning_rate = rate
        _, slopes = gradients(mx.array(x))
        optimizer.update(model, slopes)
        mx.eval(model.parameters())

    tracker = anynan.mlx.track(model, **split(options))
    return tracker, step, lambda: [np.array(x) for _, x in utils.tree_flatten(model.parameters())]


BACKENDS: dict[str, Callable[..., Made]] = {
    "torch": with_torch,
    "jax": with_jax,
    "tensorflow": with_tensorflow,
    "tensorflow-compiled": functools.partial(with_tensorflow, compiled=True),
    "keras": with_keras,
    "mlx": with_mlx,
}


def norm(arrays: list[Any]) -> float:
    return math.hypot(*(float(np.linalg.norm(x)) for x in arrays))


@pytest.mark.parametrize("library", BACKENDS)
def test_one_step_in_so_many_tells_how_far_the_weights_moved(library: str) -> None:
    tracker, step, weights = BACKENDS[library](updates=3)
    truth = {}
    for number in range(8):
        before = weights()
        step(0.0 if number == 3 else 1e-4 * (number + 1))
        truth[number] = norm([a - b for a, b in zip(weights(), before, strict=True)]), norm(before)
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
    tracker, step, weights = BACKENDS[library](updates=1, action="skip")
    step(0.01)
    assert len(tracker.history.updates()) == 1
    before = weights()
    with pytest.warns(anynan.AnynanWarning):
        step(0.01, np.full_like(X, 1e30))
    assert norm([a - b for a, b in zip(weights(), before, strict=True)]) == 0
    assert len(tracker.history.updates()) == 1
    tracker.remove()


def test_a_function_that_gives_no_weights_back_is_told_so() -> None:
    jnp = pytest.importorskip("jax.numpy")
    with pytest.warns(anynan.AnynanWarning, match=r"updates=\) has nothing to judge"):
        anynan.jax.track(lambda x: x * 2, advanced=anynan.Advanced(updates=10))(jnp.ones(3))


def test_array_code_says_that_it_knows_no_weights() -> None:
    with pytest.raises(TypeError, match="updates= has no meaning for array code"):
        anynan.track(lambda x: x, advanced=anynan.Advanced(updates=10))
