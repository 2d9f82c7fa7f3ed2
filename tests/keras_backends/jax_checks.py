"""What only Keras on JAX has: state that is given away, programs, functions of one's own."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import anynan
from anynan._steps.tracked import inside
from anynan.keras import jax_steps
from tests.failing import failure
from tests.keras_backends import models
from tests.keras_backends.checks import _fresh, same  # noqa: F401
from tests.keras_backends.models import Log, Root, compiled, data, layers, line, positive, zero


def test_several_batches_at_once():
    def run(*, track):
        keras.utils.set_random_seed(3)
        model = positive(compiled(Root(name="inner"), steps_per_execution=2))
        tracker = anynan.keras.track(model) if track else None
        losses = model.fit(*data(12), batch_size=4, verbose=0, shuffle=False).history["loss"]
        return [*model.get_weights(), losses, model.predict(data(12)[0], 4, verbose=0)], tracker

    found, tracker = run(track=True)
    same(found, run(track=False)[0])
    assert len(tracker.history) == 6


def test_donated_state_is_kept_until_the_fault_comes_back(monkeypatch):
    monkeypatch.setattr(jax_steps, "room", lambda: 0)
    model = zero(compiled(Log(name="inner")))
    weights = model.get_weights()
    with anynan.keras.track(model, action="record") as tracker:
        for _ in range(2):
            model.set_weights(weights)
            model.train_on_batch(*data())
    first, second = [event for event in tracker.events if event.severity == "bad"]
    assert any("what the next 100 steps donate is kept" in note for note in first.notes)
    assert (second.step, second.operation.name) == (1, "log")


@pytest.mark.parametrize("rate", [1e20, 1e38])
def test_a_fault_that_spoils_the_weights_is_told_once(rate):
    keras.utils.set_random_seed(0)
    layer = keras.layers.Dense
    model = keras.Sequential([keras.Input((4,)), layer(8, "relu", name="a"), layer(1, name="b")])
    model.compile(keras.optimizers.SGD(rate), "mse")
    x = np.random.default_rng(0).random((32, 4)).astype("float32")
    with anynan.keras.track(model, action="record") as tracker:
        model.fit(x, 100 * x.sum(1), batch_size=4, verbose=0, shuffle=False)
    (event,) = [event for event in tracker.events if event.severity == "bad"]
    assert event.times == 1
    assert len(tracker.history) == 8


@pytest.mark.skipif(not hasattr(jax, "make_user_context"), reason="no trace can be kept apart")
def test_a_fix_is_tried():
    model = zero(compiled(Log(name="inner")))
    with anynan.keras.track(model):
        trial = failure(model.fit, *data(), verbose=0).tried
    assert trial.outcome == "finite"
    assert trial.gradient_norm > 0


def test_running_uncompiled_is_said_and_watched():
    model = zero(compiled(Log(name="inner"), run_eagerly=True))
    with pytest.warns(anynan.AnynanWarning, match="predict run compiled"):
        tracker = anynan.keras.track(model)
        model.make_predict_function()
    event = failure(model.predict, data()[0], verbose=0)
    assert event.operation.source.line == line(models.__file__, "bad log")
    tracker.remove()


def test_a_function_of_ones_own():
    model = positive(models.functional(Log(name="inner")))
    x, _ = data()

    def loss(params, x):
        out, _ = model.stateless_call(params, [v.value for v in model.non_trainable_variables], x)
        return out.sum()

    params = [v.value for v in model.trainable_variables]
    with anynan.keras.track(model) as tracker:
        with pytest.warns(anynan.AnynanWarning, match="with anynan.jax.track, which names"):
            jax.jit(lambda x: model(x))(x)
        assert not len(tracker.history)
        with anynan.jax.track(jax.value_and_grad(loss)) as step:
            step(params, x)
            assert set(models.LAYERS) - {""} <= layers(step, "forward")


def test_cell_inside_a_loop():
    inputs = keras.Input((5, 2))
    x = keras.layers.SimpleRNN(3, name="rnn")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1, name="last")(x))
    model.compile("sgd", "mse")
    x = np.ones((4, 5, 2), "float32")
    with anynan.keras.track(model) as tracker:
        model.predict(x, verbose=0)
        assert {"rnn", "rnn.simple_rnn_cell", "last"} <= layers(tracker, "forward")
        assert not tracker.notes
        model(x)
        assert layers(tracker, "forward") == {"rnn", "last", ""}
        assert any("rnn.simple_rnn_cell runs inside a loop" in text for text in tracker.notes)
    assert not inside(tracker).notes


def test_two_devices():
    devices = ["cpu:0", "cpu:1"]
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    try:
        model = zero(compiled(Log(name="inner")))
        anynan.keras.track(model)
        event = failure(model.fit, *data(), verbose=0)
    finally:
        keras.distribution.set_distribution(None)
    assert event.layer == "block.inner"
    assert event.operation.source.line == line(models.__file__, "bad log")


class Drawing(keras.layers.Layer):
    """Write into a variable in each call, as what draws does."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(3)
        self.mean = self.add_weight(name="mean", shape=(6,), initializer="ones", trainable=False)

    def call(self, x):
        self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, 0))
        return self.inner(x / self.mean)


def test_no_tracer_stays_in_a_variable_and_no_write_of_a_run_that_is_ours():
    x = keras.ops.convert_to_tensor(np.random.default_rng(0).random((4, 6), "float32"))
    layer = Drawing()
    targets = layer, lambda x: layer(x) * 2
    for product in (anynan.stress, anynan.precision):
        for target in targets:
            with pytest.raises(ValueError, match="this Drawing is not built yet"):
                product(target, x)
    layer(x)
    before = np.asarray(layer.mean)
    for product in (anynan.stress, anynan.precision):
        for target in targets:
            product(target, x)
    assert np.array_equal(np.asarray(layer.mean), before)
    with pytest.warns(anynan.errors.AnynanWarning, match=r"it writes into Keras's variables"):
        tracked = anynan.jax.track(lambda x: layer(x) * 2)
        tracked(x)
    assert not np.array_equal(np.asarray(layer.mean), before)  # as the program does


def test_a_function_that_builds_its_model_is_watched_from_the_next_call_on():
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
    tracked = anynan.jax.track(lambda x: jnp.log(model(x)).sum(), action="record")
    with pytest.warns(anynan.AnynanWarning, match="model-builds"):
        first = tracked(jnp.ones((2, 4)))
    assert float(model(jnp.ones((2, 4))).shape[0]) == 2  # its weights are numbers
    model.set_weights([jnp.zeros_like(x) for x in model.get_weights()])
    tracked(jnp.ones((2, 4)))
    assert tracked.events[0].operation.name == "log"
    assert isinstance(first, jax.Array)
