"""Arrays in the attributes of objects: what a call wrote there leaves it as a result does."""

import math
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import numpy as np

from anynan._arrays.containers import attributes, leaves
from anynan._reach import is_own
from anynan.arrays.records import is_finite
from anynan.arrays.trackable import is_array, silent, unwrap
from anynan.arrays.tracked import is_tracked

# Items of a container in an attribute; one that holds more is data, and is not walked every call.
MANY = 64
_PLAIN = {np.ndarray}
PRODUCT = 10_000  # elements: above, OpenBLAS wakes its pool of threads
FLOATS = (np.dtype(np.float64), np.dtype(np.float32))


class State:
    """Hold what the objects that a call was given had in their attributes when it began.

    Args:
        fn: The tracked function; what it is bound to is looked at as well.
        given: The arguments by name.
        near: Tells whether an array can be looked at without a wait for a device.

    Attributes:
        looked: Whether the objects held any array when the call ended.
    """

    def __init__(
        self, fn: Callable[..., Any], given: list[tuple[str, Any]], near: Callable[[Any], bool]
    ) -> None:
        self._objects = list(given)
        if type(fn) is MethodType:
            self._objects.append(("self", fn.__self__))
        self._near, self.looked = near, False
        arrays = list(self._arrays(self._objects))
        with np.errstate(all="ignore"):
            # The arrays are kept: an id may be used again once one is gone.
            self._before = {id(x): (x, self._is_clean(x)) for _, _, x in arrays}

    def corrupted(self, result: Any) -> Iterator[tuple[str, Any]]:
        """Yield the arrays in attributes that this call made, or made bad.

        Of an object of a library's class only what was recorded is yielded: a fitted model may
        hold NaN and Inf by design.

        Args:
            result: What the function returned.
        """
        results = [("result", result)]
        if type(result) in (tuple, list) and len(result) <= MANY:
            results = [(f"result[{i}]", item) for i, item in enumerate(result)]
        elif type(result) is dict and len(result) <= MANY:
            results = [(f"result[{key!r}]", item) for key, item in result.items()]
        arrays: dict[int, tuple[str, Any, Any]] = {}
        for path, owner, x in self._arrays([*self._objects, *results]):
            arrays.setdefault(id(x), (path, owner, x))
        self.looked = bool(arrays)
        with np.errstate(all="ignore"):
            bad = [
                key for key, (_, _, x) in arrays.items() if is_tracked(x) or not self._is_clean(x)
            ]
        for key in bad:
            path, owner, x = arrays[key]
            known = self._before.get(key)
            if is_tracked(x) or (known[1] if known is not None else is_own(type(owner))):
                yield path, x

    def _is_clean(self, x: Any) -> bool:
        """Tell it of one array, where NumPy's errors are ignored."""
        if type(x) is np.ndarray:
            return (x.dtype in FLOATS and squares(x) < math.inf) or is_finite(x)
        return is_tracked(x) or not self._near(x) or is_finite(x)

    def unwrap(self) -> None:
        """Leave no tracked array behind."""
        for _, value in self._objects:
            unwrap(value)

    def _arrays(self, objects: list[tuple[str, Any]]) -> Iterator[tuple[str, Any, Any]]:
        for name, value in objects:
            for path, item in attributes(value, name):
                if is_tracked(item) or is_array(item):
                    yield path, value, item
                elif type(item) not in (list, tuple, dict) or len(item) > MANY:
                    continue
                elif type(item) is not dict and set(map(type, item)) == _PLAIN:
                    yield from ((f"{path}[{i}]", value, x) for i, x in enumerate(item))
                else:
                    for inner, x in leaves(item, path, silent):
                        if is_tracked(x) or is_array(x):
                            yield inner, value, x


def squares(x: Any) -> float:
    """Give the sum of an array's squares; Inf where one sum cannot tell that it is finite."""
    if x.size > PRODUCT and not (x.flags.forc and x.flags.aligned):
        return math.inf  # it would be copied
    flat = x.ravel("K")
    if flat.size <= PRODUCT:
        return float(flat.dot(flat))
    total = 0.0
    for start in range(0, flat.size, PRODUCT):
        piece = flat[start : start + PRODUCT]
        total += float(piece.dot(piece))
        if not total < math.inf:
            break
    return total
