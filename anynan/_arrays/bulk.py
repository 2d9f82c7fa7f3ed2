"""Many small things at once: numbers in a list, and a table's columns, get no look each."""

import math
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from anynan._arrays.containers import shown
from anynan._arrays.probe import probe

_NUMBERS = frozenset({float, np.float64, np.float32, np.float16})
_PASSED_OVER = frozenset({int, bool, str, bytes, type(None)})
_CELLS = 2**21  # of a table that are brought together at once


def is_finite(x: Any) -> bool:
    """Tell whether ``x`` is a plain number that is finite; False for all else."""
    return type(x) in _NUMBERS and math.isfinite(x)


def left(x: Any) -> Iterator[tuple[str, Any]] | None:
    """Open a container of which much is cleared at once; None for any other.

    Args:
        x: A container or anything else.

    Returns:
        What is left of it to look at, and how its path goes on: nothing of a list, tuple or dict
        of finite numbers, of a table the columns that are not known to be finite.

    Example:
        >>> from anynan._arrays.bulk import left
        >>> list(left([1.0, 2.0, "text"])), left([1.0, float("nan")])
        ([], None)
    """
    kind: Any = type(x)
    with suppress(Exception):  # another thread writes into it, or a table of its own kind
        if kind is list or kind is tuple:
            return iter(()) if _are_finite(x) else None
        if kind is dict:
            return iter(()) if _are_finite(x.values()) else None
        if _is_table(kind):
            return _columns(x)
    return None


def _are_finite(items: Collection[Any]) -> bool:
    kinds = set(map(type, items))
    if not kinds <= _NUMBERS:
        if not kinds <= _NUMBERS | _PASSED_OVER:
            return False
        items = [item for item in items if type(item) in _NUMBERS]
    return all(map(math.isfinite, items))


@lru_cache(maxsize=1024)
def _is_table(kind: type) -> bool:
    return all(hasattr(kind, name) for name in ("__dataframe__", "iloc", "items", "dtypes"))


def _columns(x: Any) -> Iterator[tuple[str, Any]] | None:
    """Clear columns of plain floats together, so many at a time that no large copy is made."""
    kinds = list(x.dtypes)
    floats = [i for i, kind in enumerate(kinds) if isinstance(kind, np.dtype) and kind.kind == "f"]
    if len(floats) < 2:
        return None
    cleared: set[int] = set()
    many = max(1, _CELLS // max(1, len(x)))
    for kind in {kinds[i] for i in floats}:  # brought together, two would be widened
        alike = [i for i in floats if kinds[i] == kind]
        for start in range(0, len(alike), many):
            some = alike[start : start + many]
            span = probe((x if len(some) == len(kinds) else x.iloc[:, some]).to_numpy().T)
            if span is None or all(map(math.isfinite, span)):
                cleared.update(some)
    return _others(x, cleared)


def _others(x: Any, cleared: set[int]) -> Iterator[tuple[str, Any]]:
    for i, (name, kind) in enumerate(zip(x.columns, x.dtypes, strict=True)):
        plain = isinstance(kind, np.dtype) and kind.kind in "biumM"
        if i not in cleared and not plain:
            yield f"[{shown(name)}]", x.iloc[:, i]
