"""The methods of Keras that watching changes while a model is tracked, and how they come back."""

import functools
import weakref
from typing import Any

import keras

from anynan._base.patches import Patches

KINDS = ("train", "test", "predict")
_patches = Patches()
change = _patches.change
_sessions: "weakref.WeakSet[Any]" = weakref.WeakSet()


def sessions() -> list[Any]:
    """List the sessions that watch a model of Keras now, in no order."""
    return list(_sessions)


def watch(session: Any) -> None:
    """Tell a session of what its model does from now on.

    Args:
        session: Has ``model()``, and ``made``, which is told that Keras made a function to train,
            evaluate or predict with.
    """
    _sessions.add(session)
    for kind in KINDS:
        change(keras.Model, f"make_{kind}_function", functools.partial(_made, kind=kind))


def unwatch(session: Any) -> None:
    """Tell it no more; after the last one every class is as it was."""
    _sessions.discard(session)
    if not _sessions:
        _patches.undo()


def _made(original: Any, kind: str) -> Any:
    def make(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        for session in sessions():
            if session.model() is self:
                session.made(self, kind)
        return out

    return make
