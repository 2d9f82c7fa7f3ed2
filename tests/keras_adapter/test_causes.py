"""Causes in the training of a Keras model: data, weights, updates, loss scales."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import anynan
from tests.failing import failure
from tests.flat import split
from tests.keras_adapter import models


def caught(model, *args, fit=False, **options):
    with anynan.keras.track(model, **split(options)), pytest.raises(anynan.AnomalyError) as error:
        if fit:
            model.fit(*args, batch_size=1, shuffle=False, verbose=0)
        else:
            model.predict(*args, verbose=0)
    return error.value.event


def linear(**options):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(jit_compile=False, **options)
    model.set_weights([np.ones((2, 1), "float32")])
    return model


def test_running_statistics():
    norm = keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((2,)), norm])
    with anynan.keras.track(model):
        norm.moving_mean.assign(np.full(2, np.nan))
        event = failure(model.predict, np.ones((1, 2)), verbose=0)
    assert event.cause.tag == "running_statistics_bad"


@pytest.mark.tier(2)
def test_a_learning_rate_that_is_too_high():
    model = linear(optimizer=keras.optimizers.SGD(1e4), loss="mse")
    event = caught(model, np.ones((40, 2)), np.zeros((40, 1)), fit=True)
    assert event.cause.tag in ("learning_rate_divergence", "exploding_gradient"), event


@pytest.mark.tier(2)
def test_a_value_beyond_the_limit():
    policy = anynan.Policy(large=1e6, bad=("large",))
    event = caught(linear(), np.full((1, 2), 1e7, "float32"), policy=policy)
    assert event.cause.tag == "beyond_limit"


@pytest.mark.parametrize("scale", [1.0, pytest.param(2.0**30, marks=pytest.mark.tier(2))])
def test_a_loss_scale_that_does_not_help(scale):
    keras.mixed_precision.set_global_policy("mixed_float16")
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), scale)

    def loss(y, found):
        return tf.reduce_mean(found) * (1e30 if scale == 1 else 1.0)

    model = linear(optimizer=optimizer, loss=loss)
    policy = anynan.Policy(scale_streak=2)
    event = caught(model, np.ones((8, 2)), np.zeros((8, 1)), fit=True, policy=policy)
    assert event.phase == "backward"
    assert event.cause.tag == ("loss_scale_floor" if scale == 1 else "loss_scale_too_high"), event


def spoilt(optimizer, *, dtype="float32", size=1.0, **options):
    """Train until an update from finite gradients spoils a weight."""
    keras.config.set_dtype_policy(dtype)  # the fixture puts it back
    model = linear(optimizer=optimizer, loss=lambda y, found: tf.reduce_mean(found))
    return caught(model, np.full((4, 2), size), np.zeros((4, 1)), fit=True, **options)


@pytest.mark.parametrize("parameters", [True, pytest.param(False, marks=pytest.mark.tier(2))])
def test_an_update_that_is_too_large(parameters):
    event = spoilt(keras.optimizers.SGD(1e25), size=1e15, parameters=parameters)
    assert (event.phase, event.kind, event.step) == ("optimizer", "neginf", 0), event
    assert (event.cause.tag, event.parameter) == ("optimizer_step_too_large", "dense.kernel")
    assert ("the gradient reached 1e+15" in event.cause.evidence) == parameters


class Warmup(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1 / keras.ops.cast(step, "float32")


@pytest.mark.parametrize(("rate", "value"), [(np.nan, "nan"), (Warmup(), "inf")])
@pytest.mark.parametrize("parameters", [True, False])
def test_a_learning_rate_that_is_not_finite(rate, value, parameters):
    event = spoilt(keras.optimizers.SGD(rate), parameters=parameters)
    assert (event.phase, event.parameter) == ("optimizer", "dense.kernel"), event
    assert event.cause.tag == "optimizer_setting_bad"
    assert event.cause.evidence == f"learning_rate is {value}"


def test_an_optimizer_state_that_is_bad():
    model = linear(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    model.optimizer.build(model.trainable_variables)
    model.optimizer.variables[-1].assign(np.full((2, 1), np.nan))
    event = caught(model, np.ones((4, 2)), np.zeros((4, 1)), fit=True, parameters=True)
    assert (event.phase, event.cause.tag) == ("optimizer", "optimizer_state_bad"), event


@pytest.mark.tier(2)
def test_an_epsilon_that_rounds_to_zero():
    optimizer = keras.optimizers.Adam(1e-3, epsilon=1e-8)
    event = spoilt(optimizer, dtype="float16", size=1e-5, parameters=True)
    assert event.cause.tag == "optimizer_epsilon_underflow", event


@pytest.mark.tier(2)
def test_a_gradient_that_vanishes_or_jumps():
    policy = anynan.Policy(vanishing=1e-6, bad=("vanishing",))
    event = spoilt(keras.optimizers.SGD(0.1), size=1e-9, policy=policy)
    assert event.cause.tag == "vanishing_gradient"
    model = linear(optimizer="sgd", loss=lambda y, found: tf.reduce_mean(found))
    x = np.ones((7, 2))
    x[6] = 100
    event = caught(model, x, x[:, :1], fit=True, policy=anynan.Policy(spike=10, bad=("spike",)))
    assert (event.kind, event.cause.tag, event.step) == ("spike", "exploding_gradient", 6)


TABLE = np.full((4,), np.nan, "float32")


class Written(keras.layers.Layer):
    def __init__(self, how):
        super().__init__(name="inner")
        self.how = how

    def call(self, x):
        if self.how == "table":
            return x + keras.ops.convert_to_tensor(TABLE)  # bad table
        return tf.where(x > 0, x, np.nan)  # bad where


@pytest.mark.parametrize("how", ["table", "where"])
def test_nan_that_the_code_writes_is_no_batch(how):
    model = models.zero(models.compiled(models.functional(Written(how))))
    anynan.keras.track(model)
    event = failure(model.predict, models.data()[0], verbose=0)
    assert (event.layer, event.phase, event.kind) == ("block.inner", "forward", "nan")
    assert event.operation.source.line == models.line(__file__, f"bad {how}")
    text = "an array that held these values already is taken in here"
    if how == "where":  # no array with NaN among its numbers, which may be data
        text = "the code itself writes this NaN"
    assert event.cause.text.startswith(text)
    assert not event.notes


@pytest.mark.tier(2)
def test_a_variable_of_no_layer_is_no_batch():
    table = tf.Variable(TABLE, name="table")
    model = models.functional(keras.layers.Lambda(lambda x: x + table, name="inner"))
    anynan.keras.track(model)
    event = failure(model, models.data()[0])
    assert (event.layer, event.cause.tag) == ("block.inner", "bad_parameter")
    assert event.cause.evidence.startswith("table: ")
