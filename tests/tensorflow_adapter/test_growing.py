"""Models that are not built, or not there, when tracking begins."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import anynan
from tests.keras_adapter.models import line
from tests.tiers import first

X = tf.ones((2, 3))


class Plain(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4, name="dense")

    def call(self, x):
        return self.dense(x)


@pytest.mark.parametrize("action", first(1, ["raise", "warn"]))
@pytest.mark.filterwarnings("ignore::anynan.AnynanWarning")
def test_a_step_that_builds_its_model_and_returns_nothing_is_read(action):
    model, optimizer = Plain(), keras.optimizers.Adam()

    @anynan.tensorflow.track(action=action)
    @tf.function
    def step(x):  # as in TensorFlow's own tutorials
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.sqrt(model(x) * 0))  # bad root
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    if action == "raise":
        with pytest.raises(anynan.NonFiniteError):
            step(X)
        assert np.isfinite(model.dense.kernel.numpy()).all()
    else:
        for _ in range(3):
            step(X)
    (event,) = step.events  # what comes later is a consequence
    assert (event.step, event.operation.name) == (0, "sqrt")
    assert event.operation.source.line == line(__file__, "bad root")


def test_weights_that_only_an_object_holds_are_read():
    class Held:
        weight = tf.Variable([0.0, 1.0])

    held = Held()

    @anynan.tensorflow.track(action="record")
    def step(owner):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.sqrt(owner.weight))
        owner.weight.assign_sub(tape.gradient(loss, owner.weight))

    step(held)
    assert step.events[0].operation.name == "sqrt"


@pytest.mark.tier(2)
def test_rows_that_run_out_in_the_second_trace_of_a_function_break_nothing():
    """What makes variables, as an optimizer does, is traced twice, the second time without any."""
    net = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4) for _ in range(20))])
    optimizer = keras.optimizers.Adam()

    @tf.function
    def train(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(net(x) ** 2)
        weights = net.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    with anynan.keras.track(net, level="layer", action="record") as tracker:
        train(tf.ones((2, 4)))
        train(tf.fill((2, 4), float("nan")))
    assert [event.phase for event in tracker.events] == ["input"]
