"""What people train with: loops, sharing, replicas, each way of running; what stays silent."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import anynan
from anynan._steps.tracked import inside
from tests.failing import failure
from tests.flat import split
from tests.keras_adapter import models
from tests.keras_adapter.models import WAYS, Log, Root, compiled, data, layers, positive, zero
from tests.keras_backends.models import LAYERS

pytestmark = pytest.mark.tier(2)


@pytest.mark.parametrize("eagerly", [True, False])
def test_branches_that_are_added_up_give_the_same(eagerly):
    def train(*, track):
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        inputs = keras.Input((6,))
        trunk, dense = keras.layers.Dense(6)(inputs), keras.layers.Dense
        branches = [dense(1)(dense(4, activation="tanh")(trunk)) for _ in range(2)]
        model = keras.Model(inputs, keras.layers.Average()(branches))
        model.compile("sgd", "mse", jit_compile=False, run_eagerly=eagerly)
        if track:
            anynan.keras.track(model)
        x = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
        model.fit(x, np.ones((8, 1)), batch_size=2, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    # Optimized, it regroups the sum of values that nobody reads.
    switches = ("arithmetic_optimization", "remapping")
    tf.config.optimizer.set_experimental_options(dict.fromkeys(switches, False))
    try:
        pairs = zip(train(track=False), train(track=True), strict=True)
    finally:
        tf.config.optimizer.set_experimental_options(dict.fromkeys(switches, True))
    for one, other in pairs:
        np.testing.assert_array_equal(one, other)


def test_recurrent_layer_is_read_where_its_loop_ends():
    inputs = keras.Input((5, 2))
    x = keras.layers.LSTM(3, name="rnn", use_cudnn=False)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1, name="last")(x))
    model.compile("sgd", "mse", jit_compile=False)
    x, y = np.ones((4, 5, 2), "float32"), np.ones((4, 1), "float32")
    with anynan.keras.track(model) as tracker:
        model.fit(x, y, verbose=0)
        assert {"rnn", "last"} <= layers(tracker, "forward")
        assert any("rnn.lstm_cell runs inside a loop" in note for note in tracker.notes)
        assert not inside(tracker).notes
        weight = model.get_layer("rnn").cell.recurrent_kernel
        weight.assign(np.full(weight.shape, np.nan))
        event = failure(model.fit, x, y, verbose=0)
        assert event.phase == "parameter", "it was written between steps"
        assert event.parameter.startswith("rnn.lstm_cell.recurrent_kernel")


def test_shared_layers_and_several_inputs_and_outputs():
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    shared = keras.layers.Dense(3, name="shared")
    x, z = shared(a), shared(b)
    model = keras.Model([a, b], {"sum": keras.layers.Add()([x, z]), "log": Log(name="lg")(z)})
    one, bad = np.ones((2, 3), "float32"), np.zeros((2, 3), "float32")
    shared.set_weights([np.eye(3), np.zeros(3)])
    tracker = anynan.keras.track(model, action="record")
    model.predict([one, one], verbose=0)
    assert sorted(r.call for r in tracker.history.last() if r.layer == "shared") == [0, 1]
    names = {r.site.tensor for r in tracker.history.last() if r.layer == ""}
    assert names == {"output['sum']", "output['log']"}
    assert not tracker.events
    tracker.remove()
    with anynan.keras.track(model, policy=anynan.Policy(neginf="bad")):
        event = failure(model.predict, [one, bad], verbose=0)
        assert (event.layer, event.operation.name) == ("lg", "log")


def test_two_replicas():
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = positive(compiled(models.functional(Log(name="inner")), jit_compile=False))
    with anynan.keras.track(model) as tracker:
        model.fit(*data(), verbose=0)
        for phase in ("forward", "backward"):
            assert {"first", "block.inner", "last"} <= layers(tracker, phase)
        zero(model)
        event = failure(model.fit, *data(), verbose=0)
        assert (event.layer, event.operation.name) == ("block.inner", "log")
        # The update was made, and is not what the step failed of.
        assert (event.phase, event.parameter) == ("forward", None)


def test_a_first_batch_that_makes_the_weights_and_spoils_them_is_run_again_with_what_they_were():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])

        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.inner(x) - y) ** 2)
                loss = loss / tf.reduce_sum(y - y)  # bad loss
            slopes = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(slopes, self.trainable_variables, strict=True))
            return {}

        def call(self, x):
            return self.inner(x)

    model = Own()
    model.compile("sgd")
    with anynan.keras.track(model, action="record") as tracker:
        model.fit(*data(), verbose=0)
    event = tracker.events[0]
    assert (event.step, event.operation.name) == (0, "divide")
    assert event.operation.source.line == models.line(__file__, "bad loss")


def test_a_loss_that_a_layer_added_is_still_there_after_a_second_run():
    regularized = keras.layers.ActivityRegularization(0.1)
    model = keras.Sequential([keras.Input((4,)), regularized, keras.layers.Dense(2), Log()])
    x = tf.ones((3, 4))
    with anynan.keras.track(model, action="record") as tracker, tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x)) + tf.add_n(model.losses)
    assert tape.gradient(loss, model.trainable_variables) is not None
    assert float(tf.add_n(model.losses)) == pytest.approx(0.4)
    assert tracker.events[0].operation.name == "log"


@pytest.mark.parametrize(
    ("way", "options"),
    [("graph", {"stats": "absmax"}), ("xla", {"replay": False}), ("eager", {"stats": "absmax"})],
)
def test_gradients_of_outputs_are_read_where_a_replay_cannot_tell(way, options):
    model = positive(compiled(models.functional(Root(name="inner")), **WAYS[way]))
    with anynan.keras.track(model, **split(options)) as tracker:
        model.fit(*data(), verbose=0)
        assert layers(tracker, "backward") == set(LAYERS)
        if "stats" in options:
            assert all(reading.absmax is not None for reading in tracker.history.last())


def test_a_statistic_that_is_not_there_is_refused():
    model = models.functional(keras.layers.Dense(4, name="inner"))
    with pytest.raises(ValueError, match="for TensorFlow there are only absmax, min, max so far"):
        anynan.keras.track(model, advanced=anynan.Advanced(stats=("mean",)))
