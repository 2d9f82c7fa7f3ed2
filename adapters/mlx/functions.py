"""Which of MLX's functions and methods are operations, and where modules hold them."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import mlx.core as mx

from anynan.mlx.names import METHODS, NO_OPERATIONS, OPERATORS


def functions() -> Iterator[tuple[ModuleType, str, str]]:
    """Yield the functions that are operations: module, name, and name with the module's."""
    kind = type(mx.exp)
    for room in (mx, mx.linalg, mx.fft, mx.fast, mx.random):
        prefix = "" if room is mx else f"{room.__name__.rpartition('.')[2]}."
        for name, value in list(vars(room).items()):
            other = name in NO_OPERATIONS or (room is mx.random and name == "split")
            if isinstance(value, kind) and not other and name[0] != "_":
                yield room, name, prefix + name


def holders(wanted: set[int]) -> Iterator[tuple[ModuleType, str, Any]]:
    """Yield where modules hold some functions: MLX's own, and those that import them by name.

    Args:
        wanted: The functions, by id.
    """
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and not module.__name__.startswith("anynan."):
            for name, value in list(vars(module).items()):
                if id(value) in wanted:
                    yield module, name, value


def methods() -> Iterator[tuple[str, str]]:
    """Yield the array's methods that are operations, and the names of those."""
    yield from ((name, name) for name in sorted(METHODS))
    for name in OPERATORS:
        for form in (f"__{name}__", f"__r{name}__"):
            if hasattr(mx.array, form):
                yield form, form
    yield from ((form, form) for form in ("__neg__", "__abs__", "__getitem__"))


def swapped(real: Callable[..., Any]) -> Callable[..., Any]:
    """Give a reflected operator that takes its operands in the order in which they are written."""
    return partial(_swapped, real)


def _swapped(real: Callable[..., Any], a: Any, b: Any) -> Any:
    return real(b, a)
