"""A second run of a step: from the state of the first, believed only where it saw the same."""

import ctypes

import keras
import numpy as np
import pytest
import tensorflow as tf

import anynan
from tests.keras_adapter import models

pytestmark = pytest.mark.tier(2)


NUMBERS = [1.0, -1.0, 0.0, 5.0]


def known_by_its_time(event):
    """Tell whether the logarithm is named, which ran outside of a graph and cannot run again."""
    assert event.operation is None or event.operation.name == "log"
    told = any("[made-before]" in note for note in event.notes)
    assert told is (event.operation is not None)
    return told


@pytest.mark.parametrize("compiled", [True, False])
def test_no_batch_is_eaten(compiled):
    batches = iter(tf.data.Dataset.from_tensor_slices(NUMBERS))

    def step():
        return tf.math.log(next(batches))

    step = anynan.tensorflow.track(tf.function(step) if compiled else step, action="record")
    step()
    step()
    (event,) = step.events
    assert any("from an iterator" in note for note in event.notes)
    assert known_by_its_time(event) is not compiled
    assert [float(next(batches)) for _ in range(2)] == [0, 5]


SOURCES = {
    "arrays": lambda: tf.data.Dataset.from_tensor_slices(NUMBERS).as_numpy_iterator(),
    "generated": lambda: (x for x in NUMBERS),
}


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("source", SOURCES)
def test_a_second_run_gets_the_same_items(source, given):
    batches = SOURCES[source]()
    args = [batches] if given else []

    def take(*source):
        return tf.math.log(tf.constant(3.0) * next(source[0] if source else batches))

    step = anynan.tensorflow.track(take, action="record")
    step(*args)
    step(*args)
    (event,) = step.events
    assert (event.operation.name, event.operation.inputs[0].min) == ("log", -3)
    assert [float(x) for x in batches] == [0, 5]


def test_what_is_not_pythons_own_iterator_is_not_taken_from():
    class Source:
        def __init__(self):
            self._items = (iter([2.0, -1.0, 5.0]),)

        def draw(self):
            return next(self._items[0])

    source = Source()
    step = anynan.tensorflow.track(lambda: tf.math.log(source.draw()), action="record")
    step()
    step()
    (event,) = step.events
    assert known_by_its_time(event)
    assert any("keep it in a list" in note for note in event.notes)
    assert source.draw() == 5


def test_variables_and_arrays_are_what_they_were():
    seed = keras.random.SeedGenerator(3)
    count, table = keras.Variable(0), np.zeros(2)

    class Trainer:
        def __init__(self):
            self.held = [table]

        def step(self, x):
            self.held[0][0] += 1
            count.assign_add(1)
            made = tf.math.log(x - 10) if self.held[0][0] == 1 else tf.sqrt(x - 20)
            return made + 0 * keras.random.uniform((), seed=seed) + 0 * tf.cast(count, x.dtype)

    trainer = Trainer()
    step = anynan.tensorflow.track(trainer.step, action="record")
    step(tf.ones(3))
    assert step.events[0].operation.name == "log"
    assert (table[0], int(count), trainer.held[0] is table) == (1, 1, True)


def test_a_layer_is_not_unmade():
    class Late(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(name="scale", shape=shape[-1:], initializer="ones")
            self.built = True

        def call(self, x):
            return tf.math.log(self.scale * 0 - 1 + 0 * x)

    layer = Late()
    step = anynan.tensorflow.track(lambda x: layer(x), action="record")
    step(tf.ones((2, 3)))
    assert step.events[0].operation.name == "log"
    assert len(layer.weights) == 1


def test_a_second_run_that_differs_is_not_believed():
    calls = ctypes.c_long()  # where nobody looks

    class Layer(keras.layers.Layer):
        def call(self, x):
            calls.value += 1
            return tf.math.log(x - 10) if calls.value == 1 else 1 / (x * 0)

    model = models.functional(Layer(name="inner"))
    calls.value = 0
    with anynan.tensorflow.track(model, action="record") as tracker:
        model(models.data()[0])
    (event,) = [event for event in tracker.events if event.severity == "bad"]
    assert (event.layer, event.kind, event.operation) == ("block.inner", "nan", None)
    assert any("saw other values than the first" in note for note in event.notes)


def test_the_gradient_of_a_gradient_names_its_operation():
    """The norm of a gradient, as a penalty: the gradient's own operation is a forward one then."""
    net = keras.Sequential(
        [keras.Input((6, 6, 1)), keras.layers.Conv2D(2, 3), keras.layers.LeakyReLU()]
    )

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                out = net(x)
            slope = inner.gradient(out, x)
            loss = tf.reduce_mean(tf.sqrt(tf.reduce_sum(tf.square(slope * 0), axis=[1, 2, 3])))
        return tape.gradient(loss, net.trainable_variables)

    with anynan.tensorflow.track(step, action="record") as tracker:
        tracker(tf.ones((2, 6, 6, 1)))
    event = tracker.events[0]
    assert (event.operation.name, event.cause.tag) == ("sqrt", "norm_gradient_at_zero")
