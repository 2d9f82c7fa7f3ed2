"""What a program looks at numbers by: it does so as before, and what is bad is remembered."""

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
import numpy as np
from jax import tree_util

from anynan._base.patches import Patches
from anynan._base.sources import is_library
from anynan.jax.eager import ARRAYS
from anynan.jax.everywhere.watch import Watch, place
from anynan.jax.messages import CHECKED_BY_PROGRAM

# How a program looks at a number.
READS = ("__float__", "__format__", "__repr__", "__str__", "item", "tolist")
# By what it asks NumPy whether numbers are finite, and what it is answered where one is not.
ASKS = {"isnan": True, "isinf": True, "isfinite": False}


def put_in(patches: Patches, watch: Watch) -> None:
    """Put stand-ins in the place of what a program looks at numbers by."""
    for array in ARRAYS:
        for name in READS:
            patches.change(array, name, functools.partial(_reading, watch))
        patches.change(array, "__bool__", functools.partial(_deciding, watch))
    patches.change(jax, "device_get", functools.partial(_fetching, watch))
    for name in (*ASKS, "asarray", "array"):
        patches.put(np, name, OfNumPy(getattr(np, name), watch))


class OfNumPy:
    """Stand for a function of NumPy's that a program asks by, or brings a number to the host.

    It is equal to the function, has all that it has, and looks at one number of JAX's alone.
    """

    def __init__(self, fn: Any, watch: Watch) -> None:
        self._fn, self._watch, self._bad = fn, watch, ASKS.get(fn.__name__)
        functools.update_wrapper(self, fn)
        self.__module__ = "numpy"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        out = self._fn(*args, **kwargs)
        x: Any = args[0] if args else None
        one = type(x) in ARRAYS and x.size == 1  # most that is asked for is no array of JAX's
        if one and self._bad is None:
            self._watch.was_fetched(x, out)
        elif one and bool(out.item()) is self._bad:
            self._watch.was_read(x, asked=True)
        return out

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Pass for it."""
        return type(self._fn)

    def __getattr__(self, name: str) -> Any:
        """Give what it has."""
        return getattr(self.__dict__["_fn"], name)

    def __eq__(self, other: object) -> bool:
        """Be what tables of functions have it as."""
        return other is self or other == self._fn

    def __hash__(self) -> int:
        """Be found in them."""
        return hash(self._fn)

    def __reduce__(self) -> str:
        """Leave nothing of ours in a file."""
        return str(self._fn.__name__)


def _fetching(watch: Watch, get: Callable[..., Any]) -> Callable[..., Any]:
    """Have the program bring arrays to the host as before, and remember a bad number."""

    def gets(*args: Any, **kwargs: Any) -> Any:
        out = get(*args, **kwargs)
        for x, host in zip(*map(tree_util.tree_leaves, (args, out)), strict=False):
            if isinstance(host, np.ndarray) and host.size == 1:
                watch.was_fetched(x, host)
        return out

    return gets


def _reading(watch: Watch, read: Callable[..., Any]) -> Callable[..., Any]:
    """Have the program look at a value as before, and remember a bad number with its line.

    An Inf that it prints may be what a search begins with.
    """

    def reads(x: Any, *args: Any) -> Any:
        out = read(x, *args)
        if isinstance(out, float):
            if out - out != 0:
                watch.was_read(x)
        elif isinstance(out, str) and x.size == 1 and ("nan" in out or "inf" in out):
            watch.was_read(x, made="nan" not in out)
        return out

    return reads


def _deciding(watch: Watch, decide: Callable[..., Any]) -> Callable[..., Any]:
    """Have the program decide as before, and remember where it did so by a bad number."""

    def decides(x: Any) -> Any:
        out = decide(x)
        frame = sys._getframe(1)
        if is_library(frame.f_code.co_filename):
            return out
        with suppress(Exception):  # it is looked for in what the program computed
            asked, one = watch.calls.asked(x) or (False, False)
            if one:
                watch.was_read(x, asked=True)
            elif asked:  # data may have gaps, which it fills
                watch.found.unwatched(CHECKED_BY_PROGRAM(place=place(frame)))
        return out

    return decides
