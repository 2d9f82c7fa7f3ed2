"""Walk nested containers and name every array in them by its path.

Containers are the user's, and so is the code that opens them: whatever it raises is told, and
stops neither the walk nor the program.
"""

import copy
import operator
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
    ValuesView,
)
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import Any, Literal

from anynan._arrays import messages
from anynan._base.notices import warn
from anynan.errors import reason

Role = Literal[
    "array", "mapping", "columns", "named", "dataclass", "sequence", "nothing", "unknown"
]
# Is told of what could not be opened: one sentence.
Tell = Callable[[str], None]
# Gives what a framework's own container is made of, and how the path goes on; None for all else.
Parts = Callable[[Any], Iterable[tuple[str, Any]] | None]

_MISSING = object()
_NOTHING = (str, bytes, bytearray, memoryview, range, type, int, type(None))


def leaves(
    x: Any, name: str, tell: Tell | None = None, *, objects: bool = False,
    parts: Parts | None = None, flat: bool = False,
) -> Iterator[tuple[str, Any]]:  # fmt: skip
    """Yield the arrays and Python floats in ``x``, each with its path.

    Mappings, sequences, sets, named tuples and dataclasses are opened, at any depth; each
    container is opened once, so that one which holds itself does no harm. Strings, integers,
    None and objects that hold no array in plain sight are passed over.

    Args:
        x: An array or a nested container of arrays.
        name: What to call ``x``; the paths begin with it.
        tell: Is told of a container that raises while it is opened; a warning by default.
        objects: Look into the attributes of other objects, too, one level deep.
        parts: Opens what only a framework can.
        flat: Walk as frameworks flatten arguments: mappings by key, a container in two places
            twice, and no dataclass.

    Yields:
        The path (``batch['image'][0]``, ``batch.mask``) and the array.

    Example:
        >>> from anynan._arrays.containers import leaves
        >>> list(leaves({"loss": 0.5, "aux": [1.5, "text"]}, "out"))
        [("out['loss']", 0.5), ("out['aux'][0]", 1.5)]
    """
    tell = _warn if tell is None else tell
    inner = _open(x, name, tell, parts, flat)
    if inner is None:
        yield from _leaf(x, name, objects=objects)
        return
    # The containers are kept, not only their ids: an id may be used again once one is gone.
    seen = {id(x): x}
    stack = [(x, inner)]
    while stack:
        for path, item in stack[-1][1]:
            inner = _open(item, path, tell, parts, flat)
            if inner is None:
                yield from _leaf(item, path, objects=objects)
            elif id(item) not in seen:
                seen[id(item)] = item
                stack.append((item, inner))
                break
        else:
            done, _ = stack.pop()
            if flat:
                del seen[id(done)]


def _leaf(x: Any, name: str, *, objects: bool) -> Iterator[tuple[str, Any]]:
    if is_leaf(x):
        yield name, x
    elif objects:
        yield from ((path, item) for path, item in attributes(x, name) if is_leaf(item))


