"""Readings and reports of Keras models on TensorFlow, however they are trained."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import anynan
from tests.flat import split
from tests.keras_adapter import models
from tests.keras_adapter.models import Log, Root, compiled, data, line, positive, zero
from tests.keras_adapter.ways import HEAVY, LAYERS, WAYS, layers

pytestmark = pytest.mark.tier(2)


CASES = [(kind, "graph") for kind in models.KINDS] + [
    ("functional", "xla"),
    ("functional", "eager"),
]


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_fit_reads_every_layer_forward_and_backward(kind, way):
    model = compiled(models.KINDS[kind](Root(name="inner")), **WAYS[way])
    positive(model)
    with anynan.keras.track(model) as tracker:
        model.fit(*data(), batch_size=4, epochs=2, verbose=0)
        assert layers(tracker, "forward") == set(LAYERS)
        assert layers(tracker, "backward") == set(LAYERS if way == "eager" else HEAVY)
        assert len(tracker.history) == 4
        assert {r.site.parameter for r in tracker.history.last() if r.site.parameter} == {
            "first.kernel", "first.bias", "block.dense.kernel", "block.dense.bias",
            "last.kernel", "last.bias",
        }  # fmt: skip
    assert not tracker.events
    assert not tracker.notes


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{"stats": "absmax"}, {"replay": False}])
def test_gradients_of_outputs_are_read_where_a_replay_cannot_tell(way, options):
    model = compiled(models.functional(Root(name="inner")), **WAYS[way])
    positive(model)
    with anynan.keras.track(model, **split(options)) as tracker:
        model.fit(*data(), verbose=0)
        assert layers(tracker, "backward") == set(LAYERS)
        known = [r for r in tracker.history.last() if r.absmax is not None]
        if "stats" in options:
            assert len(known) == len(tracker.history.last())


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_forward_fault_is_found_in_fit(kind, way):
    model = compiled(models.KINDS[kind](Log(name="inner")), **WAYS[way])
    positive(model)
    anynan.keras.track(model)
    model.fit(*data(), verbose=0)
    zero(model)
    before = model.get_weights()
    with pytest.raises(anynan.NonFiniteError) as caught:
        model.fit(*data(), verbose=0)
    event = caught.value.event
    assert (event.backend, event.layer, event.phase) == ("tensorflow", "block.inner", "forward")
    assert (event.kind, event.step) == ("neginf", 1), str(caught.value)
    assert event.operation.name == "log"
    assert event.operation.source.file == models.__file__
    assert event.operation.source.line == line(models.__file__, "bad log")
    assert event.cause.tag == "log_of_zero"
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("way", WAYS)
def test_backward_fault_is_found_in_fit(way):
    model = compiled(models.functional(Root(name="inner")), **WAYS[way])
    zero(model)
    anynan.keras.track(model)
    before = model.get_weights()
    with pytest.raises(anynan.NonFiniteError) as caught:
        model.fit(*data(), verbose=0)
    event = caught.value.event
    assert (event.layer, event.phase, event.operation.name) == ("block.inner", "backward", "sqrt")
    assert event.operation.source.line == line(models.__file__, "bad sqrt")
    assert event.cause.tag == "sqrt_gradient_at_zero"
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("way", WAYS)
def test_fault_inside_the_loss(way):
    def loss(y, found):
        return tf.reduce_mean(tf.math.log(y - 2.0) * found)  # bad loss

    model = models.functional(keras.layers.Dense(4, name="inner"))
    model.compile(optimizer="sgd", loss=loss, **WAYS[way])
    anynan.keras.track(model)
    with pytest.raises(anynan.NonFiniteError) as caught:
        model.fit(*data(), verbose=0)
    event = caught.value.event
    assert (event.layer, event.phase, event.kind) == (None, "loss", "nan")
    assert event.operation.name == "log"
    assert event.operation.source.line == line(__file__, "bad loss")
    assert event.cause.tag == "log_of_negative"


@pytest.mark.parametrize(
    ("what", "way"),
    [
        ("evaluate", "graph"), ("predict", "graph"), ("train_on_batch", "graph"),
        ("predict", "xla"), ("evaluate", "eager"), ("predict", "eager"),
    ],
)  # fmt: skip
def test_the_other_methods_are_watched(what, way):
    model = compiled(models.functional(Log(name="inner")), **WAYS[way])
    positive(model)
    x, y = data()
    arguments = (x,) if what == "predict" else (x, y)
    options = {"verbose": 0} if what in ("evaluate", "predict") else {}
    tracker = anynan.keras.track(model)
    getattr(model, what)(*arguments, **options)
    assert layers(tracker, "forward") == set(LAYERS)
    zero(model)
    with pytest.raises(anynan.NonFiniteError) as caught:
        getattr(model, what)(*arguments, **options)
    event = caught.value.event
    assert event.layer == "block.inner"
    assert event.operation.name == "log"
    assert event.operation.source.line == line(models.__file__, "bad log")
