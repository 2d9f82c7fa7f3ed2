"""A call of plain arrays: what it takes and what it returns is cleared by one sum of each."""

import math
from collections.abc import Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import numpy as np

from anynan._recorder.errorlog import ErrorLog
from anynan._recorder.reached import SMALL, mark
from anynan.events import Event

if TYPE_CHECKING:
    from anynan._recorder.ends import Ends

_PRODUCT = 10_000  # elements: above, OpenBLAS wakes its pool of threads
_FLOATS = (np.dtype(np.float64), np.dtype(np.float32))
_NUMBERS = (float, np.float64, np.float32)
_OTHERS = (int, bool, str, type(None), np.bool_, np.int64)


class Light:
    """Hold the little that a call of plain arrays and numbers began with.

    While the call runs it stands where a tape would: a check inside makes one of it.

    Args:
        ends: Who runs the call.
        fn: The function.
        args: Its arguments.
        kwargs: Those by name.

    Attributes:
        closed: True: what a namespace makes is the library's own.
        held: Each array that was given, its sum of squares (NaN if it holds no floats), and a
            copy of a small one, of a larger one some elements.
    """

    __slots__ = ("_ends", "args", "closed", "context", "fn", "held", "kwargs", "log")

    def __init__(
        self, ends: "Ends", fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._ends, self.fn, self.args, self.kwargs = ends, fn, args, kwargs
        self.closed = True
        self.context = copy_context()
        self.log = ErrorLog(self.context)
        self.held: list[tuple[Any, float, Any]] = []

    def begins_clean(self) -> bool:
        """Look at the arguments; False where one of them wants more than one sum."""
        values = (*self.args, *self.kwargs.values()) if self.kwargs else self.args
        held = self.held
        for x in values:
            kind = type(x)
            if kind is np.ndarray:
                dtype = x.dtype
                if dtype in _FLOATS:
                    square = squares(x)
                    if not square < math.inf:
                        return False
                elif dtype.kind in "biu":
                    square = math.nan
                else:
                    return False
                held.append((x, square, x.copy() if x.nbytes <= SMALL else mark(x)))
            elif kind in _NUMBERS:
                if x - x != 0:
                    return False
            elif kind not in _OTHERS:
                return False
        return True

    def ends_clean(self, result: Any, squared: list[tuple[Any, float]]) -> bool:
        """Look at the arguments once more, which the call may have written into, and the result.

        Args:
            result: What the call returned.
            squared: Takes the arrays of the result with their sums of squares.
        """
        for x, square, _ in self.held:
            if square == square and not squares(x) < math.inf:
                return False
        if type(result) is tuple:
            return len(result) <= 16 and all(_is_clean(x, squared) for x in result)
        return _is_clean(result, squared)

    def take(self, event: Event, array: Any, later: int) -> bool:
        """Report what a direct check inside found, with all that a tape knows."""
        return self._ends.deepened(self).take(event, array, later)


def _is_clean(x: Any, squared: list[tuple[Any, float]]) -> bool:
    kind = type(x)
    if kind is np.ndarray and x.dtype in _FLOATS:
        square = squares(x)
    elif kind in _NUMBERS:
        square = float(x) ** 2 if abs(x) < 1e150 else math.inf
    else:
        return x is None or kind in _OTHERS
    squared.append((x, square))
    return square < math.inf


def squares(x: Any) -> float:
    """Give the sum of an array's squares; Inf where one sum cannot tell that it is finite."""
    if not x.flags.c_contiguous or not x.flags.aligned:
        return math.inf
    flat, dot = x.ravel(), np.dot
    if flat.size <= _PRODUCT:
        return float(dot(flat, flat))
    total = 0.0
    for start in range(0, flat.size, _PRODUCT):
        piece = flat[start : start + _PRODUCT]
        total += float(dot(piece, piece))
        if not total < math.inf:
            break
    return total
