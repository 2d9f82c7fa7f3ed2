"""The replay goes into nested functions and recurrent layers; other loops it says are closed."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import anynan
from tests.failing import failure
from tests.keras_adapter.models import line

pytestmark = pytest.mark.tier(2)


@tf.function
def outer(x):
    if tf.reduce_sum(x) > 1000:
        x = x / 2
    return tf.reduce_sum(inner(x) * 2)


@tf.function
def inner(x):
    return tf.math.log(x)  # bad log


class Root(tf.Module):
    @tf.function
    def __call__(self, x):
        return tf.reduce_sum(tf.sqrt(x))  # bad sqrt


def gradient(fn, *, compiled):
    weight = tf.Variable(1.0)

    def step(x):
        with tf.GradientTape() as tape:
            loss = fn(x * weight)
        return loss, tape.gradient(loss, weight)

    return tf.function(step, jit_compile=compiled) if compiled is not None else step


@pytest.mark.parametrize("compiled", [None, False, True], ids=["eager", "graph", "xla"])
@pytest.mark.parametrize(
    ("make", "bad", "phase", "cause"),
    [
        (lambda: outer, -2.0, "loss", "log_of_negative"),
        (Root, 0.0, "backward", "sqrt_gradient_at_zero"),
    ],
)
def test_nested_functions_are_looked_into(make, bad, phase, cause, compiled):
    step = anynan.tensorflow.track(gradient(make(), compiled=compiled))
    event = failure(step, tf.constant([1.0, bad]))
    assert (event.phase, event.cause.tag, event.notes) == (phase, cause, ())
    assert event.operation.source.line == line(__file__, f"bad {event.operation.name}")


class Cell(keras.layers.Layer):
    state_size = output_size = 2

    def call(self, x, states):
        (h,) = states
        h = tf.math.log(x) + 0.5 * h  # bad cell
        return h, [h]


@pytest.mark.parametrize("eagerly", [True, False])
def test_an_iteration_of_a_recurrent_layer_is_named(eagerly):
    inputs = keras.Input((5, 2))
    layers = [keras.layers.RNN(Cell(name="cell"), name="rnn"), keras.layers.Dense(1, name="last")]
    model = keras.Sequential([inputs, *layers])
    model.compile("sgd", "mse", jit_compile=False, run_eagerly=eagerly)
    x, y = np.ones((4, 5, 2), "float32"), np.ones((4, 1), "float32")
    with anynan.keras.track(model):
        model.fit(x, y, verbose=0)
        x[2, 3] = -1
        event = failure(model.fit, x, y, verbose=0)
    assert (event.layer, event.phase) == ("rnn.cell", "forward")
    assert event.operation.source.line == line(__file__, "bad cell")
    assert (event.iteration, event.call) == (3, 0)
    assert not layers[0].unroll


def loops(x):
    while tf.reduce_max(x) < 10:
        x = tf.math.log(x)  # bad while
    return tf.reduce_sum(x)


def branches(x):
    if tf.reduce_sum(x) < 10:
        x = tf.math.log(x)  # bad if
    return tf.reduce_sum(x)


def calls(x):
    taken = tf.cond(tf.reduce_sum(x) < 10, lambda: x - 0.5, lambda: x)
    turn = lambda i, x: (i + 1, tf.math.log(x))  # noqa: E731  # bad call
    return tf.reduce_sum(tf.while_loop(lambda i, _: i < 2, turn, (0, taken))[1])


def maps(x):
    return tf.reduce_sum(tf.map_fn(lambda row: tf.math.log(row) * 2, x))  # bad map


@pytest.mark.parametrize(
    ("step", "mark"),
    [
        (loops, "bad while"), (branches, "bad if"), (calls, "bad call"), (maps, "bad map"),
    ],
)  # fmt: skip
def test_loops_and_branches_of_a_graph_are_looked_into(step, mark):
    event = failure(anynan.tensorflow.track(tf.function(step)), tf.constant([0.5, -2.0, 3.0]))
    assert (event.operation.name, event.operation.source.line) == ("log", line(__file__, mark))


def test_a_late_turn_of_a_long_loop_is_looked_into_with_the_weights_that_the_step_began_with():
    weight = tf.Variable(1.0)

    @tf.function
    def train(x):
        with tf.GradientTape() as tape:
            total = x
            for i in tf.range(400):
                total += weight / tf.cast(tf.abs(i - 300), tf.float32)  # bad turn
        weight.assign_sub(tape.gradient(total, weight))
        return total

    event = failure(anynan.tensorflow.track(train), tf.constant(0.0))
    assert event.operation.name == "divide"
    assert event.operation.source.line == line(__file__, "bad turn")
    assert not event.notes


def test_what_calls_the_programs_own_functions_is_said_to_be_closed():
    def calling(x):
        for _ in tf.range(3):
            x = tf.numpy_function(lambda x: x, [tf.math.log(x)], tf.float32)
            x = tf.ensure_shape(x, [2])
        return x

    event = failure(anynan.tensorflow.track(tf.function(calling)), tf.constant([500.0, -2.0]))
    assert event.operation.name == "while"
    assert any("the inside of a loop of the graph is not watched" in n for n in event.notes)
