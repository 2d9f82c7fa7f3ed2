"""NaN and Inf that come in as data: noted while they are dealt with, named when they do harm."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import anynan
from tests.flat import split

# The first row is whole, the others hold a NaN and an Inf.
GAPS = np.array([[1.0, 2.0], [np.nan, 4.0], [5.0, np.inf]], np.float32)


def with_numpy(*, fills: bool, **options: Any) -> tuple[Any, Any]:
    def step(x: Any) -> Any:
        known = np.nan_to_num(x, posinf=0.0) if fills else x
        return np.tanh(known).mean()

    return anynan.track(step, **split(options)), GAPS


def with_torch(*, fills: bool, **options: Any) -> tuple[Any, Any]:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        known = torch.where(torch.isfinite(x), x, 0.0) if fills else x
        loss = model(known).tanh().mean()
        loss.backward()
        optimizer.step()
        return loss

    return anynan.torch.track(step, **split(options)), torch.from_numpy(GAPS)


def with_jax(*, fills: bool, **options: Any) -> tuple[Any, Any]:
    jax = pytest.importorskip("jax")
    weight = jax.numpy.ones((2, 1))

    def step(weight: Any, x: Any) -> Any:
        known = jax.numpy.where(jax.numpy.isfinite(x), x, 0.0) if fills else x
        loss, slope = jax.value_and_grad(lambda w: jax.numpy.tanh(known @ w).mean())(weight)
        return weight - 0.1 * slope, loss

    tracked = anynan.jax.track(step, **split(options))
    return Bound(tracked, weight), jax.numpy.asarray(GAPS)


def with_tensorflow(*, fills: bool, **options: Any) -> tuple[Any, Any]:
    tf = pytest.importorskip("tensorflow")
    weight = tf.Variable(np.ones((2, 1), np.float32))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            known = tf.where(tf.math.is_finite(x), x, 0.0) if fills else x
            loss = tf.reduce_mean(tf.tanh(known @ weight))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    return anynan.tensorflow.track(step, **split(options)), tf.constant(GAPS)


def with_mlx(*, fills: bool, **options: Any) -> tuple[Any, Any]:
    mx = pytest.importorskip("mlx.core")
    from mlx import nn, optimizers

    model, optimizer = nn.Linear(2, 1), optimizers.SGD(0.01)

    def loss(x: Any) -> Any:
        return mx.tanh(model(mx.where(mx.isfinite(x), x, 0.0) if fills else x)).mean()

    def step(x: Any) -> Any:
        value, slope = nn.value_and_grad(model, loss)(x)
        optimizer.update(model, slope)
        return value

    return anynan.mlx.track(step, **split(options)), mx.array(GAPS)


class Bound:
    """Call a tracked step with its weight."""

    def __init__(self, tracker: Any, weight: Any) -> None:
        self.tracker, self.weight = tracker, weight

    def __call__(self, x: Any) -> Any:
        return self.tracker(self.weight, x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tracker, name)


EVERY = pytest.mark.parametrize(
    "made", [with_numpy, with_torch, with_jax, with_tensorflow, with_mlx]
)
Made = Callable[..., tuple[Any, Any]]


@EVERY
@pytest.mark.parametrize("level", ["layer", "operation"])
def test_missing_values_that_are_filled_in_raise_nothing(made: Made, level: str) -> None:
    step, gaps = made(fills=True, level=level)
    with _closing(step):
        for _ in range(2):
            assert np.isfinite(np.asarray(_loss(step(gaps)))).all()
        assert step.count("bad") == 0
        came = [event for event in step.events if event.phase == "input"]
        assert [(event.severity, event.kind) for event in came] == [("suspect", "nan")]


@EVERY
def test_missing_values_that_reach_the_loss_are_named_with_their_rows(made: Made) -> None:
    step, gaps = made(fills=False)
    with _closing(step), pytest.raises(anynan.NonFiniteError) as caught:
        step(gaps)
    event = caught.value.event
    assert (event.phase, event.kind, event.tensor) == ("input", "nan", "x")
    assert event.cause.tag == "bad_input"
    assert "2 of 3 rows are bad: 1, 2" in event.cause.evidence
    assert step.count("suspect") == 0


@EVERY
def test_without_a_second_run_the_batch_is_named_too(made: Made) -> None:
    step, gaps = made(fills=False, replay=False)
    with _closing(step), pytest.raises(anynan.NonFiniteError) as caught:
        step(gaps)
    assert (caught.value.event.phase, caught.value.event.tensor) == ("input", "x")


@contextmanager
def _closing(step: Any) -> Iterator[None]:
    try:
        yield
    finally:
        step.remove()


def _loss(result: Any) -> Any:
    loss = result[1] if isinstance(result, tuple) else result
    return loss.detach() if hasattr(loss, "detach") else loss
