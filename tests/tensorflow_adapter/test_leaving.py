"""An exception over a bad value takes the report along, and code that asks for values is no end."""

import gc
import weakref
from contextlib import nullcontext, suppress

import keras
import numpy as np
import pytest
import tensorflow as tf

import anynan
from tests.keras_adapter import models

pytestmark = pytest.mark.tier(2)


def raised(run):
    with pytest.raises(Exception) as caught:
        run()
    return caught.value


def check_numerics(x):
    return tf.debugging.check_numerics(x, "bad")


def assert_all_finite(x):
    tf.debugging.Assert(tf.reduce_all(tf.math.is_finite(x)), [x])
    return x


def python(x):
    assert np.isfinite(x.numpy()).all(), "bad"
    return x


def truth(x):
    if not tf.reduce_all(tf.math.is_finite(x)):
        raise ValueError(x)
    return x


COMPILED = [check_numerics, assert_all_finite]


@pytest.mark.parametrize("action", ["raise", "record"])
@pytest.mark.parametrize(
    ("way", "kind"),
    [(way, "compiled") for way in COMPILED]
    + [(way, "inside") for way in COMPILED]
    + [(way, "eager") for way in [*COMPILED, python, truth]],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_an_exception_over_a_bad_value_takes_the_report_along(way, kind, action):
    def step(x):
        return tf.reduce_sum(way(tf.math.log(x) * 2))

    if kind != "eager":
        inner = tf.function(step)
        step = inner if kind == "compiled" else lambda x: inner(x) + 1
    x = -tf.ones((2, 2))
    plain = raised(lambda: step(x))
    tracker = anynan.tensorflow.track(step, action=action)
    error = raised(lambda: tracker(x))
    event = tracker.events[0]
    assert (event.layer, event.operation.name, event.cause.tag) == (None, "log", "log_of_negative")
    assert event.operation.source.text.endswith("way(tf.math.log(x) * 2))")
    if action == "raise":
        assert type(error) is anynan.NonFiniteError
        assert type(error.__cause__) is type(plain)
    else:
        assert type(error) is type(plain)
        assert "log(-1.0)" in error.__notes__[-1]


class Checked(keras.layers.Layer):
    def call(self, x):
        return tf.debugging.check_numerics(tf.math.log(x - 10), "bad")


@pytest.mark.parametrize("eagerly", [True, False])
@pytest.mark.parametrize("action", ["raise", "warn"])
def test_an_exception_in_a_batch_of_fit(eagerly, action):
    model = models.compiled(models.functional(Checked(name="inner")), run_eagerly=eagerly)
    tracker = anynan.keras.track(model, action=action)
    error = raised(lambda: model.fit(*models.data(), verbose=0))
    event = tracker.events[0]
    assert (event.layer, event.operation.name) == ("block.inner", "log")
    if action == "raise":
        assert type(error) is anynan.NonFiniteError  # Keras drops what it was raised from
        assert "the InvalidArgumentError that the program raised" in str(error)
    else:
        assert "log(" in error.__notes__[-1]


def test_an_exception_in_a_models_own_call_gets_a_note():
    model = models.functional(Checked(name="inner"))
    anynan.keras.track(model)
    error = raised(lambda: model(models.data()[0]))
    assert isinstance(error, tf.errors.InvalidArgumentError)
    assert "layer   block.inner" in error.__notes__[-1]


def test_an_exception_over_something_else_stays_what_it_is():
    def step(x):
        mask = tf.where(tf.constant([True, False]), x, -np.inf)
        tf.nn.softmax(mask).numpy()
        raise StopIteration

    tracker = anynan.tensorflow.track(step)
    found = raised(lambda: tracker(tf.ones(2)))
    assert type(found) is StopIteration
    assert not getattr(found, "__notes__", ())
    assert not tracker.events


def test_what_a_dead_step_read_is_not_taken_for_the_next_ones():
    class Module(tf.Module):
        def __call__(self, x):
            return tf.math.log(x)

    module = Module()
    step = tf.function(lambda x: tf.debugging.check_numerics(module(x), "bad"))
    tracker = anynan.tensorflow.track(module, action="record")
    for value in (1.0, -1.0, 1.0, 1.0):
        with suppress(tf.errors.InvalidArgumentError):
            step(tf.fill((2,), value))
    assert [(event.step, event.operation.name) for event in tracker.events] == [(1, "log")]


def test_a_step_that_asks_for_values_is_run_again():
    weight = tf.Variable([1.0, 1.0])

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.math.log(weight * x))
        (slope,) = tape.gradient(loss, [weight])
        weight.assign_sub(0.1 * slope / max(float(tf.norm(slope)), 1.0))
        seen = [row.numpy() for row in x]
        return tf.reduce_sum(tf.math.sqrt(weight - 2 * len(seen))), int(loss)

    tracker = anynan.tensorflow.track(step, action="record")
    tracker(tf.ones(2))
    assert [event.operation.name for event in tracker.events] == ["sqrt"]


@pytest.mark.filterwarnings("ignore::anynan.AnynanWarning")
@pytest.mark.parametrize("action", ["raise", "skip"])
@pytest.mark.parametrize("kind", ["eager", "compiled", "xla"])
@pytest.mark.parametrize("own", [True, False])
def test_a_step_without_a_layer_leaves_its_weight_unspoilt(own, kind, action):
    weight = tf.Variable([1.0, 1.0])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([weight])

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.math.sqrt(weight * x))
        slopes = tape.gradient(loss, [weight])
        if own:
            weight.assign_sub(0.1 * slopes[0])
        else:
            optimizer.apply_gradients(zip(slopes, [weight], strict=True))
        return loss

    if kind != "eager":
        step = tf.function(step, jit_compile=kind == "xla")
    with anynan.tensorflow.track(step, action=action) as tracker:
        tracker(tf.constant([1.0, 1.0]))
        after = weight.numpy()
        assert after.tolist() == pytest.approx([0.95, 0.95])
        with pytest.raises(anynan.NonFiniteError) if action == "raise" else nullcontext():
            tracker(tf.constant([1.0, 0.0]))
        assert weight.numpy().tolist() == after.tolist()
        tracker(tf.constant([1.0, 1.0]))
        assert weight.numpy()[0] < after[0]


class Plain(tf.Module):
    def __init__(self):
        super().__init__()
        self.inner = tf.Module()
        self.weight = tf.Variable(tf.ones((4, 2)))

    def __call__(self, x):
        return tf.math.log(x @ self.weight)


class Compiled(Plain):
    __call__ = tf.function(Plain.__call__)


def built():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])


@pytest.mark.parametrize("make", [Plain, Compiled, built])
@pytest.mark.parametrize("taped", [False, True])
@pytest.mark.parametrize("value", [1.0, -1.0])
def test_no_model_that_the_program_drops_is_kept_alive(make, taped, value):
    model = make()
    tracker = anynan.tensorflow.track(model, action="record")
    gone = weakref.ref(model)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.fill((3, 4), value)))
    if taped:
        tape.gradient(loss, model.trainable_variables)
    del model, tape, loss
    gc.collect()
    assert gone() is None
    tracker.remove()
    assert (len(tracker.events) == 1) == (value < 0 and make is not built)
