"""Loops of one's own around a model, with a tape, in each way TensorFlow runs them."""

from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf

import anynan
from anynan._steps.tracked import inside
from tests.failing import failure
from tests.keras_adapter import models
from tests.keras_adapter.models import WAYS, Root, data, layers, line, positive, zero
from tests.keras_backends.models import LAYERS, NAMES

pytestmark = pytest.mark.tier(2)


def loop(model, way, optimizer):
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    if way == "eager":
        return step
    return tf.function(step, jit_compile=way == "xla")


@pytest.mark.parametrize("way", WAYS)
def test_loop_of_ones_own(way):
    model = positive(models.functional(Root(name="inner")))
    step = loop(model, way, keras.optimizers.SGD(0.01))
    x, y = data()
    tracker = anynan.tensorflow.track(model)
    for _ in range(3):
        step(tf.constant(x), tf.constant(y))
    assert len(tracker.history) == 3
    assert layers(tracker, "forward") == set(LAYERS)
    assert layers(tracker, "backward") == set(LAYERS if way == "eager" else NAMES)
    assert not tracker.events
    zero(model)
    before = model.get_weights()
    event = failure(step, tf.constant(x), tf.constant(y))
    assert (event.layer, event.phase, event.step) == ("block.inner", "backward", 3), event.notes
    assert event.operation.source.line == line(models.__file__, "bad sqrt")
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_one_write_for_each_phase_and_one_read_for_each_step(monkeypatch):
    model = positive(models.functional(Root(name="inner")))
    step = loop(model, "graph", keras.optimizers.SGD(0.01))
    x, y = (tf.constant(part) for part in data())
    with anynan.keras.track(model) as tracker:
        step(x, y)
        assert step.experimental_get_tracing_count() == 1
        nodes = step.get_concrete_function(x, y).graph.get_operations()
        assert [n.type for n in nodes].count("ResourceStridedSliceAssign") == 2
        counts = Counter(n.type for n in nodes if n.name.startswith("anynan"))
        # The input, each layer's output, the loss and the gradient of each weight.
        read = 1 + len(LAYERS) + 1 + len(model.weights)
        assert counts["Min"] == counts["Max"] == counts["L2Loss"] == read
        (buffer,) = inside(tracker).judge.adapter._buffers.held
        (part,) = buffer.parts
        reads = []
        read = tf.raw_ops.ReadVariableOp

        def count(resource, dtype):
            reads.append(resource is part.rows.handle)
            return read(resource=resource, dtype=dtype)

        monkeypatch.setattr(tf.raw_ops, "ReadVariableOp", count)
        for _ in range(3):
            step(x, y)
        assert reads == [True] * 3
