"""A fix is tried before it is told: what the report claims of it is what really comes of it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import execute
from tensorflow.python.framework import op_def_library

import anynan
from tests.failing import failure
from tests.flat import split
from tests.keras_adapter import models
from tests.processes import python

pytestmark = pytest.mark.tier(2)

X = tf.constant([0.0, 1.0, 2.0])


def failing(run, *args):
    event = failure(run, *args)
    assert anynan.Event.from_json(event.to_json()) == event
    return event


def step_of(loss, **options):
    """Track a step that takes the gradient of a loss."""
    weight = tf.Variable(tf.ones(3))

    def step(x):
        with tf.GradientTape() as tape:
            value = loss(weight * x)
        return value, tape.gradient(value, weight)

    kind = options.pop("kind", "compiled")
    if kind != "eager":
        step = tf.function(step, jit_compile=kind == "xla")
    return anynan.tensorflow.track(step, **split(options))


def logs(x):
    return tf.reduce_sum(tf.math.log(x))


@pytest.mark.parametrize("kind", ["eager", "compiled", "xla"])
def test_what_the_report_says_of_the_fix_is_what_comes_of_it(kind):
    before = op_def_library._apply_op_helper, execute.record_gradient
    event = failing(step_of(logs, kind=kind), X)
    assert (op_def_library._apply_op_helper, execute.record_gradient) == before
    with tf.GradientTape() as tape:
        tape.watch(X)
        loss = tf.reduce_sum(tf.math.log(X + 1e-8))
    slope = tape.gradient(loss, X) * X  # of the weight, which is 1
    trial = event.tried
    assert (trial.repair, trial.outcome, trial.extent) == ("log(x + 1e-8)", "finite", "step")
    assert trial.loss == pytest.approx(float(loss), rel=1e-5)
    assert trial.gradient_norm == pytest.approx(float(tf.norm(slope)), rel=1e-5)


def test_no_function_of_the_programs_keeps_a_repair():
    inner = tf.function(lambda x: tf.math.log(x))
    event = failing(step_of(lambda x: tf.reduce_sum(inner(x))), X)
    assert event.tried.outcome == "finite"
    assert inner(X)[0] == -np.inf
    assert tf.math.log(X)[0] == -np.inf


def test_nothing_is_claimed_of_code_that_has_changed_since_it_was_traced():
    factor = 0.5

    def loss(x):
        return factor * logs(x)

    tracker = step_of(loss)
    tracker(X + 1)
    assert failing(tracker, X).tried is not None
    factor = 0.25
    assert failing(tracker, X).tried is None


@pytest.mark.parametrize("how", [{"jit_compile": False}, {"run_eagerly": True}, {}])
def test_in_fit(how):
    model = models.zero(models.compiled(models.functional(models.Log()), **how))
    weights = [w.copy() for w in model.get_weights()]
    with anynan.keras.track(model):
        event = failing(lambda: model.fit(*models.data(), verbose=0))
    trial = event.tried
    assert (trial.repair, trial.outcome, trial.extent) == ("log(x + 1e-8)", "finite", "step")
    assert None not in (trial.loss, trial.gradient_norm)
    for now, then in zip(model.get_weights(), weights, strict=True):
        assert (now == then).all()


def test_what_a_loss_scaler_makes_is_not_told_as_the_loss():
    keras.mixed_precision.set_global_policy("mixed_float16")
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2.0)
    model = models.functional(models.Log())
    model.compile(optimizer, "mse", jit_compile=False)
    model.get_layer("block").dense.set_weights([np.zeros((4, 4)), np.full(4, -1.0)])
    with anynan.keras.track(model):
        trial = failing(lambda: model.fit(*models.data(), verbose=0)).tried
    assert trial.outcome == "finite"
    assert trial.loss is trial.gradient_norm is None


LATE = """
import tensorflow as tf
import anynan

class Net(tf.Module):
    def __init__(self):
        self.weight = tf.Variable([1.0, 1.0])
    def __call__(self, x):
        return tf.math.sqrt(self.weight * x)

net = Net()
anynan.tensorflow.track(net)
import keras
optimizer = keras.optimizers.SGD(0.1)

@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(net(x))
    optimizer.apply_gradients(zip(tape.gradient(loss, [net.weight]), [net.weight]))

try:
    step(tf.constant([1.0, 0.0]))
except anynan.NonFiniteError:
    print(net.weight.numpy().tolist())
"""


def test_an_optimizer_that_is_imported_after_track_makes_no_bad_update(tmp_path):
    assert python("-c", LATE, cwd=tmp_path).stdout.strip() == "[1.0, 1.0]"
