"""A library whose functions take only its own arrays: in a second run they take stand-ins, too."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock
from types import ModuleType
from typing import Any

import array_api_compat

from anynan._arrays.access import namespace
from anynan._reach.patches import Patches
from anynan._recorder.namespaces import recording
from anynan._recorder.tracked import strip


class _Either:
    """Stand for a function of a library: recorded where it is given a stand-in, else itself."""

    def __init__(self, real: Any, recorded: Any) -> None:
        self._real, self._recorded = real, recorded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found: list[Any] = []
        strip([args, kwargs], found)
        return (self._recorded if found else self._real)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


_one = RLock()


@contextmanager
def taking_stand_ins(arrays: list[Any]) -> Iterator[None]:
    """Have the functions of the arrays' libraries take stand-ins where code calls them by module.

    Args:
        arrays: What the code is given. Arrays with ``__array_function__`` need none of it.
    """
    if not _one.acquire(blocking=False):  # another thread's second run has them changed
        yield
        return
    with ExitStack() as end, Patches() as patches:
        end.callback(_one.release)
        for library in {name for x in arrays if (name := _library(x))}:
            for module in _public(library):
                space = recording(module)
                for name, real in list(vars(module).items()):
                    if callable(real) and not isinstance(real, type) and not name.startswith("_"):
                        patches.put(module, name, _Either(real, getattr(space, name)))
        yield


def _library(x: Any) -> str | None:
    """Name the package of an array's functions, None where they take foreign arrays."""
    xp = None if hasattr(type(x), "__array_function__") else namespace(x)
    if not isinstance(xp, ModuleType) or xp.__name__.startswith(array_api_compat.__name__):
        return None
    return xp.__name__.partition(".")[0]


def _public(library: str) -> list[ModuleType]:
    """List a library's modules that programs call."""
    found = [(name.split("."), module) for name, module in list(sys.modules.items())]
    return [
        module
        for (root, *rest), module in found
        if root == library and isinstance(module, ModuleType)
        and not any(part.startswith("_") for part in rest)
    ]  # fmt: skip
