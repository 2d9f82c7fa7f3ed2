"""NaN and Inf that come in as data or that a program keeps on purpose: noted, named if they harm.

Each framework has one small training step. It ``fills`` in what is missing of its batch or not,
``keeps`` an Inf (``best``) and a NaN (``ages``) between its steps, and multiplies by the NaN where
that ``harms``.
"""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest

import anynan
from tests.flat import split

NAN, INF = np.nan, np.inf
WHOLE = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
# The first row is whole, the others hold a NaN and an Inf.
GAPS = np.array([[1.0, 2.0], [NAN, 4.0], [5.0, INF]], np.float32)


class Run:
    """Run a tracked step on a batch, and give its loss."""

    def __init__(self, tracker: Any, call: Callable[[Any], Any]) -> None:
        self.tracker, self.call, self.close = tracker, call, tracker.remove


def with_numpy(*, fills: bool = False, **options: Any) -> Run:
    def step(x: Any) -> Any:
        return np.tanh(np.nan_to_num(x, posinf=0.0) if fills else x).mean()

    tracked = anynan.track(step, **split(options))
    return Run(tracked, tracked)


def with_torch(
    *, fills: bool = False, keeps: bool = False, harms: bool = False, **options: Any
) -> Run:
    torch = pytest.importorskip("torch")
    base: Any = torch.nn.Module

    class Model(base):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 1)
            if keeps:
                self.register_buffer("best", torch.tensor(INF))
                self.register_buffer("ages", torch.full((2,), NAN))

        def forward(self, x: Any) -> Any:
            if keeps:
                self.best.copy_(torch.where(x.sum() > 100, x.sum(), self.best))
                self.ages[0] = x.detach().mean()
            made = self.linear(torch.where(torch.isfinite(x), x, 0.0) if fills else x)
            return made * self.ages if harms else made

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = model(x).tanh().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    tracked = anynan.torch.track(step, **split(options))
    return Run(tracked, lambda x: tracked(torch.from_numpy(x)))


def with_jax(
    *, fills: bool = False, keeps: bool = False, harms: bool = False, **options: Any
) -> Run:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    # The first step makes the ages wider: what comes back need not have the same dtype.
    kept = {"best": jnp.asarray(INF), "ages": jnp.full(2, NAN, jnp.float16)} if keeps else {}

    def step(state: Any, x: Any) -> Any:
        def loss_of(weight: Any) -> Any:
            made = (jnp.where(jnp.isfinite(x), x, 0.0) if fills else x) @ weight
            return jnp.tanh(made * state["ages"] if harms else made).mean()

        loss, slope = jax.value_and_grad(loss_of)(state["w"])
        after = {"w": state["w"] - 0.01 * slope}
        if keeps:
            after["best"] = jnp.where(loss > 100, loss, state["best"])
            after["ages"] = jnp.where(jnp.arange(2) == 0, x.mean(), state["ages"])
        return after, loss

    tracked = anynan.jax.track(step, **split(options))
    held = [{"w": jnp.ones((2, 1)), **kept}]

    def call(x: Any) -> Any:
        held[0], loss = tracked(held[0], jnp.asarray(x))
        return loss

    return Run(tracked, call)


def with_tensorflow(
    *, fills: bool = False, keeps: bool = False, harms: bool = False, **options: Any
) -> Run:
    tf = pytest.importorskip("tensorflow")
    base: Any = tf.Module

    class Model(base):
        def __init__(self) -> None:
            super().__init__()
            self.weight = tf.Variable(np.ones((2, 1), np.float32))
            if keeps:
                self.best = tf.Variable(np.float32(INF), trainable=False)
                self.ages = tf.Variable(np.full(2, NAN, np.float32), trainable=False)

        def __call__(self, x: Any) -> Any:
            if keeps:
                total = tf.reduce_sum(x)
                self.best.assign(tf.where(total > 100, total, self.best))
                self.ages.assign(tf.where([True, False], tf.reduce_mean(x), self.ages))
            made = (tf.where(tf.math.is_finite(x), x, 0.0) if fills else x) @ self.weight
            return made * self.ages if harms else made

    model = Model()

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(model(x)))
        model.weight.assign_sub(0.1 * tape.gradient(loss, model.weight))
        return loss

    tracked = anynan.tensorflow.track(tf.function(step) if keeps else step, **split(options))
    return Run(tracked, lambda x: tracked(tf.constant(x)))


