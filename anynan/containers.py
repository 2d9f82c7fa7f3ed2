"""Walk nested containers and name every array in them by its path."""

from collections.abc import Iterator, Mapping, Sequence, ValuesView
from collections.abc import Set as AbstractSet
from dataclasses import fields
from functools import lru_cache
from typing import Any, Literal

Role = Literal[
    "array", "mapping", "columns", "named", "dataclass", "sequence", "nothing", "unknown"
]

_MISSING = object()
_NOTHING = (str, bytes, bytearray, memoryview, range, type, int, type(None))


def leaves(x: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the arrays and Python floats in ``x``, each with its path.

    Mappings, sequences, sets, named tuples and dataclasses are opened, at any depth; each
    container is opened once, so that one which holds itself does no harm. Strings, integers,
    None and objects that hold no array in plain sight are passed over.

    Args:
        x: An array or a nested container of arrays.
        name: What to call ``x``; the paths begin with it.

    Yields:
        The path (``batch['image'][0]``, ``batch.mask``) and the array.

    Example:
        >>> from anynan.containers import leaves
        >>> list(leaves({"loss": 0.5, "aux": [1.5, "text"]}, "out"))
        [("out['loss']", 0.5), ("out['aux'][0]", 1.5)]
    """
    inner = _open(x, name)
    if inner is None:
        if is_leaf(x):
            yield name, x
        return
    # The containers are kept, not only their ids: an id may be used again once one is gone.
    seen = {id(x): x}
    stack = [inner]
    while stack:
        for path, item in stack[-1]:
            inner = _open(item, path)
            if inner is None:
                if is_leaf(item):
                    yield path, item
            elif id(item) not in seen:
                seen[id(item)] = item
                stack.append(inner)
                break
        else:
            stack.pop()


def is_leaf(x: Any) -> bool:
    """Tell whether ``x`` is an array or a Python number that could be bad."""
    kind = _role(x)
    if kind == "unknown":
        # An object may carry in itself what array classes declare.
        return hasattr(x, "dtype") and isinstance(getattr(x, "shape", None), tuple)
    return kind == "array"


def is_container(x: Any) -> bool:
    """Tell whether ``x`` is something that ``leaves`` opens."""
    return _role(x) in ("mapping", "columns", "named", "dataclass", "sequence")


def _role(x: Any) -> Role:
    kind: Any = type(x)
    return _role_of(kind)


@lru_cache(maxsize=1024)
def _role_of(kind: type) -> Role:
    """Sort a type into what the walk does with it."""
    # A sparse array may be a mapping of its elements.
    if hasattr(kind, "tocoo") and hasattr(kind, "nnz"):
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
    if hasattr(kind, "__dataframe__") and hasattr(kind, "items"):
        return "mapping"
    if hasattr(kind, "get_columns") and hasattr(kind, "columns"):
        return "columns"
    if hasattr(kind, "__array_namespace__") or hasattr(kind, "__array__"):
        return "array"
    if hasattr(kind, "__dataclass_fields__"):
        return "dataclass"
    if hasattr(kind, "dtype") and hasattr(kind, "shape"):
        return "array"
    if issubclass(kind, Sequence | AbstractSet | ValuesView):
        return "sequence"
    return "unknown"


def _open(x: Any, path: str) -> Iterator[tuple[str, Any]] | None:
    kind = _role(x)
    if kind == "array":
        return None
    if kind == "mapping":
        return ((f"{path}[{key!r}]", item) for key, item in x.items())
    if kind == "columns":
        return ((f"{path}[{column.name!r}]", column) for column in x.get_columns())
    if kind == "sequence":
        return ((f"{path}[{index}]", item) for index, item in enumerate(x))
    if kind == "named":
        return ((f"{path}.{name}", item) for name, item in zip(x._fields, x, strict=False))
    if kind == "dataclass":
        return _attributes(x, path)
    return None


def _attributes(x: Any, path: str) -> Iterator[tuple[str, Any]]:
    for field in fields(x):
        item = getattr(x, field.name, _MISSING)
        if item is not _MISSING:
            yield f"{path}.{field.name}", item
