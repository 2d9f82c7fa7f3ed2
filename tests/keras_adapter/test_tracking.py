"""Readings and reports of Keras models on TensorFlow, however TensorFlow runs them."""

import keras
import pytest

import anynan
from tests.flat import split
from tests.keras_adapter import models
from tests.keras_adapter.models import Log, Root, compiled, data, positive, zero
from tests.keras_adapter.ways import WAYS, layers
from tests.keras_backends.models import LAYERS

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


def test_a_statistic_that_is_not_there_is_refused():
    model = models.functional(keras.layers.Dense(4, name="inner"))
    with pytest.raises(ValueError, match="for TensorFlow there are only absmax, min, max so far"):
        anynan.keras.track(model, advanced=anynan.Advanced(stats=("mean",)))


def test_model_that_was_fitted_before_is_traced_anew():
    model = compiled(models.functional(Log(name="inner")), jit_compile=False)
    zero(model)
    model.predict(data()[0], verbose=0)
    with anynan.keras.track(model), pytest.raises(anynan.NonFiniteError):
        model.predict(data()[0], verbose=0)
    model.predict(data()[0], verbose=0)