def with_mlx(
    *, fills: bool = False, keeps: bool = False, harms: bool = False, **options: Any
) -> Run:
    mx = pytest.importorskip("mlx.core")
    from mlx import nn, optimizers

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 1)
            if keeps:
                self.best, self.ages = mx.array(INF), mx.full(2, NAN)
                self.freeze(recurse=False)

        def __call__(self, x: Any) -> Any:
            if keeps:
                self.best = mx.where(x.sum() > 100, x.sum(), self.best)
                self.ages[0] = mx.stop_gradient(x).mean()
            made = self.linear(mx.where(mx.isfinite(x), x, 0.0) if fills else x)
            return made * self.ages if harms else made

    model, optimizer = Model(), optimizers.SGD(0.01)

    def step(x: Any) -> Any:
        loss, slope = nn.value_and_grad(model, lambda x: mx.tanh(model(x)).mean())(x)
        optimizer.update(model, slope)
        return loss

    tracked = anynan.mlx.track(step, **split(options))
    return Run(tracked, lambda x: tracked(mx.array(x)))


KEEPERS = [with_torch, with_jax, with_tensorflow, with_mlx]
Made = Callable[..., Run]


@pytest.mark.parametrize("made", [with_numpy, *KEEPERS])
@pytest.mark.parametrize("level", ["layer", "operation"])
def test_missing_values_that_are_filled_in_raise_nothing(made: Made, level: str) -> None:
    with closing(made(fills=True, level=level)) as run:
        for _ in range(2):
            assert np.isfinite(float(run.call(GAPS)))
        assert run.tracker.count("bad") == 0
        came = [event for event in run.tracker.events if event.phase == "input"]
        assert [(event.severity, event.kind) for event in came] == [("suspect", "nan")]


@pytest.mark.parametrize("made", [with_numpy, *KEEPERS])
@pytest.mark.parametrize("replay", [True, False])
def test_missing_values_that_reach_the_loss_are_named(made: Made, replay: bool) -> None:
    with closing(made(replay=replay)) as run, pytest.raises(anynan.NonFiniteError) as caught:
        run.call(GAPS)
    event = caught.value.event
    assert (event.phase, event.kind, event.tensor) == ("input", "nan", "x")
    if replay:
        assert event.cause.tag == "bad_input"
        assert "2 of 3 rows are bad: 1, 2" in event.cause.evidence
        assert run.tracker.count("suspect") == 0


@pytest.mark.parametrize("made", KEEPERS)
@pytest.mark.parametrize("options", [{}, {"parameters": True}, {"level": "operation"}], ids=str)
def test_what_is_kept_and_does_no_harm_raises_nothing(made: Made, options: Any) -> None:
    with closing(made(keeps=True, **options)) as run:
        for _ in range(3):
            assert np.isfinite(float(run.call(WHOLE)))
        assert run.tracker.count("bad") == 0
        events = run.tracker.events
        noted = {str(event.parameter).rpartition(".")[2] for event in events}
        assert noted <= {"best", "ages"}
        assert {event.severity for event in events} <= {"suspect"}


@pytest.mark.parametrize("made", KEEPERS)
@pytest.mark.parametrize("replay", [True, False])
def test_what_is_kept_is_named_where_it_does_harm(made: Made, replay: bool) -> None:
    run = made(keeps=True, harms=True, replay=replay)
    with closing(run), pytest.raises(anynan.NonFiniteError) as caught:
        run.call(WHOLE)
    event = caught.value.event
    if replay or event.parameter is not None:
        assert event.phase == "parameter", str(caught.value)
        assert str(event.parameter).rpartition(".")[2] == "ages"
        assert event.kind == "nan"
    else:  # nothing is said to be the cause
        assert event.cause.tag == "unknown"
