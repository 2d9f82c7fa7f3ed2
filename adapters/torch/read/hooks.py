"""Hooks that no copy and no file of a model takes along."""

import copyreg
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from anynan._base.patches import Patches

# By its id, a dict in which PyTorch notes how hooks are called, with the keys of ours.
_noted: dict[int, tuple[weakref.ref[Any], set[int]]] = {}
_patches = Patches()


def _others(found: OrderedDict[Any, Any]) -> list[tuple[Any, Any]]:
    """List what a dict of hooks holds, without what is ours."""
    ref, keys = _noted.get(id(found), (None, ()))
    if ref is None or ref() is not found:
        keys = ()
    return [x for x in found.items() if x[0] not in keys and not isinstance(x[1], Hook)]


def _without(found: OrderedDict[Any, Any]) -> Any:
    """Say what a copy or a pickle of an ordered dict is made of: all of it but what is ours."""
    made: Any = found.__reduce__()
    kept = _others(found)
    return made if len(kept) == len(found) else (*made[:4], iter(kept))


def _scripting(script: Callable[..., Any]) -> Callable[..., Any]:
    """Script models without our hooks: TorchScript would compile those, too."""

    def scripted(obj: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(obj, torch.nn.Module):
            if len(args) < 2:  # it knows names as its caller does
                kwargs["_frames_up"] = kwargs.get("_frames_up", 0) + 1
            return script(obj, *args, **kwargs)
        hooks: list[Any] = []
        for x in obj.modules():
            hooks += [x._forward_hooks, x._forward_pre_hooks]
        held = [(each, each.copy()) for each in hooks]
        try:
            for each in hooks:
                _fill(each, _others(each))
            return script(obj, *args, **kwargs)
        finally:
            for each, items in held:
                _fill(each, items)

    return scripted


def _fill(found: OrderedDict[Any, Any], items: Any) -> None:
    found.clear()
    found.update(items)


def _forget(key: int) -> None:
    _noted.pop(key, None)
    if not _noted:
        _patches.undo()
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
            _patches.change(torch.jit, "script", _scripting)
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

    # PyTorch need not warn that a tensor is saved without it.
    __torch_unserializable__ = True
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
