"""Bad input, trouble, and what tracking leaves behind."""

import contextlib
import copy
import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import anynan
from anynan.tensorflow.session.seams import SEAMS
from tests.keras_adapter import models
from tests.keras_adapter.models import Log, Root, compiled, data, line, positive, zero

pytestmark = pytest.mark.tier(2)

OWNERS = [
    (keras.layers.Layer, "__call__"),
    (keras.Model, "make_train_function"),
    (keras.Model, "make_test_function"),
    (keras.Model, "make_predict_function"),
    (keras.optimizers.Optimizer, "apply"),
    (keras.optimizers.LossScaleOptimizer, "apply"),
    (tf.GradientTape, "gradient"),
    (tf.GradientTape, "jacobian"),
    (tf.GradientTape, "batch_jacobian"),
    (tf.GradientTape, "__enter__"),
    (tf.GradientTape, "__exit__"),
    (type(tf.function(len)), "__call__"),
]


def test_remove_restores_every_class():
    before = [vars(owner).get(name) for owner, name in OWNERS]
    model = compiled(models.functional(Root(name="inner")))
    tracker = anynan.keras.track(model)
    assert [vars(owner).get(name) for owner, name in OWNERS] != before
    tracker.remove()
    tracker.remove()
    assert [vars(owner).get(name) for owner, name in OWNERS] == before
    assert not SEAMS.sessions
    assert not SEAMS.layers


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras's own, in deepcopy
def test_copies_saving_and_checkpoints_know_nothing_of_it(tmp_path):
    layers = [keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(1)]
    model = compiled(keras.Sequential(layers))
    names = [weight.path for weight in model.weights]
    with anynan.keras.track(model) as tracker:
        model.fit(*data(), verbose=0)
        clone = keras.models.clone_model(model)
        twin = copy.deepcopy(model)
        model.save_weights(tmp_path / "model.weights.h5")
        tf.train.Checkpoint(model=model).save(tmp_path / "checkpoint")
        seen = len(tracker.history)
        clone(np.ones((1, 4)))
        twin(np.ones((1, 4)))
        assert len(tracker.history) == seen
    assert [weight.path for weight in model.weights] == names
    found = tf.train.list_variables(str(tmp_path / "checkpoint-1"))
    assert not any("anynan" in name for name, _ in found)


def test_tracking_twice_is_refused():
    model = models.functional(keras.layers.Dense(4, name="inner"))
    message = "is tracked already, by <anynan.Tracker watching"
    with anynan.keras.track(model), pytest.raises(ValueError, match=message):
        anynan.tensorflow.track(model)
    with anynan.keras.track(model):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude": "blok"}, "exclude='blok' matches no layer; did you mean 'block'"),
        ({"colour": 1}, "track() has no option 'colour'"),
        (
            {"stats": ("mean",)},
            "stats=('mean',): for TensorFlow there are only absmax, min, max so far",
        ),
    ],
)
def test_options_are_checked(options, message):
    model = models.functional(keras.layers.Dense(4, name="inner"))
    with pytest.raises((TypeError, ValueError)) as caught:
        anynan.keras.track(model, **options)
    assert message in str(caught.value)


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="takes a Keras model, not int"):
        anynan.keras.track(3)
    with pytest.raises(TypeError, match="a Keras model, a tf.Module or a function, not int"):
        anynan.tensorflow.track(3)
    with pytest.raises(TypeError, match="not the class Model"):
        anynan.keras.track(keras.Model)


def test_skipped_layers_are_not_read():
    model = compiled(models.functional(Root(name="inner")), jit_compile=False)
    positive(model)
    with anynan.keras.track(model, exclude="block") as tracker:
        model.fit(*data(), verbose=0)
        assert {r.layer for r in tracker.history.last() if r.phase == "forward"} == {
            "first", "last", "",
        }  # fmt: skip


def test_graph_that_was_traced_before_is_said():
    model = models.functional(Log(name="inner"))
    call = tf.function(model)
    call(tf.ones((2, 4)))
    with anynan.keras.track(model) as tracker:
        with pytest.warns(anynan.AnynanWarning, match="was traced before track"):
            call(tf.ones((2, 4)))
        call(tf.ones((2, 4)))
        assert len(tracker.notes) == 1


def test_model_that_was_fitted_before_is_traced_anew():
    model = compiled(models.functional(Log(name="inner")), jit_compile=False)
    zero(model)
    model.predict(data()[0], verbose=0)
    with anynan.keras.track(model), pytest.raises(anynan.NonFiniteError):
        model.predict(data()[0], verbose=0)
    model.predict(data()[0], verbose=0)


def test_pause_and_resume():
    model = compiled(models.functional(Log(name="inner")), jit_compile=False)
    with anynan.keras.track(model) as tracker:
        zero(model)
        tracker.pause()
        model.predict(data()[0], verbose=0)
        tracker.resume()
        with pytest.raises(anynan.NonFiniteError):
            model.predict(data()[0], verbose=0)


def test_bad_weight_is_found_at_once():
    model = models.functional(keras.layers.Dense(4, name="inner"))
    model.get_layer("last").bias.assign([np.inf])
    with pytest.raises(anynan.NonFiniteError) as caught:
        anynan.keras.track(model)
    assert (caught.value.event.phase, caught.value.event.parameter) == ("parameter", "last.bias")
    assert not SEAMS.sessions


