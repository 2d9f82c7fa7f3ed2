"""A tf.Module, a tf.function, and tensors of any kind; what a graph cannot tell is said."""

import contextlib
import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import anynan
from anynan.tensorflow.session.seams import SEAMS
from tests.failing import failure
from tests.keras_adapter import models
from tests.keras_adapter.models import Log

pytestmark = pytest.mark.tier(2)


def test_graph_that_was_traced_before_is_said():
    model = models.functional(Log(name="inner"))
    call = tf.function(model)
    call(tf.ones((2, 4)))
    with anynan.keras.track(model) as tracker:
        with pytest.warns(anynan.AnynanWarning, match="was traced before track"):
            call(tf.ones((2, 4)))
        call(tf.ones((2, 4)))
        assert len(tracker.notes) == 1


def test_gradients_for_something_else_are_left_alone():
    model = models.functional(keras.layers.Dense(4, name="inner"))
    x = tf.ones((2, 4))
    with anynan.keras.track(model) as tracker:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            out = model(x)
        assert tape.gradient(out, x).shape == (2, 4)
        assert tape.batch_jacobian(out, x).shape == (2, 1, 4)
        assert isinstance(tape.gradient(out, {"w": model.trainable_variables}), dict)
    assert not tracker.events


def test_direct_checks():
    anynan.check({"words": tf.constant(["a"]), "v": tf.Variable(1)})
    with pytest.raises(TypeError, match="inside of a tf.function has none yet"):
        tf.function(anynan.check)(tf.ones(2))


def test_what_the_graph_optimizer_alone_does_is_said():
    weight = tf.Variable([1.0])

    @anynan.tensorflow.track
    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            scores = x * weight * 3e38
            loss = tf.reduce_sum(tf.nn.softmax(scores) * tf.nn.softmax(scores))
        return tape.gradient(loss, weight)

    with step, pytest.raises(anynan.NonFiniteError, match="whether the optimizer makes the fault"):
        step(tf.constant([[1.0, 0.0], [0.5, 0.25]]))


def test_a_tracked_function_that_is_dropped_watches_no_longer():
    layer = keras.layers.Dense(2)

    def train(**options):
        step = anynan.tensorflow.track(lambda x: tf.reduce_sum(tf.math.log(layer(x))), **options)
        with contextlib.suppress(anynan.NonFiniteError):
            step(-tf.ones((1, 2)))

    for action in ("record", "raise"):
        train(action=action)
        gc.collect()
        assert not SEAMS.sessions
        assert not SEAMS.layers


def test_a_module_that_branches_on_a_tensor_is_converted_as_without():
    class Branching(tf.Module):
        def __call__(self, x):
            if tf.reduce_sum(x) > 0:  # of a tensor: autograph converts it
                x = x * 2.0
            return x

    module = Branching()
    with anynan.tensorflow.track(module, action="record"):
        run = tf.function(lambda x: module(x))
        np.testing.assert_array_equal(run(tf.ones(2)), [2.0, 2.0])
        np.testing.assert_array_equal(run(-tf.ones(2)), [-1.0, -1.0])


def test_strings_empty_batches_and_ragged_and_sparse_tensors_are_looked_at():
    class Logs(tf.Module):
        def __call__(self, x):
            if isinstance(x, tf.SparseTensor):
                return tf.sparse.map_values(tf.math.log, x)
            return tf.strings.length(x) if x.dtype == tf.string else tf.math.log(x)

    module = Logs()
    with anynan.tensorflow.track(module):
        for good in (tf.constant(["a", "bc"]), tf.zeros((0, 4)), tf.ragged.constant([[1.0], []])):
            module(good)
        sparse = tf.SparseTensor([[0, 1], [1, 0]], [1.0, -2.0], (2, 2))
        for bad in (tf.ragged.constant([[1.0], [-2.0, 3.0]]), sparse):
            event = failure(module, bad)
            assert (event.kind, event.phase) == ("nan", "forward")


def test_numbers_that_are_drawn_anew_are_said():
    class Noisy(tf.Module):
        @tf.function
        def __call__(self, x):
            return tf.math.log(x - tf.random.uniform(x.shape, 2.0, 3.0))

    module = Noisy()
    with anynan.tensorflow.track(module):
        event = failure(module, tf.ones(3))
    assert event.operation.name == "log"
    assert any("RandomUniform drew other numbers in the second run" in n for n in event.notes)
