"""What only Keras on PyTorch has: loops of one's own, modules inside layers, torch.compile."""

import keras
import numpy as np
import pytest
import torch

import anynan
from tests.failing import failure
from tests.keras_backends import models
from tests.keras_backends.checks import _fresh, layers, same  # noqa: F401
from tests.keras_backends.models import LAYERS, Log, Root, compiled, data, line, positive, zero
from tests.tensorflow_adapter.watching import watched


def loop(model, kind):
    if kind == "keras":
        optimizer = keras.optimizers.Adam(0.01)
    else:
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
    x, y = (torch.from_numpy(part) for part in data())

    def step():
        model.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        if kind == "torch":
            optimizer.step()
            return
        weights = model.trainable_weights
        with torch.no_grad():
            optimizer.apply([weight.value.grad for weight in weights], weights)

    return step


def test_a_loss_that_a_layer_added_is_still_there_after_a_second_run():
    def run(action):
        keras.utils.set_random_seed(3)
        regularized = keras.layers.ActivityRegularization(0.1)
        model = keras.Sequential([keras.layers.Dense(4), regularized, Log(name="log")])
        model.compile("sgd", "mse")
        tracker = action and anynan.keras.track(model, action=action)
        losses = model.fit(*data(), batch_size=4, verbose=0, shuffle=False).history["loss"]
        return [*model.get_weights(), losses], tracker

    found, tracker = run("record")
    same(found, run(None)[0])
    assert (tracker.events[0].layer, tracker.events[0].operation.name) == ("log", "log")


@pytest.mark.parametrize("kind", ["keras", "torch"])
def test_loop_of_ones_own(kind):
    model = positive(models.functional(Root(name="inner")))
    step = loop(model, kind)
    tracker = anynan.torch.track(model)  # hands it to the part that knows Keras
    for _ in range(3):
        step()
    assert len(tracker.history) == 3
    assert layers(tracker, "forward") == layers(tracker, "backward") == set(LAYERS)
    assert not tracker.events
    zero(model)
    before = model.get_weights()
    event = failure(step)
    assert (event.layer, event.phase, event.step) == ("block.inner", "backward", 3)
    assert event.operation.source.line == line(models.__file__, "bad sqrt")
    same(before, model.get_weights())


def test_loop_that_nobody_tracks_names_the_operation_inside_a_layer():
    model = zero(models.functional(Log(name="inner")))
    event = watched(lambda: loop(model, "torch")()).bad()[0]
    assert (event.layer, event.operation.name) == ("block.inner", "log")
    assert event.operation.source.line == line(models.__file__, "bad log")


def test_a_layer_that_is_built_within_another_keeps_its_parameters_as_they_are():
    class Inner(keras.layers.Layer):
        def build(self, _):
            self.bias = self.add_weight(shape=(2,), name="bias")

        def call(self, x):
            return x + self.bias

    class Outer(keras.layers.Layer):
        def __init__(self):
            super().__init__(name="outer")
            self.inner = Inner(name="inner")

        def call(self, x):
            return self.inner(x)

    def named(given):
        layer = Outer()
        layer(given)
        return [name for name, _ in layer.named_parameters()]

    inputs = keras.KerasTensor((4, 2)), torch.ones(4, 2)
    plain = [named(x) for x in inputs]
    seen = []
    watched(lambda: seen.extend(named(x) for x in inputs))
    assert seen == plain


def test_modules_inside_a_layer_have_paths():
    inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    layer = keras.layers.TorchModuleWrapper(inner, name="wrapped")
    model = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1, name="last")])
    with anynan.keras.track(model) as tracker, torch.no_grad():
        model(torch.ones(2, 4))
        assert layers(tracker, "forward") == {"wrapped", "wrapped.0", "wrapped.1", "last", ""}


def test_jit_compile_is_said_and_watched():
    model = compiled(Log(name="inner"), jit_compile=True)
    model.make_predict_function()
    function = model.predict_function
    with pytest.warns(anynan.AnynanWarning, match="predict run uncompiled"):
        tracker = anynan.keras.track(model)
    zero(model)
    event = failure(model.predict, data()[0], verbose=0)
    assert event.layer == "block.inner"
    tracker.remove()
    assert model.predict_function is function


class Standard(keras.layers.Layer):
    """Decide on numbers, as no layer on the meta device can: Keras then tries it on ones."""

    def call(self, x):
        if float(x.detach().abs().max()) > 1e6:
            x = x / 1e6
        return (x - keras.ops.mean(x, -1, keepdims=True)) / keras.ops.std(x, -1, keepdims=True)

    def compute_output_shape(self, shape):
        return shape


@pytest.mark.parametrize("name", ["fit", "train_on_batch", "evaluate", "test_on_batch"])
def test_made_up_numbers_that_keras_builds_with_are_not_judged(name):
    def run(x):
        model = keras.Sequential([keras.Input((4,)), Standard(name="std"), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
        tracker = anynan.keras.track(model)
        getattr(model, name)(x, data()[1], **({} if name.endswith("batch") else {"verbose": 0}))
        return tracker

    tracker = run(data()[0])
    assert (tracker.events, len(tracker.history)) == ((), 1)  # the building was no step
    event = failure(run, np.ones((8, 4), "float32"))
    assert (event.layer, event.cause.tag, event.step) == ("std", "divide_by_zero", 0)
