"""The callback for ``fit``: where it happened, and what it does then."""

import keras
import numpy as np
import pytest

import anynan
from anynan._steps.tracked import inside
from tests.keras_adapter import models
from tests.keras_adapter.models import Root, compiled, positive


class Spoil(keras.callbacks.Callback):
    """Make the model go bad at the third batch of the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == (1, 2):
            models.zero(self.model)


def train(monitor):
    model = compiled(models.functional(Root(name="inner")), jit_compile=False)
    positive(model)
    x, y = np.ones((8, 4)), np.ones((8, 1))
    seen = []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(batch)
    )
    callbacks = [Spoil(), monitor, count]
    model.fit(x, y, batch_size=2, epochs=3, verbose=0, callbacks=callbacks)
    return model, seen


WHERE = "epoch 2, batch 3 of fit"


def test_it_stops_and_tells_why():
    monitor = anynan.keras.Monitor()
    with pytest.warns(anynan.AnynanWarning, match="the slope of a square root at 0 is infinite"):
        model, seen = train(monitor)
    assert seen == [0, 1, 2, 3, 0, 1, 2]
    (event,) = monitor.events
    assert WHERE in event.notes
    assert (event.layer, event.phase, event.operation.name) == ("block.inner", "backward", "sqrt")
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert inside(monitor.tracker).judge.adapter is None


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras's own, in saving
@pytest.mark.parametrize("first", [True, False])
def test_stopping_keeps_the_backup(tmp_path, first):
    folder = tmp_path / "backup"
    backup = keras.callbacks.BackupAndRestore(str(folder))
    monitor = anynan.keras.Monitor()
    model = compiled(models.functional(Root(name="inner")), jit_compile=False)
    positive(model)
    pair = [monitor, backup] if first else [backup, monitor]
    x, y = np.ones((8, 4)), np.ones((8, 1))
    with pytest.warns(anynan.AnynanWarning) as caught:
        model.fit(x, y, batch_size=2, epochs=3, verbose=0, callbacks=[Spoil(), *pair])
    assert any(f"the backup in {folder} is kept" in str(item.message) for item in caught)
    assert (folder / "latest.weights.h5").exists()
    assert backup.delete_checkpoint  # a whole training deletes it, as ever


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras's own, in saving
def test_raising_keeps_the_backup(tmp_path):
    folder = tmp_path / "backup"
    model = compiled(models.functional(Root(name="inner")), jit_compile=False)
    positive(model)
    backup = keras.callbacks.BackupAndRestore(str(folder))
    callbacks = [Spoil(), backup, anynan.keras.Monitor("raise")]
    with pytest.raises(anynan.NonFiniteError):
        model.fit(
            np.ones((8, 4)), np.ones((8, 1)), batch_size=2, epochs=3, verbose=0, callbacks=callbacks
        )
    assert (folder / "latest.weights.h5").exists()
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


def test_it_raises():
    monitor = anynan.keras.Monitor(action="raise")
    with pytest.raises(anynan.NonFiniteError, match=WHERE):
        train(monitor)
    monitor.on_train_end()


@pytest.mark.parametrize("action", ["warn", "skip"])
def test_it_goes_on(action):
    monitor = anynan.keras.Monitor(action=action)
    with pytest.warns(anynan.AnynanWarning) as caught:
        model, seen = train(monitor)
    assert WHERE in str(caught[0].message)
    assert len(seen) == 12
    finite = all(np.isfinite(weight).all() for weight in model.get_weights())
    assert finite == (action == "skip")


def test_unknown_actions_are_refused():
    with pytest.raises(ValueError, match="action='halt' is unknown; choose from stop, raise"):
        anynan.keras.Monitor(action="halt")
