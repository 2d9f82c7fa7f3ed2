"""One run of TensorFlow, operation by operation, and the hunt that is built on it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import anynan
from anynan.tensorflow.observe import observe


class Training:
    def __init__(self):
        self.model = keras.Sequential(
            [keras.layers.Input((4,)), keras.layers.Dense(3, name="d"), keras.layers.Dropout(0.5)]
        )
        self.optimizer = keras.optimizers.Adam()
        self.count = 0

    def step(self, x):
        self.count += 1
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.math.log(tf.sigmoid(self.model(x, training=True))))
        weights = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    def state(self):
        held = [*self.model.variables, *self.optimizer.variables]
        return [x.numpy().copy() for x in held] + [np.array(self.count)]


@pytest.fixture
def training():
    made = Training()
    made.step(tf.ones((5, 4)))
    return made


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_is_shown_with_layers_lines_and_phases(training, compiled):
    step = tf.function(training.step) if compiled else training.step
    ops = []
    observe(step, (tf.ones((5, 4)),), {}, ops.append)
    (forward,) = [op for op in ops if (op.name, op.phase) == ("matmul", "forward")]
    assert forward.layer == "model.d"
    (log,) = [op for op in ops if (op.name, op.phase) == ("log", "loss")]
    assert "tf.math.log" in log.source.text
    gradients = [op for op in ops if op.phase == "backward" and op.forward == log.number]
    assert {op.name for op in gradients} == {"log"}
    assert any(op.phase == "optimizer" for op in ops)


def test_a_step_is_left_as_it_was(training):
    before = training.state()
    found = observe(training.step, (tf.ones((5, 4)),), {}, lambda op: None)
    assert found.error is None
    assert all(map(np.array_equal, before, training.state()))
    assert not tf.config.functions_run_eagerly()


def test_a_hunt_finds_a_row_of_zeros_and_a_saturated_sigmoid():
    def unit(x):
        return x / tf.norm(x, axis=-1, keepdims=True)

    x = tf.constant([[1.0, -2.0], [-0.5, 3.0]])
    (found,) = [f for f in anynan.stress(unit, x, budget=20).findings if "zero" in f.words]
    assert found.event.operation.name == "divide"

    def loss(p):
        return -tf.reduce_mean(tf.math.log(tf.sigmoid(p)))

    report = anynan.stress(loss, tf.constant([0.1, -2.0]), domain=(-200, 200), budget=20)
    assert report.findings[0].event.cause.tag == "log_of_zero"

    report = anynan.stress(lambda x: tf.reduce_sum(tf.sqrt(tf.reduce_sum(x * x, 1))), x, budget=20)
    sloped = [f for f in report.findings if f.group == "sloped"]
    assert [f.event.operation.name for f in sloped] == ["sqrt"]
