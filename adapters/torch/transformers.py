"""transformers' Trainer owns the step: track its ``training_step``, or let a callback do it."""

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_stack
from types import FrameType
from typing import Any, Unpack

try:
    import transformers
except ImportError:
    msg = 'anynan.transformers needs transformers: pip install "anynan[transformers]"'
    raise ImportError(msg) from None

from anynan._everywhere import Found
from anynan._monitored import Monitored
from anynan._steps.tracked import inside
from anynan.options import MonitorOptions, Options, TrackOptions
from anynan.torch import tracking
from anynan.tracker import Tracker


def track(trainer: transformers.Trainer, **options: Unpack[TrackOptions]) -> Tracker:
    """Watch what a Trainer trains: each call of its ``training_step`` is one step.

    That is one batch, forward and backward, with an overridden ``compute_loss`` in it; the update
    that comes after it is watched, too.

    Args:
        trainer: A ``transformers.Trainer``, or one of another library that is a subclass.
        **options: As for ``anynan.torch.track``.

    Returns:
        A Tracker; its ``remove`` gives the Trainer its own method back.

    Raises:
        TypeError: If it is no Trainer, or an option is of the wrong type or unknown.
        ValueError: If it is tracked already, or an option has an impossible value.

    Example:
        >>> import anynan
        >>> tracker = anynan.transformers.track(trainer)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """
    if not isinstance(trainer, transformers.Trainer):
        msg = f"track() takes a transformers.Trainer, not {type(trainer).__name__}"
        raise TypeError(msg)
    if isinstance(vars(trainer).get("training_step"), Tracker):
        msg = "this Trainer is tracked already: call its tracker's remove() first"
        raise ValueError(msg)  # noqa: TRY004  it is of the right type
    tracker: Tracker = tracking.track(trainer.training_step, **options)
    tracked = inside(tracker)
    tracked.name = f"{type(trainer).__name__}.training_step"
    tracked.where = _Where(trainer)
    vars(trainer)["training_step"] = tracker
    tracked.judge.ends.append(lambda: vars(trainer).pop("training_step", None))
    return tracker


@contextmanager
def watched(trainer: transformers.Trainer, options: Options, found: Found) -> Iterator[None]:
    """Track a Trainer while it trains, unless somebody does.

    Args:
        trainer: The Trainer.
        options: As for ``track``.
        found: Is given the tracker.
    """
    callbacks = trainer.callback_handler.callbacks
    tracked = isinstance(vars(trainer).get("training_step"), Tracker)
    if tracked or any(isinstance(callback, Monitor) for callback in callbacks):
        yield
        return
    tracker = track(trainer, action=options.action, level=options.level)
    try:
        found.add(tracker)
        yield
    finally:
        tracker.remove()


class Monitor(Monitored, transformers.TrainerCallback):
    """Watch what a Trainer trains, and name operation and line in ``compute_loss`` too.

    Args:
        action: ``"stop"`` drops the bad step's update, warns with the report, and ends the
            training after this update; ``"raise"``, ``"warn"``, ``"record"`` and ``"skip"`` are
            those of ``track``.
        save: Whether ``"stop"`` has the Trainer save a checkpoint. No bad step has updated it.
        **options: The other options of ``anynan.torch.track``.

    Attributes:
        tracker: What watches, and holds what was seen, once ``train`` has begun.

    Raises:
        ValueError: If the action is unknown.

    Example:
        >>> import anynan
        >>> monitor = anynan.transformers.Monitor(action="stop")
        >>> # transformers.Trainer(model, arguments, callbacks=[monitor], ...).train()
        >>> monitor.events
        ()
    """

    def __init__(
        self, action: str = "stop", *, save: bool = True, **options: Unpack[MonitorOptions]
    ) -> None:
        super().__init__(action, options)
        self.save = save
        self._bad = 0  # how many were bad before this update

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin to watch."""
        trainer = _trainer(sys._getframe(1))
        if trainer is None:  # a loop of somebody's own that calls callbacks
            self._begin(tracking.track, given["model"])
        else:
            self._begin(track, trainer)
        self._bad = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Note where the training is."""
        if self.tracker is not None:
            self.tracker.where = _at(state)
            self._bad = self.tracker.count("bad")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Drop the update of a bad step, also where its gradients are finite."""
        skips = self.action in ("stop", "skip")
        if skips and self.tracker is not None and self.tracker.count("bad") > self._bad:
            for p in given["model"].parameters():
                p.grad = None

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Stop after a bad update, if that is wanted."""
        if self._stops():
            control.should_training_stop = True
            control.should_save = control.should_save or self.save

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Watch no longer."""
        self._end()


class _Where:
    """Say which of its own steps a Trainer is in: one of them may be several batches."""

    def __init__(self, trainer: transformers.Trainer) -> None:
        self._trainer = weakref.ref(trainer)

    def __str__(self) -> str:
        trainer = self._trainer()
        return "" if trainer is None else _at(trainer.state)


def _at(state: Any) -> str:
    return f"global_step {state.global_step} of train"


def _trainer(frame: FrameType) -> transformers.Trainer | None:
    """Find the Trainer whose loop this is: a callback is not told of it."""
    owners = (each.f_locals.get("self") for each, _ in walk_stack(frame))
    return next((found for found in owners if isinstance(found, transformers.Trainer)), None)
