"""Hooks that no copy and no file of a model takes along."""

import copyreg
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

# By its id, a dict in which PyTorch notes how hooks are called, with the keys of ours.
_noted: dict[int, tuple[weakref.ref[Any], set[int]]] = {}


def _without(found: OrderedDict[Any, Any]) -> Any:
    """Say what a copy or a pickle of an ordered dict is made of: all of it but what is ours."""
    made: Any = found.__reduce__()
    ref, keys = _noted.get(id(found), (None, ()))
    if ref is None or ref() is not found:
        keys = ()
    kept = [x for x in found.items() if x[0] not in keys and not isinstance(x[1], Hook)]
    return made if len(kept) == len(found) else (*made[:4], iter(kept))


def _forget(key: int) -> None:
    _noted.pop(key, None)
    if not _noted and copyreg.dispatch_table.get(OrderedDict) is _without:
        del copyreg.dispatch_table[OrderedDict]


class _Handle:
    """Take a hook off, and forget that it was there.

    A model keeps its hooks in ordered dicts, which would take them into every copy and file:
    ``copyreg`` is what both ask how such a dict is to be written.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        for ref in handle.extra_dict_ref:
            key = id(ref())
            gone = weakref.ref(ref(), lambda _, key=key: _forget(key))  # type: ignore[misc]
            _noted.setdefault(key, (gone, set()))[1].add(handle.id)
        if _noted:
            copyreg.pickle(OrderedDict, _without)

    def remove(self) -> None:
        """Take it off."""
        self._handle.remove()
        for ref in self._handle.extra_dict_ref:
            key = id(ref())
            _, keys = _noted.get(key, (None, set[int]()))
            keys.discard(self._handle.id)
            if not keys:
                _forget(key)


class Hook:
    """Be dropped from copies and files: a model that was copied or loaded is not tracked."""

    __slots__ = ()

    def on(self, handle: Any) -> _Handle:
        """Give what takes this hook off the module that it was put on."""
        return _Handle(handle)


class CallHook(Hook):
    """Call a function, and be dropped from copies of the module."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> None:
        """Call it."""
        self.function(*args)
