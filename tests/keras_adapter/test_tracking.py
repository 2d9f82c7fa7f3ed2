"""Readings and reports of Keras models on TensorFlow, however TensorFlow runs them."""

import numpy as np
import pytest
import tensorflow as tf

import anynan
from tests.flat import split
from tests.keras_adapter import models
from tests.keras_adapter.models import Log, Root, compiled, data, line, positive, zero
from tests.keras_adapter.ways import HEAVY, LAYERS, WAYS, layers

pytestmark = pytest.mark.tier(2)


@pytest.mark.parametrize(
    ("way", "options"),
    [("graph", {"stats": "absmax"}), ("xla", {"replay": False}), ("eager", {"stats": "absmax"})],
)
def test_gradients_of_outputs_are_read_where_a_replay_cannot_tell(way, options):
    model = compiled(models.functional(Root(name="inner")), **WAYS[way])
    positive(model)
    with anynan.keras.track(model, **split(options)) as tracker:
        model.fit(*data(), verbose=0)
        assert layers(tracker, "backward") == set(LAYERS)
        if "stats" in options:
            assert all(reading.absmax is not None for reading in tracker.history.last())


FAULTS = {
    "forward": (Log, "block.inner", "log", "log_of_zero", "bad log"),
    "backward": (Root, "block.inner", "sqrt", "sqrt_gradient_at_zero", "bad sqrt"),
    "loss": (Root, None, "log", "log_of_negative", "bad loss"),
}


@pytest.mark.parametrize("phase", FAULTS)
@pytest.mark.parametrize("way", WAYS)
def test_every_layer_is_read_and_a_fault_is_found(way, phase):
    shift = tf.Variable(0.0)

    def loss(y, found):
        return tf.reduce_mean(tf.math.log(y - shift) * found)  # bad loss

    kind, layer, operation, cause, mark = FAULTS[phase]
    model = models.functional(kind(name="inner"))
    model.compile("sgd", loss if phase == "loss" else "mse", **WAYS[way])
    positive(model)
    tracker = anynan.keras.track(model)
    model.fit(*data(), verbose=0)
    assert layers(tracker, "forward") == set(LAYERS)
    # Where a second run can tell it, those with weights are read every step.
    assert layers(tracker, "backward") == set(LAYERS if way == "eager" else HEAVY)
    assert not tracker.events
    if phase == "loss":
        shift.assign(2.0)
    else:
        zero(model)
    before = model.get_weights()
    with pytest.raises(anynan.NonFiniteError) as caught:
        model.fit(*data(), verbose=0)
    event = caught.value.event
    assert (event.layer, event.phase, event.step) == (layer, phase, 1), str(caught.value)
    assert event.operation.name == operation
    file = __file__ if phase == "loss" else models.__file__
    assert event.operation.source.line == line(file, mark)
    assert event.cause.tag == cause
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
