"""A callback for ``fit`` that stops, raises, warns or skips, and tells why."""

from typing import Any

import keras

from anynan.keras.tracking import track
from anynan.tracker import Tracker

ACTIONS = ("stop", "raise", "warn", "record", "skip")


class Monitor(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
    """Watch a model while ``fit`` trains it, in place of ``TerminateOnNaN``.

    Each report says in which epoch and batch it happened, counted from 1 as Keras prints them.

    Args:
        action: ``"stop"`` drops the bad step's update, warns with the report and ends the
            training after this batch; ``"raise"``, ``"warn"``, ``"record"`` and ``"skip"`` are
            those of ``track``.
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

    def __init__(self, action: str = "stop", **options: Any) -> None:
        super().__init__()
        if action not in ACTIONS:
            msg = f"action={action!r} is unknown; choose from {', '.join(ACTIONS)}"
            raise ValueError(msg)
        self.action = action
        self.tracker: Tracker | None = None
        self._options = options
        self._epoch = self._batch = 0

    @property
    def events(self) -> tuple[Any, ...]:
        """Return what was seen, oldest first."""
        return () if self.tracker is None else self.tracker.events

    def set_model(self, model: Any) -> None:
        """Begin to watch, before Keras makes the function that trains."""
        super().set_model(model)
        if self.tracker is not None:
            self.tracker.remove()
        action = "skip" if self.action == "stop" else self.action
        self.tracker = track(model, action=action, **self._options)
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
        tracker = self.tracker
        if self.action == "stop" and tracker is not None and tracker.count("bad"):
            self.model.stop_training = True

    def on_train_end(self, logs: Any = None) -> None:
        """Watch no longer."""
        if self.tracker is not None:
            self.tracker.remove()

    def _note(self) -> None:
        if self.tracker is not None:
            self.tracker.where = f"epoch {self._epoch + 1}, batch {self._batch + 1} of fit"