def attributes(x: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what an object that is no container holds in its attributes, one level deep.

    No code of the object's runs: attributes that are computed are not there.

    Args:
        x: Anything; functions, modules, classes and what ``leaves`` opens have none.
        name: What to call ``x``.

    Example:
        >>> from types import SimpleNamespace
        >>> from anynan._arrays.containers import attributes
        >>> list(attributes(SimpleNamespace(loss=0.5), "out"))
        [('out.loss', 0.5)]
    """
    if _role(x) == "unknown":
        for key, item in stored(x):
            yield f"{name}.{key}", item


def stored(x: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that an object of a class of Python's own stores, by name."""
    kind: Any = type(x)
    if kind.__module__ == "builtins" or issubclass(kind, type):
        return
    yield from list((namespace(x) or {}).items())
    for owner in kind.__mro__:
        slots = owner.__dict__.get("__slots__", ())
        for key in (slots,) if isinstance(slots, str) else slots:
            slot = owner.__dict__.get(key)
            if type(slot).__name__ != "member_descriptor":
                continue
            try:
                item = slot.__get__(x, kind)
            except AttributeError:  # empty
                continue
            yield key, item


def namespace(value: Any) -> dict[str, Any] | None:
    """Return an object's attributes as they are stored; None where it has no such dict."""
    try:
        held = object.__getattribute__(value, "__dict__")
    except Exception:  # noqa: BLE001  it has none, or keeps it to itself
        return None
    return held if type(held) is dict else None


def mapped(value: Any, change: Callable[[Any], Any], made: dict[int, Any] | None = None) -> Any:
    """Make lists, tuples and dicts anew, with each thing in them changed.

    A tuple in which nothing changes stays. What is in two places is in two places of the copy, and
    what holds itself does so there.

    Args:
        value: What to go through.
        change: Gives what to put in the place of whatever is none of these.
        made: What was made so far, by the identity of what it was made of.

    Raises:
        RecursionError: If it is deeper than Python's stack.

    Example:
        >>> from anynan._arrays.containers import mapped
        >>> mapped({"x": [1, (2,)]}, str)
        {'x': ['1', ('2',)]}
    """
    kind: Any = type(value)
    if kind not in (list, tuple, dict) and not (issubclass(kind, tuple) and hasattr(kind, "_make")):
        return change(value)
    made = {} if made is None else made
    if id(value) in made:
        return made[id(value)]
    if kind is list:
        filled: list[Any] = made.setdefault(id(value), [])
        filled += [mapped(item, change, made) for item in value]
    elif kind is dict:
        named: dict[Any, Any] = made.setdefault(id(value), {})
        named.update({key: mapped(item, change, made) for key, item in value.items()})
    else:
        items = [mapped(item, change, made) for item in value]
        if all(map(operator.is_, items, value)):  # a class of the user's may hold more than these
            made[id(value)] = value
        else:
            made[id(value)] = tuple(items) if kind is tuple else kind._make(items)
    return made[id(value)]


def unpacked(x: Any) -> tuple[dict[Any, Any], Callable[[dict[Any, Any]], Any]] | None:
    """Give what an object is made of, and what makes another of such parts; None for most.

    Args:
        x: A dataclass, or a mapping that is no plain dict, as batches of libraries are.
    """
    if isinstance(x, MutableMapping):

        def filled(parts: dict[Any, Any]) -> Any:
            made = copy.copy(x)
            for key, item in parts.items():  # some have no update()
                made[key] = item
            return made

        return dict(x), filled
    if is_dataclass(x) and not isinstance(x, type):
        return {f.name: getattr(x, f.name) for f in fields(x) if f.init}, lambda parts: replace(
            x, **parts
        )
    return None


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Make containers anew as ``mapped`` does, and those that ``unpacked`` opens.

    Example:
        >>> from collections import UserDict
        >>> from anynan._arrays.containers import rebuilt
        >>> rebuilt([UserDict(x=1)], str)
        [{'x': '1'}]
    """

    def changed(x: Any) -> Any:
        found = unpacked(x)
        if found is None:
            return change(x)
        parts, make = found
        return make({key: rebuilt(item, change) for key, item in parts.items()})

    return mapped(value, changed)


def is_leaf(x: Any) -> bool:
    """Tell whether ``x`` is an array or a Python number that could be bad."""
    kind = _role(x)
    if kind == "unknown":
        # An object may carry in itself what array classes declare, or fail at every question.
        try:
            return hasattr(x, "dtype") and isinstance(getattr(x, "shape", None), tuple)
        except Exception:  # noqa: BLE001  a proxy, a remote handle
            return False
    return kind == "array"


def is_container(x: Any) -> bool:
    """Tell whether ``x`` is something that ``leaves`` opens."""
    return _role(x) in ("mapping", "columns", "named", "dataclass", "sequence")


def shown(key: Any) -> str:
    """Return the ``repr`` of a key, or what stands for one that has none."""
    try:
        # To write out an array that is a key, as a weight in an optimizer's state, would read it.
        return f"<{type(key).__name__}>" if hasattr(key, "shape") else repr(key)
    except Exception:  # noqa: BLE001  a program's own class may do anything
        return f"<{type(key).__name__}>"


def _warn(text: str) -> None:
    warn(f"anynan: {text}")


def _role(x: Any) -> Role:
    kind: Any = type(x)
    try:
        found = _role_of(kind)
        # What a framework wraps around a container of the user's to see it change.
        if found == "unknown" and any(base.__name__ == "ObjectProxy" for base in kind.__mro__):
            kind = type(x.__wrapped__)
            found = _role_of(kind)
    except Exception:  # noqa: BLE001  a metaclass may raise as well
        return "unknown"
    return found


def _has(kind: type, *names: str) -> bool:
    return all(hasattr(kind, name) for name in names)


@lru_cache(maxsize=1024)
def _role_of(kind: type) -> Role:
    """Sort a type into what the walk does with it."""
    # A sparse array may be a mapping of its elements.
    if _has(kind, "tocoo", "nnz"):
        return "array"
    # Mappings go first: model outputs exist that are dicts and dataclasses at once.
    if issubclass(kind, Mapping):
        return "mapping"
    if issubclass(kind, tuple):
        return "named" if hasattr(kind, "_fields") else "sequence"
    if issubclass(kind, list):
        return "sequence"
    if issubclass(kind, float | complex):
        return "array"
    if issubclass(kind, _NOTHING):
        return "nothing"
    # The columns of a table differ in dtype: as one array they would be objects.
    if _has(kind, "__dataframe__", "items"):
        return "mapping"
    if _has(kind, "get_columns", "columns") or _has(kind, "__dataframe__", "column_names"):
        return "columns"
    if hasattr(kind, "__array_namespace__") or hasattr(kind, "__array__"):
        return "array"
    if hasattr(kind, "__dataclass_fields__"):
        return "dataclass"
    if _has(kind, "dtype", "shape"):
        return "array"
    if issubclass(kind, Sequence | AbstractSet | ValuesView):
        return "sequence"
    return "unknown"


def _open(
    x: Any, path: str, tell: Tell, parts: Parts | None, flat: bool
) -> Iterator[tuple[str, Any]] | None:
    own = None if parts is None else parts(x)
    if own is not None:
        return ((f"{path}{rest}", item) for rest, item in own)
    kind = _role(x)
    if kind in ("array", "nothing", "unknown") or (flat and kind == "dataclass"):
        return None
    return _each(x, path, kind, tell, flat)


def _named(x: Any) -> Iterator[tuple[str, Any]]:
    return ((column.name, column) for column in x.get_columns())


def _each(x: Any, path: str, kind: Role, tell: Tell, flat: bool) -> Iterator[tuple[str, Any]]:
    """Yield what a container holds, as far as it lets itself be read."""
    try:
        if kind == "mapping":
            for key, item in sorted(x.items(), key=itemgetter(0)) if flat else x.items():
                yield f"{path}[{shown(key)}]", item
        elif kind == "columns":
            named = hasattr(x, "column_names")  # where a column does not know its own
            columns = zip(x.column_names, x.columns, strict=True) if named else _named(x)
            for name, column in columns:
                yield f"{path}[{shown(name)}]", column
        elif kind == "sequence":
            for index, item in enumerate(x):
                yield f"{path}[{index}]", item
        elif kind == "named":
            for name, item in zip(x._fields, x, strict=False):
                yield f"{path}.{name}", item
        else:
            for field in fields(x):
                item = getattr(x, field.name, _MISSING)
                if item is not _MISSING:
                    yield f"{path}.{field.name}", item
    except Exception as error:  # noqa: BLE001  the container's own code
        rest = f"the rest of {path} (a {type(x).__qualname__})"
        tell(messages.UNLOOKED(what=rest, error=reason(error)))
