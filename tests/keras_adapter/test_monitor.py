"""The callback for ``fit``, the loss of an evaluation, and what a failing batch costs."""

import keras
import numpy as np
import pytest

import anynan
from tests.keras_adapter import models
from tests.keras_adapter.models import Root, compiled, positive
from tests.keras_backends.checks import (
    WHERE,
    Spoil,
    test_fault_inside_the_loss,  # noqa: F401
    test_monitor,  # noqa: F401
    test_step_of_ones_own_that_never_asks_for_the_loss,  # noqa: F401
)
from tests.keras_backends.cost_checks import (  # noqa: F401
    test_the_batches_after_a_bad_one_cost_what_clean_ones_do,
)


def train(*callbacks):
    model = positive(compiled(models.functional(Root(name="inner")), jit_compile=False))
    x, y = np.ones((8, 4)), np.ones((8, 1))
    spoil = Spoil()
    model.fit(x, y, batch_size=2, epochs=3, verbose=0, callbacks=[spoil, *callbacks])
    return model, spoil.seen


@pytest.mark.tier(2)
@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras's own, in saving
@pytest.mark.parametrize(("action", "first"), [("stop", True), ("stop", False), ("raise", False)])
def test_the_backup_is_kept(tmp_path, action, first):
    folder = tmp_path / "backup"
    backup, monitor = keras.callbacks.BackupAndRestore(str(folder)), anynan.keras.Monitor(action)
    pair = [monitor, backup] if first else [backup, monitor]
    if action == "raise":
        with pytest.raises(anynan.NonFiniteError):
            train(*pair)
    else:
        with pytest.warns(anynan.AnynanWarning) as caught:
            train(*pair)
        assert any(f"the backup in {folder} is kept" in str(item.message) for item in caught)
        assert backup.delete_checkpoint  # a whole training deletes it, as ever
    assert (folder / "latest.weights.h5").exists()


@pytest.mark.tier(2)
@pytest.mark.parametrize("action", ["skip", "warn"])
def test_it_goes_on(action):
    with pytest.warns(anynan.AnynanWarning) as caught:
        model, seen = train(anynan.keras.Monitor(action=action))
    assert WHERE in str(caught[0].message)
    assert len(seen) == 12
    finite = all(np.isfinite(weight).all() for weight in model.get_weights())
    assert finite == (action == "skip")


def test_unknown_actions_are_refused():
    with pytest.raises(ValueError, match="action='halt' is unknown; choose from stop, raise"):
        anynan.keras.Monitor(action="halt")
