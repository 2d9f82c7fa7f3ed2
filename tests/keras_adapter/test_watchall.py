"""Models that nobody named are found when ``fit`` or a batch comes."""

import re

import keras
import numpy as np
import pytest

import anynan
from anynan._everywhere import Found, watch_everything
from anynan.options import Options
from tests.keras_adapter import models
from tests.keras_adapter.models import Root, compiled, positive

X, Y = np.ones((8, 4)), np.ones((8, 1))
CLASSES = ("set_model", keras.callbacks.CallbackList), ("train_on_batch", keras.Model)


@pytest.fixture
def found():
    real = [getattr(owner, name) for name, owner in CLASSES]
    found = Found()
    found.end = watch_everything(Options(action="record"), found)
    yield found
    found.end()
    assert [getattr(owner, name) for name, owner in CLASSES] == real


def test_fit_is_watched(found):
    model = positive(compiled(models.functional(Root(name="inner")), jit_compile=False))
    model.fit(X, Y, batch_size=4, verbose=0)
    assert found.events == []
    models.zero(model)
    model.fit(X, Y, batch_size=4, verbose=0)
    event = found.bad()[0]
    assert (event.layer, event.phase, event.operation.name) == ("block.inner", "backward", "sqrt")
    found.close()
    assert "bad in 4 steps" in found.lines()[0]


@pytest.mark.tier(2)
def test_a_batch_is_watched(found):
    model = models.zero(compiled(models.functional(Root(name="inner")), jit_compile=False))
    model.train_on_batch(X, Y)
    assert found.bad()[0].layer == "block.inner"


@pytest.mark.tier(2)
def test_a_monitor_takes_over(found):
    model = models.zero(compiled(models.functional(Root(name="inner")), jit_compile=False))
    monitor = anynan.keras.Monitor()
    with pytest.warns(anynan.AnynanWarning, match="the slope of a square root at 0 is infinite"):
        model.fit(X, Y, batch_size=4, verbose=0, callbacks=[monitor])
    assert len(monitor.events) == 1
    assert found.events == []


@pytest.mark.parametrize("trained", [False, True])
def test_a_part_of_a_model_that_went_bad_has_no_fault_of_its_own(found, trained):
    part, given = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), keras.Input((4,))
    if trained:  # it was found before the model that it is a part of
        part.compile("sgd", "mse")
        part.fit(X, Y, verbose=0)
    model = keras.Model(given, keras.ops.sqrt(part(given) * 0.0))
    model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=4, verbose=0)
    part.predict(X, verbose=0)
    assert [event.operation.name for event in found.bad()] == ["sqrt"]
    found.end()
    assert re.search(r"kernel.* hold.* ends: Functional goes on with weights", found.harms[-1])
