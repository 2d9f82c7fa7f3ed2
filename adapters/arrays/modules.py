"""A library whose functions take only its own arrays: in a second run they take stand-ins, too."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock
from types import ModuleType
from typing import Any

import array_api_compat
import numpy as np

from anynan._arrays.access import namespace
from anynan._base.context import running
from anynan._base.patches import Patches
from anynan._base.sources import is_library
from anynan.arrays.namespaces import recording
from anynan.arrays.tracked import is_tracked, strip


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


class _Making:
    """Stand for a function of NumPy's that makes an array of no other.

    What the program's own code makes of floats is under watch, then.
    """

    def __init__(self, real: Any, name: str) -> None:
        self._real, self._name = real, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tape = running.get()
        if tape is None or tape.closed or is_library(sys._getframe(1).f_code.co_filename):
            return self._real(*args, **kwargs)
        made = tape.operate(self._name, self._real, args, kwargs)
        if is_tracked(made):
            return made if made.dtype.kind in "fc" else made._raw
        return _Drawing(made) if isinstance(made, np.random.Generator) else made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Drawing:
    """Stand for a generator: what it draws is under watch."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._generator, name)
        return _Making(value, name) if callable(value) else value


_MAKING = (
    "array", "asarray", "zeros", "ones", "full", "empty", "eye", "identity", "linspace", "arange",
    "logspace", "geomspace", "tri", "fromfunction", "fromiter", "frombuffer", "loadtxt",
    "genfromtxt", "load",
)  # fmt: skip
_DRAWING = (
    "default_rng", "rand", "randn", "random", "random_sample", "normal", "standard_normal",
    "uniform", "exponential", "gamma", "beta", "multivariate_normal", "poisson", "lognormal",
)  # fmt: skip
_one = RLock()


@contextmanager
def taking_stand_ins(arrays: list[Any], *, making: bool = False) -> Iterator[None]:
    """Have the functions of the arrays' libraries take stand-ins where code calls them by module.

    Args:
        arrays: What the code is given. Arrays with ``__array_function__`` need none of it.
        making: Have NumPy's own that make arrays give stand-ins to the program's code.
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
        for module, names in ((np, _MAKING), (np.random, _DRAWING)) if making else ():
            for name in names:
                patches.put(module, name, _Making(getattr(module, name), name))
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
