"""Bad input, trouble, and what tracking leaves behind."""

import keras
import pytest

import anynan
from tests.keras_adapter import models
from tests.keras_adapter.models import Log, compiled, data, zero

pytestmark = pytest.mark.tier(2)


def test_a_statistic_that_is_not_there_is_refused():
    model = models.functional(keras.layers.Dense(4, name="inner"))
    with pytest.raises(ValueError, match="for TensorFlow there are only absmax, min, max so far"):
        anynan.keras.track(model, advanced=anynan.Advanced(stats=("mean",)))


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
