"""A callback for ``fit`` that stops, raises, warns or skips, and tells why."""

import sys
from types import FrameType
from typing import Any, Unpack

import keras

from anynan._monitored import Monitored
from anynan._steps.tracked import inside
from anynan.keras.messages import BACKUP_KEPT
from anynan.keras.tracking import track
from anynan.options import MonitorOptions


class Monitor(Monitored, keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
    """Watch a model while ``fit`` trains it, in place of ``TerminateOnNaN``.

    Each report says in which epoch and batch it happened, counted from 1 as Keras prints them.

    Args:
        action: ``"stop"`` drops the bad step's update, warns with the report and ends the
            training after this batch, keeping what ``BackupAndRestore`` saved; ``"raise"``,
            ``"warn"``, ``"record"`` and ``"skip"`` are those of ``track``.
        **options: The other options of ``anynan.keras.track``.

    Raises:
        ValueError: If the action is unknown.

    Example:
        >>> import keras, anynan
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> ones = keras.ops.convert_to_numpy(keras.ops.ones((8, 4)))
        >>> monitor = anynan.keras.Monitor(action="stop")
        >>> _ = model.fit(ones, ones[:, :1], verbose=0, callbacks=[monitor])
        >>> monitor.events
        ()
    """

    def __init__(self, action: str = "stop", **options: Unpack[MonitorOptions]) -> None:
        Monitored.__init__(self, action, options)
        keras.callbacks.Callback.__init__(self)
        self._epoch = self._batch = 0

    def set_model(self, model: Any) -> None:
        """Begin to watch, before Keras makes the function that trains."""
        super().set_model(model)
        self._begin(track, model)
        self._note()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        self._epoch = epoch
        self._note()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Note the batch."""
        self._batch = batch
        self._note()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stop after a bad batch, if that is wanted."""
        if not self._stops():
            return
        if not self.model.stop_training:
            self._keep_backups()
        self.model.stop_training = True

    def on_train_end(self, logs: Any = None) -> None:
        """Watch no longer."""
        self._end()

    def _keep_backups(self) -> None:
        """Have the backups of this training kept when it ends."""
        # A callback is not told of the others, but called by what holds them all.
        frame: FrameType | None = sys._getframe(1)
        together: Any = None
        while frame is not None and not isinstance(together, keras.callbacks.CallbackList):
            together = frame.f_locals.get("self")
            frame = frame.f_back
        if not isinstance(together, keras.callbacks.CallbackList):
            return
        for callback in list(together.callbacks):
            backup = isinstance(callback, keras.callbacks.BackupAndRestore)
            if backup and callback.delete_checkpoint:
                callback.delete_checkpoint = False
                together.callbacks.append(_DeleteAgain(callback))  # the last to be called
                if self.tracker is not None:
                    inside(self.tracker).judge.say(BACKUP_KEPT(folder=callback.backup_dir))

    def _note(self) -> None:
        if self.tracker is not None:
            self.tracker.where = f"epoch {self._epoch + 1}, batch {self._batch + 1} of fit"


class _DeleteAgain(keras.callbacks.Callback):  # type: ignore[misc]
    """Give a callback its option back after the training."""

    def __init__(self, callback: Any) -> None:
        super().__init__()
        self._callback = callback

    def on_train_end(self, logs: Any = None) -> None:
        """Give it back."""
        self._callback.delete_checkpoint = True
