"""NaN and Inf that a program keeps on purpose between its steps: noted, named when they harm."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import anynan
from tests.flat import split

NAN, INF = np.nan, np.inf
X = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


def with_torch(*, harms: bool, **options: Any) -> tuple[Any, Callable[[], Any]]:
    torch = pytest.importorskip("torch")
    base: Any = torch.nn.Module

    class Model(base):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 1)
            self.register_buffer("best", torch.tensor(INF))
            self.register_buffer("ages", torch.full((2,), NAN))

        def forward(self, x: Any) -> Any:
            self.best.copy_(torch.where(x.sum() > 100, x.sum(), self.best))
            self.ages[0] = x.detach().mean()
            return self.linear(x) * self.ages if harms else self.linear(x)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step() -> Any:
        optimizer.zero_grad()
        loss = model(torch.from_numpy(X)).tanh().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    tracked = anynan.torch.track(step, **split(options))
    return tracked, tracked


def with_jax(*, harms: bool, **options: Any) -> tuple[Any, Callable[[], Any]]:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    # The first step makes the ages wider: what comes back need not have the same dtype.
    ages = jnp.full(2, NAN, jnp.float16)
    state = {"w": jnp.ones((2, 1)), "best": jnp.asarray(INF), "ages": ages}

    def step(state: Any, x: Any) -> Any:
        def loss_of(weight: Any) -> Any:
            made = x @ weight
            return jnp.tanh(made * state["ages"] if harms else made).mean()

        loss, slope = jax.value_and_grad(loss_of)(state["w"])
        best = jnp.where(loss > 100, loss, state["best"])
        ages = jnp.where(jnp.arange(2) == 0, x.mean(), state["ages"])
        return {"w": state["w"] - 0.01 * slope, "best": best, "ages": ages}, loss

    tracked = anynan.jax.track(step, **split(options))
    held = [state]

    def run() -> Any:
        held[0], loss = tracked(held[0], X)
        return loss

    return tracked, run


def with_tensorflow(*, harms: bool, **options: Any) -> tuple[Any, Callable[[], Any]]:
    tf = pytest.importorskip("tensorflow")
    base: Any = tf.Module

    class Model(base):
        def __init__(self) -> None:
            super().__init__()
            self.weight = tf.Variable(np.ones((2, 1), np.float32))
            self.best = tf.Variable(np.float32(INF), trainable=False)
            self.ages = tf.Variable(np.full(2, NAN, np.float32), trainable=False)

        def __call__(self, x: Any) -> Any:
            total = tf.reduce_sum(x)
            self.best.assign(tf.where(total > 100, total, self.best))
            self.ages.assign(tf.where([True, False], tf.reduce_mean(x), self.ages))
            made = x @ self.weight
            return made * self.ages if harms else made

    model = Model()

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(model(x)))
        return loss, tape.gradient(loss, model.weight)

    tracked = anynan.tensorflow.track(tf.function(step), **split(options))
    return tracked, lambda: tracked(tf.constant(X))[0]


def with_mlx(*, harms: bool, **options: Any) -> tuple[Any, Callable[[], Any]]:
    mx = pytest.importorskip("mlx.core")
    from mlx import nn, optimizers

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 1)
            self.best, self.ages = mx.array(INF), mx.full(2, NAN)
            self.freeze(recurse=False)

        def __call__(self, x: Any) -> Any:
            self.best = mx.where(x.sum() > 100, x.sum(), self.best)
            self.ages[0] = mx.stop_gradient(x).mean()
            return self.linear(x) * self.ages if harms else self.linear(x)

    model, optimizer = Model(), optimizers.SGD(0.01)

    def step() -> Any:
        gradients = nn.value_and_grad(model, lambda x: mx.tanh(model(x)).mean())
        loss, slope = gradients(mx.array(X))
        optimizer.update(model, slope)
        return loss

    tracked = anynan.mlx.track(step, **split(options))
    return tracked, tracked


EVERY = pytest.mark.parametrize("made", [with_torch, with_jax, with_tensorflow, with_mlx])
Made = Callable[..., tuple[Any, Callable[[], Any]]]


@EVERY
@pytest.mark.parametrize("options", [{}, {"parameters": True}, {"level": "operation"}], ids=str)
def test_what_is_kept_and_does_no_harm_raises_nothing(made: Made, options: Any) -> None:
    tracker, run = made(harms=False, **options)
    with _closing(tracker):
        for _ in range(3):
            assert np.isfinite(float(run()))
        assert tracker.count("bad") == 0
        noted = {str(event.parameter).rpartition(".")[2] for event in tracker.events}
        assert noted <= {"best", "ages"}
        assert {event.severity for event in tracker.events} <= {"suspect"}


@EVERY
@pytest.mark.parametrize("options", [{}, {"replay": False}], ids=str)
def test_what_is_kept_is_named_where_it_does_harm(made: Made, options: Any) -> None:
    tracker, run = made(harms=True, **options)
    with _closing(tracker), pytest.raises(anynan.NonFiniteError) as caught:
        run()
    event = caught.value.event
    known = options.get("replay", True) or event.parameter is not None
    if known:  # else nothing is said to be the cause
        assert event.phase == "parameter", str(caught.value)
        assert str(event.parameter).rpartition(".")[2] == "ages"
        assert event.kind == "nan"
    else:
        assert event.cause.tag == "unknown"


@contextmanager
def _closing(tracker: Any) -> Iterator[None]:
    try:
        yield
    finally:
        tracker.remove()
