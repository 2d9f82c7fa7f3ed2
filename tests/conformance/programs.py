"""One small training of each framework: the mean of ``square(x @ weights)`` goes down."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import anynan
from tests.flat import split

NAN, INF = np.nan, np.inf


@dataclass(frozen=True)
class Asked:
    """Say what a test asks of it.

    Attributes:
        first: The first weights.
        whole: Its model is tracked, not its step; JAX, which has none, donates its weights.
        fills: What is missing of a batch is filled in.
        keeps: It keeps an Inf (``best``) and a NaN (``ages``) between its steps.
        harms: It multiplies by that NaN.
    """

    first: Any = field(default_factory=lambda: np.ones((2, 1), np.float32))
    whole: bool = False
    fills: bool = False
    keeps: bool = False
    harms: bool = False


@dataclass
class Run:
    """Hold a training: what tracks it, a step with a batch and a learning rate, its weights."""

    tracker: Any
    call: Callable[..., Any]
    weights: Callable[[], list[Any]]

    def close(self) -> None:
        self.tracker.remove()


def with_torch(asked: Asked, **options: Any) -> Run:
    torch = pytest.importorskip("torch")
    base: Any = torch.nn.Module

    class Model(base):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(*asked.first.shape)
            self.linear.weight.data = torch.from_numpy(asked.first.T.copy())
            if asked.keeps:
                self.register_buffer("best", torch.tensor(INF))
                self.register_buffer("ages", torch.full((2,), NAN))

        def forward(self, x: Any) -> Any:
            if asked.keeps:
                self.best.copy_(torch.where(x.sum() > 100, x.sum(), self.best))
                self.ages[0] = x.detach().mean()
            made = self.linear(torch.where(torch.isfinite(x), x, 0.0) if asked.fills else x)
            return made * self.ages if asked.harms else made

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    tracker = anynan.torch.track(model if asked.whole else step, **split(options))

    def call(x: Any, rate: float = 0.01) -> Any:
        optimizer.param_groups[0]["lr"] = rate
        return (step if asked.whole else tracker)(torch.from_numpy(x))

    return Run(tracker, call, lambda: [p.detach().numpy().copy() for p in model.parameters()])


def with_jax(asked: Asked, **options: Any) -> Run:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    # The first step makes the ages wider: what comes back need not have the same dtype.
    kept = {"best": jnp.asarray(INF), "ages": jnp.full(2, NAN, jnp.float16)} if asked.keeps else {}

    def step(state: Any, x: Any, rate: Any) -> Any:
        def loss_of(weight: Any) -> Any:
            made = (jnp.where(jnp.isfinite(x), x, 0.0) if asked.fills else x) @ weight
            return jnp.square(made * state["ages"] if asked.harms else made).mean()

        loss, slope = jax.value_and_grad(loss_of)(state["w"])
        after = {"w": state["w"] - rate * slope}
        if asked.keeps:
            after["best"] = jnp.where(loss > 100, loss, state["best"])
            after["ages"] = jnp.where(jnp.arange(2) == 0, x.mean(), state["ages"])
        return after, loss

    step = jax.jit(step, donate_argnums=0) if asked.whole else step
    tracker = anynan.jax.track(step, **split(options))
    held = [{"w": jnp.asarray(asked.first), **kept}]

    def call(x: Any, rate: float = 0.01) -> Any:
        held[0], loss = tracker(held[0], jnp.asarray(x), jnp.float32(rate))
        return loss

    return Run(tracker, call, lambda: [np.array(x) for x in jax.tree.leaves(held[0])])


def with_tensorflow(asked: Asked, *, compiled: bool = False, **options: Any) -> Run:
    tf = pytest.importorskip("tensorflow")
    import keras

    base: Any = tf.Module

    class Model(base):
        def __init__(self) -> None:
            super().__init__()
            self.weight = tf.Variable(asked.first)
            if asked.keeps:
                self.best = tf.Variable(np.float32(INF), trainable=False)
                self.ages = tf.Variable(np.full(2, NAN, np.float32), trainable=False)

        def __call__(self, x: Any) -> Any:
            if asked.keeps:
                total = tf.reduce_sum(x)
                self.best.assign(tf.where(total > 100, total, self.best))
                self.ages.assign(tf.where([True, False], tf.reduce_mean(x), self.ages))
            made = (tf.where(tf.math.is_finite(x), x, 0.0) if asked.fills else x) @ self.weight
            return made * self.ages if asked.harms else made

    model, optimizer = Model(), keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    step = tf.function(step) if compiled or asked.keeps else step
    tracker = anynan.tensorflow.track(model if asked.whole else step, **split(options))

    def call(x: Any, rate: float = 0.01) -> Any:
        optimizer.learning_rate = rate
        return (step if asked.whole else tracker)(tf.constant(x))

    return Run(tracker, call, lambda: [v.numpy().copy() for v in model.trainable_variables])


def with_mlx(asked: Asked, **options: Any) -> Run:
    mx = pytest.importorskip("mlx.core")
    from mlx import nn, optimizers, utils

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(*asked.first.shape)
            self.linear.weight = mx.array(asked.first.T)
            if asked.keeps:
                self.best, self.ages = mx.array(INF), mx.full(2, NAN)
                self.freeze(recurse=False)

        def __call__(self, x: Any) -> Any:
            if asked.keeps:
                self.best = mx.where(x.sum() > 100, x.sum(), self.best)
                self.ages[0] = mx.stop_gradient(x).mean()
            made = self.linear(mx.where(mx.isfinite(x), x, 0.0) if asked.fills else x)
            return made * self.ages if asked.harms else made

    model, optimizer = Model(), optimizers.SGD(0.01)

    def step(x: Any) -> Any:
        loss, slope = nn.value_and_grad(model, lambda x: mx.square(model(x)).mean())(x)
        optimizer.update(model, slope)
        return loss

    tracker = anynan.mlx.track(model if asked.whole else step, **split(options))

    def call(x: Any, rate: float = 0.01) -> Any:
        optimizer.learning_rate = rate
        loss = (step if asked.whole else tracker)(mx.array(x))
        mx.eval(model.parameters())
        return loss

    return Run(
        tracker, call, lambda: [np.array(x) for _, x in utils.tree_flatten(model.parameters())]
    )
