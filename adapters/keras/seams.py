"""The methods of Keras that watching changes while a model is tracked, and how they come back."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import keras

_ABSENT = object()
KINDS = ("train", "test", "predict")
# Class, name of the method, what stood there.
_changed: list[tuple[type, str, Any]] = []
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
    if _sessions:
        return
    while _changed:
        owner, name, before = _changed.pop()
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def change(owner: type, name: str, make: Callable[[Any], Any]) -> None:
    """Put a method in another's place, once."""
    if any(held is owner and known == name for held, known, _ in _changed):
        return
    before, original = vars(owner).get(name, _ABSENT), getattr(owner, name)
    made = functools.wraps(original)(make(original))
    _changed.append((owner, name, before))
    setattr(owner, name, made)


def owner_of(cls: type, name: str) -> type:
    """Give the class that a method of a class is from."""
    return next(owner for owner in cls.__mro__ if name in vars(owner))


def _made(original: Any, kind: str) -> Any:
    def make(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        for session in sessions():
            if session.model() is self:
                session.made(self, kind)
        return out

    return make
