"""Bad input, trouble, and what tracking leaves behind."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf

import anynan
from anynan.tensorflow.session.seams import SEAMS
from tests.flat import split
from tests.keras_adapter import models
from tests.keras_adapter.models import Log, Root, compiled, data, zero

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
        (
            {"stats": ("mean",)},
            "Advanced(stats=('mean',)): for TensorFlow there are only absmax, min, max so far",
        ),
    ],
)
def test_options_are_checked(options, message):
    model = models.functional(keras.layers.Dense(4, name="inner"))
    with pytest.raises((TypeError, ValueError)) as caught:
        anynan.keras.track(model, **split(options))
    assert message in str(caught.value)


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="a Keras model, a tf.Module or a function, not int"):
        anynan.tensorflow.track(3)


def test_model_that_was_fitted_before_is_traced_anew():
    model = compiled(models.functional(Log(name="inner")), jit_compile=False)
    zero(model)
    model.predict(data()[0], verbose=0)
    with anynan.keras.track(model), pytest.raises(anynan.NonFiniteError):
        model.predict(data()[0], verbose=0)
    model.predict(data()[0], verbose=0)
