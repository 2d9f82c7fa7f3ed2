"""Which values a tracked function's arrays are, and how containers of them are opened."""

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import array_api_compat
import numpy as np

from anynan.recording.tracked import TrackedArray

_MUTABLE = (dict, list, OrderedDict, defaultdict)
Change = Callable[[Any, str], Any]


def is_array(value: Any) -> bool:
    """Tell whether a value is an array that can be watched: numbers, in a plain array."""
    kind = type(value)
    if kind is np.ndarray or issubclass(kind, np.generic):
        return value.dtype.kind in "biufcV" and value.dtype.names is None
    return _is_array_type(kind, value)


@lru_cache(maxsize=1024)
def _known(kind: type) -> bool | None:
    if issubclass(kind, np.ndarray | TrackedArray | type):
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
    return _change(value, name, wanted, new, {})


def _change(
    value: Any, name: str, wanted: Callable[[Any], bool], new: Change, seen: dict[int, Any]
) -> Any:
    if wanted(value):
        return new(value, name)
    kind = type(value)
    if id(value) in seen:
        return seen[id(value)]
    if kind in _MUTABLE:
        seen[id(value)] = value
        pairs = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        for key, item in pairs:
            changed = _change(item, f"{name}[{key!r}]", wanted, new, seen)
            if changed is not item:
                value[key] = changed
        return value
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", None)
        names = (
            [f"{name}.{field}" for field in fields]
            if fields is not None
            else [f"{name}[{i}]" for i in range(len(value))]
        )
        items = [_change(x, n, wanted, new, seen) for x, n in zip(value, names, strict=True)]
        if all(one is other for one, other in zip(items, value, strict=True)):
            return value
        return kind(*items) if fields is not None else kind(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        seen[id(value)] = value
        for field in dataclasses.fields(value):
            item = getattr(value, field.name, None)
            changed = _change(item, f"{name}.{field.name}", wanted, new, seen)
            if changed is not item:
                object.__setattr__(value, field.name, changed)
        return value
    return value


def unwrap(value: Any) -> Any:
    """Put the plain arrays back in the place of tracked ones."""
    return change(value, "", lambda x: isinstance(x, TrackedArray), lambda x, _: x._raw)
