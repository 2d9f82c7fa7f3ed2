"""Causes that TensorFlow produces beyond those of tests/conformance/recipes_causes.py.

A fault is a function of one weighted array; the line at fault ends in ``# bad``. The rows that
TensorFlow cannot produce stand in ``NOT_IN_TENSORFLOW``, each with its reason.
"""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

import anynan
from anynan._diagnosis.causes import RULES
from tests.conformance.recipes_causes import produced
from tests.keras_adapter import models

FAULTS = {}


def fault(tag, operation, x, *, phase="loss", kind="nan"):
    """List a function among the faults."""

    def add(fn):
        FAULTS[fn.__name__] = (fn, tag, operation, x, phase, kind)
        return fn

    return add


@fault("normalisation_of_inf", "batch_norm", [1, 2, 3, 4])
def norm_of_inf(x):
    image = tf.reshape(tf.where(x > 3, np.inf, x), (1, 2, 2, 1))
    return tf.reduce_sum(tf.compat.v1.nn.fused_batch_norm(image, [1.0], [0.0])[0])  # bad


@fault("norm_gradient_at_zero", "sqrt", [0, 0], phase="backward", kind="posinf")
def norm(x):
    return tf.norm(x)  # bad


def report(fn, x):
    weight = tf.Variable(1.0)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = fn(x * weight)
        return loss, tape.gradient(loss, weight)

    with pytest.raises(anynan.NonFiniteError) as caught:
        anynan.tensorflow.track(step)(tf.constant(x, "float32"))
    return caught.value


@pytest.mark.parametrize("name", FAULTS)
def test_the_cause_is_named_at_its_line(name):
    fn, tag, operation, x, phase, kind = FAULTS[name]
    error = report(fn, x)
    event = error.event
    assert event.operation is not None, str(error)
    found = (event.cause.tag, event.operation.name, event.phase, event.kind)
    assert found == (tag, operation, phase, kind), str(error)
    assert event.cause.evidence
    lines, first = inspect.getsourcelines(fn)
    marked = [first + i for i, line in enumerate(lines) if line.rstrip().endswith("# bad")]
    assert (event.operation.source.file, [event.operation.source.line]) == (__file__, marked)


def caught(model, *args, fit=False, **options):
    with anynan.keras.track(model, **options), pytest.raises(anynan.AnomalyError) as error:
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
    model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(name="norm")])
    with anynan.keras.track(model):
        norm = model.get_layer("norm")
        norm.moving_mean.assign(np.full(2, np.nan))
        with pytest.raises(anynan.NonFiniteError) as error:
            model.predict(np.ones((1, 2)), verbose=0)
    assert error.value.event.cause.tag == "running_statistics_bad"


def test_a_learning_rate_that_is_too_high():
    model = linear(optimizer=keras.optimizers.SGD(1e4), loss="mse")
    event = caught(model, np.ones((40, 2)), np.zeros((40, 1)), fit=True)
    assert event.cause.tag in ("learning_rate_divergence", "exploding_gradient"), event


def test_a_value_beyond_the_limit():
    policy = anynan.Policy(large=1e6, bad=("large",))
    event = caught(linear(), np.full((1, 2), 1e7, "float32"), policy=policy)
    assert event.cause.tag == "beyond_limit"


@pytest.mark.parametrize("scale", [1.0, 2.0**30])
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
    keras.config.set_dtype_policy(dtype)
    try:
        model = linear(optimizer=optimizer, loss=lambda y, found: tf.reduce_mean(found))
        event = caught(model, np.full((4, 2), size), np.zeros((4, 1)), fit=True, **options)
    finally:
        keras.config.set_dtype_policy("float32")
    return event


def test_a_weight_that_other_code_writes():
    model = linear(optimizer="adam", loss="mse")
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    tracker = anynan.keras.track(model)
    model.train_on_batch(x, y)
    kernel = model.weights[0].numpy()
    kernel.flat[0] = np.nan
    model.weights[0].assign(kernel)
    with pytest.raises(anynan.NonFiniteError) as caught:
        model.train_on_batch(x, y)
    assert caught.value.event.cause.tag == "weight_written"
    tracker.remove()


@pytest.mark.parametrize("parameters", [True, False])
def test_an_update_that_is_too_large(parameters):
    event = spoilt(keras.optimizers.SGD(1e25), size=1e15, parameters=parameters)
    assert (event.phase, event.kind, event.step) == ("optimizer", "neginf", 0), event
    assert event.cause.tag == "optimizer_step_too_large"
    assert event.parameter == "dense.kernel"
    assert ("the gradient reached 1e+15" in event.cause.evidence) == parameters


def test_a_learning_rate_that_is_not_finite():
    event = spoilt(keras.optimizers.SGD(np.nan), parameters=True)
    assert (event.phase, event.parameter) == ("optimizer", "dense.kernel"), event
    assert event.cause.tag == "optimizer_setting_bad"
    assert event.cause.evidence == "learning_rate is nan"


