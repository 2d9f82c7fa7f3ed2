"""Which values a tracked function's arrays are, and how containers of them are opened."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any

import array_api_compat
import numpy as np

from anynan._arrays.containers import mapped, shown, stored
from anynan.arrays.tracked import TrackedArray, is_tracked

# Words of a layout whose elements lie in no strides. JAX's AutoLayout says nothing of them.
_PACKED = ("sparse", "mkldnn", "jagged")
_MUTABLE = (dict, list, OrderedDict, defaultdict)
Change = Callable[[Any, str], Any]


def is_array(value: Any) -> bool:
    """Tell whether a value is an array that can be watched: numbers, in a plain array."""
    kind: Any = type(value)
    if kind is np.ndarray or kind is np.memmap or issubclass(kind, np.generic):
        return value.dtype.kind in "biufcV" and value.dtype.names is None
    try:
        return _is_array_type(kind, value) and _is_dense(value)
    except Exception:  # noqa: BLE001  a proxy may raise at any question
        return False


@lru_cache(maxsize=1024)
def _known(kind: type) -> bool | None:
    if issubclass(kind, np.ndarray | TrackedArray | type):
        return False
    # What stores some of its elements only is no array to watch: its functions take no other.
    if hasattr(kind, "nnz") or hasattr(kind, "todense"):
        return False
    if kind.__module__ == "builtins":
        return False
    return None


_types: dict[type, bool] = {}


def _is_array_type(kind: type, value: Any) -> bool:
    known = _known(kind)
    if known is not None:
        return known
    answer = _types.get(kind)
    if answer is None:
        answer = bool(array_api_compat.is_array_api_obj(value)) and hasattr(value, "dtype")
        if len(_types) < 1024:
            _types[kind] = answer
    return answer


def _is_dense(value: Any) -> bool:
    """Tell whether the elements lie in strides, where the type alone does not say so."""
    layout = str(getattr(value, "layout", None))
    nested = getattr(value, "is_nested", False)
    return not nested and not any(word in layout for word in _PACKED)


def change(value: Any, name: str, wanted: Callable[[Any], bool], new: Change) -> Any:
    """Replace arrays in a container; what can be changed in place keeps its identity.

    Lists, dicts and dataclasses are changed where they are, tuples are made anew, and anything
    else is left alone.

    Args:
        value: An array or a container.
        name: What to call it; parts are called ``name[0]``, ``name['key']``, ``name.field``.
        wanted: Which leaves to replace.
        new: Gives the replacement of a leaf and its name.
    """
    return _Changing(wanted, new).change(value, name)


class _Changing:
    """Walk one value once."""

    def __init__(self, wanted: Callable[[Any], bool], new: Change) -> None:
        self.wanted, self.new = wanted, new
        self.seen: dict[int, Any] = {}

    def change(self, value: Any, name: str) -> Any:
        if self.wanted(value):
            return self.new(value, name)
        kind: Any = type(value)
        if id(value) in self.seen:
            return self.seen[id(value)]
        if kind in _MUTABLE:
            self.seen[id(value)] = value
            pairs = list(value.items()) if issubclass(kind, dict) else list(enumerate(value))
            for key, item in pairs:
                changed = self.change(item, f"{name}[{shown(key)}]")
                if changed is not item:
                    value[key] = changed
            return value
        if issubclass(kind, tuple):
            return self._tuple(value, kind, name)
        if is_dataclass(kind):
            self.seen[id(value)] = value
            for field in fields(value):
                with suppress(Exception):  # a field may be computed, and may fail
                    item = getattr(value, field.name, None)
                    changed = self.change(item, f"{name}.{field.name}")
                    if changed is not item:
                        object.__setattr__(value, field.name, changed)
            return value
        return value

    def _tuple(self, value: Any, kind: Any, name: str) -> Any:
        names = getattr(kind, "_fields", None)
        parts = [f".{field}" for field in names] if names else [f"[{i}]" for i in range(len(value))]
        items = [self.change(x, name + part) for x, part in zip(value, parts, strict=True)]
        if all(one is other for one, other in zip(items, value, strict=True)):
            return value
        return kind(*items) if names else kind(items)


def copied(value: Any) -> Any:
    """Copy the containers of an argument; what is watched in them is an array again."""
    return mapped(value, lambda x: x._raw if is_tracked(x) else x)


# How deep in the objects of a result a tracked array is looked for, and among how many.
_DEPTH, _MANY = 3, 1000


def unwrap(value: Any, depth: int = _DEPTH) -> Any:
    """Put the plain arrays back in the place of tracked ones, in objects and subclasses too.

    Args:
        value: Anything.
        depth: How many objects deep to look into attributes.
    """
    return _Unwrapping(depth).unwrap(value, 0)


class _Unwrapping:
    """Walk one value once; nothing of the user's own code is run."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.seen: dict[int, Any] = {}

    def unwrap(self, value: Any, depth: int) -> Any:
        if is_tracked(value):
            return value._raw
        kind: Any = type(value)
        if id(value) in self.seen:
            return self.seen[id(value)]
        if kind.__module__ == "builtins" and kind not in (dict, list, tuple, set):
            return value
        if depth and (len(self.seen) > _MANY or kind.__module__.startswith("anynan.")):
            return value
        self.seen[id(value)] = value
        with suppress(Exception):  # what cannot be changed stays as it is
            if issubclass(kind, tuple):
                return self._tuple(value, kind, depth)
            self._inside(value, kind, depth)
        return value

    def _tuple(self, value: Any, kind: Any, depth: int) -> Any:
        items = [self.unwrap(item, depth) for item in value]
        if all(one is other for one, other in zip(items, value, strict=True)):
            return value
        made = kind(*items) if hasattr(kind, "_fields") else kind(items)
        self.seen[id(value)] = made
        return made

    def _inside(self, value: Any, kind: Any, depth: int) -> None:
        sized = issubclass(kind, dict | list | deque | set | np.ndarray)
        if depth and sized and kind.__len__(value) > _MANY:
            return  # data that the object keeps, and that is not walked every call
        if issubclass(kind, dict):
            for key, item in list(dict.items(value)):
                changed = self.unwrap(item, depth)
                if changed is not item:
                    dict.__setitem__(value, key, changed)
        elif issubclass(kind, list | deque):
            base: Any = list if issubclass(kind, list) else deque
            for i, item in enumerate(list(base.__iter__(value))):
                changed = self.unwrap(item, depth)
                if changed is not item:
                    base.__setitem__(value, i, changed)
        elif issubclass(kind, set):
            for item in [item for item in set.__iter__(value) if is_tracked(item)]:
                set.discard(value, item)
                set.add(value, item._raw)
        elif issubclass(kind, np.ndarray) and value.dtype.hasobject and not value.dtype.names:
            for place in np.ndindex(value.shape):
                if is_tracked(value[place]):
                    value[place] = value[place]._raw
            return
        own = is_dataclass(kind)  # a container, however deep
        if (own or depth < self.depth) and not sized:
            for name, item in stored(value):
                changed = self.unwrap(item, depth if own else depth + 1)
                if changed is not item:
                    object.__setattr__(value, name, changed)


def silent(_: str) -> None:
    """Say nothing of what a walk leaves out: it is said where it is read."""
