"""Which of MLX's functions and methods are operations, and where modules hold them."""

import sys
from collections.abc import Callable, Iterator
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
        held = getattr(module, "__dict__", None)
        own = str(getattr(module, "__name__", "")).startswith("anynan.")
        # Most modules hold none, and thousands are looked at in every run.
        if type(held) is dict and not own and not wanted.isdisjoint(map(id, held.values())):
            for name, value in list(held.items()):
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


class At:
    """Stand for ``x.at`` where operations are shown.

    Args:
        run: Runs an operation under a name: ``run(raw, real, args, kwargs)``.
        x: The array.
    """

    def __init__(self, run: Callable[..., Any], x: Any, index: Any = None) -> None:
        self._run, self._x, self._index = run, x, index

    def __getitem__(self, index: Any) -> "At":
        return At(self._run, self._x, index)

    def __getattr__(self, name: str) -> Any:
        real, index = getattr(mx.ArrayAt, name), self._index

        def update(value: Any) -> Any:
            def made(x: Any, y: Any) -> Any:
                return real(_AT(x)[index], y)

            return self._run(f"at.{name}", made, (self._x, value), {})

        return update


_AT = vars(mx.array)["at"].__get__