def test_bad_batch_and_bad_label_are_told_apart():
    model = compiled(models.functional(keras.layers.Dense(4, name="inner")), jit_compile=False)
    x, y = data()
    with anynan.keras.track(model):
        bad = x.copy()
        bad[3, 1] = np.nan
        with pytest.raises(anynan.NonFiniteError) as caught:
            model.fit(bad, y, shuffle=False, verbose=0)
        assert caught.value.event.phase == "input"
        assert caught.value.event.cause.tag == "bad_input"
        bad = y.copy()
        bad[3] = np.nan
        with pytest.raises(anynan.NonFiniteError) as caught:
            model.fit(x, bad, shuffle=False, verbose=0)
        assert (caught.value.event.phase, caught.value.event.tensor) == ("input", "y")
        assert caught.value.event.cause.tag == "bad_label"


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
    anynan.check({"x": tf.ones(3), "words": tf.constant(["a"]), "v": tf.Variable(1)})
    assert anynan.summarize(tf.Variable([1.0, 2.0], dtype="bfloat16")).dtype == "bfloat16"
    with pytest.raises(anynan.NonFiniteError):
        anynan.check(tf.constant([1.0, np.nan]))
    with pytest.raises(TypeError, match="inside of a tf.function has none yet"):
        tf.function(anynan.check)(tf.ones(2))


class Scale(tf.Module):
    def __init__(self):
        super().__init__()
        self.weight = tf.Variable([1.0, 2.0])
        self.inner = [Halve()]

    def __call__(self, x):
        return self.inner[0](x * self.weight)


def test_what_the_graph_optimizer_alone_does_is_said():
    weight = tf.Variable([1.0])

    @anynan.tensorflow.track
    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            scores = x * weight * 3e38
            loss = tf.reduce_sum(tf.nn.softmax(scores) * tf.nn.softmax(scores))
        return tape.gradient(loss, weight)

    with step, pytest.raises(anynan.NonFiniteError, match="whether the fault is the optimizer's"):
        step(tf.constant([[1.0, 0.0], [0.5, 0.25]]))


class Halve(tf.Module):
    def __call__(self, x):
        return tf.math.log(x) / 2  # bad module


@pytest.mark.parametrize("jit", [None, False, True])
def test_plain_module_and_function(jit):
    module = Scale()

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(module(x))
        module.weight.assign_sub(0.0 * tape.gradient(loss, module.weight))
        return loss

    fn = step if jit is None else tf.function(step, jit_compile=jit)
    with anynan.tensorflow.track(fn) as tracked:
        assert float(tracked(tf.constant([1.0, 1.0]))) == pytest.approx(np.log(2) / 2)
        found = {(r.layer, r.phase) for r in tracked.history.last()}
        assert {("inner.0", "forward"), ("", "backward"), (None, "loss")} <= found
        with pytest.raises(anynan.NonFiniteError) as caught:
            tracked(tf.constant([1.0, -1.0]))
        event = caught.value.event
        assert (event.layer, event.operation.name, event.step) == ("inner.0", "log", 1)
        assert event.operation.source.line == line(__file__, "bad module")
        assert event.cause.tag == "log_of_negative"


def test_what_was_found_goes_with_an_exception_that_ends_the_step():
    def step(x):
        tf.debugging.assert_all_finite(model(x), "not finite")

    model = keras.Sequential([keras.Input((2,)), Log()])
    tracker = anynan.tensorflow.track(step, action="record")
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        tracker(-tf.ones((2, 2)))
    (event,) = [event for event in tracker.events if event.severity == "bad"]
    assert (event.kind, event.phase) == ("nan", "forward")
    assert caught.value.__notes__[0].startswith("NaN first appeared")
    tracker.remove()


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


def test_a_function_that_is_not_running_leaves_another_ones_model_alone():
    class Plain(tf.Module):
        def __init__(self):  # without TensorFlow's own, so it has no name
            self.weight = tf.Variable([1.0])

        def __call__(self, x):
            return tf.math.log(self.weight * x)

    idle = anynan.tensorflow.track(lambda x: x * 2)
    model = Plain()
    with anynan.tensorflow.track(model, action="record") as tracker:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(-tf.ones(1)))
        tape.gradient(loss, model.weight)
    assert [event.operation.name for event in tracker.events] == ["log"]
    assert idle.events == ()
    assert not list(idle.history)


def test_nothing_is_watched_in_a_graph_of_the_old_kind():
    class Plain(tf.Module):
        def __call__(self, x):
            return tf.math.log(x)

    module = Plain()
    with anynan.tensorflow.track(module) as tracker:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            assert np.isnan(session.run(module(-tf.ones(1))))
        assert tracker.events == ()
        with pytest.raises(anynan.NonFiniteError):
            module(-tf.ones(1))


class Compiled(tf.Module):
    def __init__(self):
        super().__init__()
        self.weight = tf.Variable([2.0])

    @tf.function(input_signature=[tf.TensorSpec([1], tf.float32)])
    def __call__(self, x):
        return tf.math.log(self.weight * x)


def test_a_tracked_module_is_saved_as_it_would_be(tmp_path):
    module = Compiled()
    with anynan.tensorflow.track(module) as tracker:
        with tf.GradientTape():  # it is traced for the first time while operations are noted
            module(tf.ones(1))
        tf.saved_model.save(module, str(tmp_path))
        with pytest.raises(anynan.NonFiniteError):
            module(-tf.ones(1))
    loaded = tf.saved_model.load(str(tmp_path))
    assert float(loaded(tf.ones(1))[0]) == pytest.approx(np.log(2.0))
    (event,) = tracker.events
    assert (event.layer, event.operation.name) == ("", "log")
