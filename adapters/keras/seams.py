"""The methods of Keras that watching changes while a model is tracked, and how they come back."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import keras

from anynan._base.patches import Patches, owner_of

KINDS = ("train", "test", "predict")
_patches = Patches()
change = _patches.change
_sessions: "weakref.WeakSet[Any]" = weakref.WeakSet()


def sessions() -> list[Any]:
    """List the sessions that watch a model of Keras now, in no order."""
    return list(_sessions)


class Batches:
    """Stand for a function that ``fit`` and the like run on batches, while a session watches.

    Args:
        session: Whose model it is of.
        function: What Keras made.
        run: Runs it as steps: called with the session and what the function takes.
        steps: What the session keeps for it.
    """

    def __init__(
        self, session: Any, function: Any, run: Callable[..., Any], steps: Any = None
    ) -> None:
        self.session, self.function = weakref.ref(session), function
        self._run, self.steps = run, steps

    def __call__(self, *args: Any) -> Any:
        """Run batches."""
        session = self.session()
        tracker = None if session is None else session.tracker
        if tracker is None or tracker.judge.adapter is not session or tracker.paused:
            return self.function(*args)
        return self._run(session, *args)


def watch(session: Any, compute_loss: Callable[[Any], Any]) -> None:
    """Tell a session of what its model does from now on.

    Args:
        session: Has ``model()``, and ``made``, which gives the ``Batches`` that stand for a
            function that Keras made to train, evaluate or predict with.
        compute_loss: Makes what stands for the method of the model.
    """
    model = session.model()
    _sessions.add(session)
    for kind in KINDS:
        change(keras.Model, f"make_{kind}_function", functools.partial(_made, kind=kind))
    change(keras.callbacks.History, "on_epoch_end", _epoch_ended)
    if isinstance(model, keras.Model):
        change(owner_of(type(model), "compute_loss"), "compute_loss", compute_loss)
        for kind in KINDS:
            _take(session, model, kind)


def unwatch(session: Any) -> None:
    """Tell it no more, and put its model's functions back."""
    model = session.model()
    for kind in KINDS:
        function = getattr(model, f"{kind}_function", None)
        if isinstance(function, Batches) and function.session() is session:
            setattr(model, f"{kind}_function", function.function)
    forget(session)


def forget(session: Any) -> None:
    """Know a session no more; after the last one every class is as it was."""
    _sessions.discard(session)
    if not _sessions:
        _patches.undo()


def _take(session: Any, model: Any, kind: str) -> None:
    function = getattr(model, f"{kind}_function", None)
    if function is not None and not isinstance(function, Batches):
        setattr(model, f"{kind}_function", session.made(model, function, kind))


def _made(original: Any, kind: str) -> Any:
    def make(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        for session in sessions():
            if session.model() is self:
                _take(session, self, kind)
        return out

    return make


def _epoch_ended(original: Any) -> Any:
    def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> Any:
        for session in sessions():
            if session.model() is self.model:
                session.shown(logs or {})
        return original(self, epoch, logs)

    return on_epoch_end