def test_an_optimizer_state_that_is_bad():
    model = linear(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    model.optimizer.build(model.trainable_variables)
    model.optimizer.variables[-1].assign(np.full((2, 1), np.nan))
    event = caught(model, np.ones((4, 2)), np.zeros((4, 1)), fit=True, parameters=True)
    assert (event.phase, event.cause.tag) == ("optimizer", "optimizer_state_bad"), event


def test_an_epsilon_that_rounds_to_zero():
    optimizer = keras.optimizers.Adam(1e-3, epsilon=1e-8)
    event = spoilt(optimizer, dtype="float16", size=1e-5, parameters=True)
    assert event.cause.tag == "optimizer_epsilon_underflow", event


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
HELD = tf.constant(TABLE)


class Written(keras.layers.Layer):
    def __init__(self, how):
        super().__init__(name="inner")
        self.how = how

    def call(self, x):
        if self.how == "scalar":
            return x * float("nan")  # bad scalar
        if self.how == "table":
            return x + keras.ops.convert_to_tensor(TABLE)  # bad table
        if self.how == "closure":
            return x + HELD  # bad closure
        return tf.where(x > 0, x, np.nan)  # bad where


@pytest.mark.parametrize("how", ["scalar", "table", "closure", "where"])
@pytest.mark.parametrize("run", ["fit", "predict", "call"])
def test_nan_that_the_code_writes_is_no_batch(how, run):
    model = models.compiled(models.functional(Written(how)))
    models.zero(model)
    anynan.keras.track(model)
    x, y = models.data()
    with pytest.raises(anynan.NonFiniteError) as caught:
        if run == "fit":
            model.fit(x, y, verbose=0)
        elif run == "predict":
            model.predict(x, verbose=0)
        else:
            model(x)
    event = caught.value.event
    assert (event.layer, event.phase, event.kind) == ("block.inner", "forward", "nan")
    assert event.operation.source.line == models.line(__file__, f"bad {how}")
    text = "the code itself writes this NaN"
    if how in ("table", "closure"):  # an array with NaN among its numbers may be data
        text = "an array that held these values already is taken in here"
    assert event.cause.text.startswith(text)
    assert not event.notes


def test_a_variable_of_no_layer_is_no_batch():
    table = tf.Variable(TABLE, name="table")
    model = models.functional(keras.layers.Lambda(lambda x: x + table, name="inner"))
    anynan.keras.track(model)
    with pytest.raises(anynan.NonFiniteError) as caught:
        model(models.data()[0])
    event = caught.value.event
    assert (event.layer, event.cause.tag) == ("block.inner", "bad_parameter")
    assert event.cause.evidence.startswith("table: ")


NOT_IN_TENSORFLOW = {
    "overwritten_input": "tensors of TensorFlow cannot be written to",
    "uninitialised_memory": "every tensor of TensorFlow's public functions is filled",
    "logit_of_zero_or_one": "there is no logit: its division or logarithm is named",
    "logit_gradient_at_bound": "there is no logit: its division or logarithm is named",
    "binary_cross_entropy_saturated": "Keras's loss clips, and TensorFlow's takes logits",
    "kl_div_domain": "Keras's loss clips; by hand, its logarithm is named",
    "variance_of_one": "every variance divides by n; a batch norm of one value by 1",
    "cdist_gradient_at_zero": "a distance is a square root of a sum: norm_gradient_at_zero",
    "eigen_gradient_degenerate": "the gradient takes 1/0 for 0 between equal eigenvalues",
    "product_gradient_at_zero": "prod has no division in its gradient, cumprod divides 0/0 to 0",
    "lgamma_gradient_at_pole": "the forward result is +Inf already, which is lgamma_pole",
    "index_out_of_range": "an index out of range raises, or reads a 0",
    "optimizer_state_overflow": "an infinite second moment makes the update 0, so no weight goes "
    "bad of it",
    "ctc_target_too_long": "Keras's loss and TensorFlow's stay finite",
    "growth_without_training": "sizes are read where gradients are",
    "log_gradient_at_zero": "a logarithm's result is -Inf already, and xlogy takes 0/0 for 0",
}
ELSEWHERE = {  # produced by the tests of this folder's other files
    "bad_input", "bad_label", "bad_parameter", "sqrt_gradient_at_zero",
}  # fmt: skip
HERE = {
    "running_statistics_bad", "learning_rate_divergence", "exploding_gradient", "beyond_limit",
    "loss_scale_floor", "loss_scale_too_high", "optimizer_step_too_large",
    "weight_written",
    "optimizer_state_bad", "optimizer_epsilon_underflow", "optimizer_setting_bad",
    "vanishing_gradient",
}  # fmt: skip


def test_every_row_is_produced_or_has_its_reason():
    made = {tag for _, tag, *_ in FAULTS.values()} | HERE | ELSEWHERE
    made |= produced("tensorflow") | set(NOT_IN_TENSORFLOW)
    assert {rule.tag for rule in RULES} == made
