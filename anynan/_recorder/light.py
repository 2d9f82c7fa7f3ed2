"""A call of plain arrays: what it takes and what it returns is cleared by one sum of each."""

import math
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any

import numpy as np

from anynan._recorder.errorlog import ErrorLog
from anynan._recorder.reached import SMALL, mark
from anynan.events import Event

if TYPE_CHECKING:
    from anynan._recorder.ends import Ends

_PRODUCT = 10_000  # elements: above, OpenBLAS wakes its pool of threads
_FLOATS = (np.dtype(np.float64), np.dtype(np.float32))
NUMBERS = (float, np.float64, np.float32)
_MANY = 16  # items of a tuple that is returned
_ARRAY = np.ndarray
_OTHERS = (int, bool, str, type(None), np.bool_, np.int64)


class Light:
    """Hold the little that a call of plain arrays and numbers began with.

    While the call runs it stands where a tape would: a check inside makes one of it. Its methods
    are few and long, since every call of a tracked function pays for each of them.

    Args:
        ends: Who runs the call.
        log: Takes NumPy's errors.
        context: As the call found it.
        fn: The function.
        args: Its arguments.
        kwargs: Those by name.

    Attributes:
        begins_clean: False where one of the arguments wants more than one sum.
        closed: True: what a namespace makes is the library's own.
        deepened: True once a check inside made more of it.
        held: Each array that was given, its sum of squares (NaN if it holds no floats), and a
            copy of a small one, of a larger one some elements.
        kinds: What the arguments are, whether a tuple was returned, and what it held: the letters
            of the dtypes of arrays, the types of all else. (A dtype itself is slow as a key.)
        squares: The sums of squares of the floats among them.
    """

    __slots__ = (
        "_ends", "args", "begins_clean", "context", "deepened", "fn", "held", "kinds", "kwargs",
        "log", "squares",
    )  # fmt: skip
    closed = True

    def __init__(
        self, ends: "Ends", log: ErrorLog, context: Context, fn: Callable[..., Any],
        args: tuple[Any, ...], kwargs: dict[str, Any],
    ) -> None:  # fmt: skip
        self._ends, self.log, self.context = ends, log, context
        self.fn, self.args, self.kwargs = fn, args, kwargs
        self.held: list[tuple[Any, float, Any]] = []
        self.kinds: list[Any] = []
        self.squares: list[float] = []
        self.begins_clean = self.deepened = False
        held, kinds, sums = self.held, self.kinds, self.squares
        for x in (*args, *kwargs.values()) if kwargs else args:
            kind = type(x)
            if kind is _ARRAY:
                dtype = x.dtype
                if dtype in _FLOATS:
                    short = x.ndim == 1 and x.size <= _PRODUCT
                    square = float(x.dot(x)) if short else squares(x)
                    if not square < math.inf:
                        return
                    sums.append(square)
                elif dtype.kind in "biu":
                    square = math.nan
                else:
                    return
                kinds.append(dtype.char)
                held.append((x, square, x.copy() if x.nbytes <= SMALL else mark(x)))
                continue
            if kind not in _OTHERS and (kind not in NUMBERS or x - x != 0):
                return
            kinds.append(kind)
        self.begins_clean = True

    def ends_clean(self, result: Any) -> bool:
        """Look at the arguments once more, which the call may have written into, and the result."""
        for x, square, _ in self.held:
            if square == square:
                short = x.ndim == 1 and x.size <= _PRODUCT
                if not (float(x.dot(x)) if short else squares(x)) < math.inf:
                    return False
        several = type(result) is tuple
        if several and len(result) > _MANY:
            return False
        kinds, sums = self.kinds, self.squares
        kinds.append(several)
        for x in result if several else (result,):
            kind = type(x)
            if kind is _ARRAY:
                dtype = x.dtype
                kinds.append(dtype.char)
                if dtype not in _FLOATS:
                    if dtype.kind in "biu":
                        continue
                    return False
                short = x.ndim == 1 and x.size <= _PRODUCT
                square = float(x.dot(x)) if short else squares(x)
            else:
                kinds.append(kind)
                if kind in _OTHERS:
                    continue
                if kind not in NUMBERS:
                    return False
                square = float(x) ** 2 if abs(x) < 1e150 else math.inf
            if not square < math.inf:
                return False
            sums.append(square)
        return True

    def take(self, event: Event, array: Any, later: int) -> bool:
        """Report what a direct check inside found, with all that a tape knows."""
        return self._ends.deepened(self).take(event, array, later)


def squares(x: Any) -> float:
    """Give the sum of an array's squares; Inf where one sum cannot tell that it is finite."""
    if x.size > _PRODUCT and not (x.flags.forc and x.flags.aligned):
        return math.inf  # it would be copied
    flat = x.ravel("K")
    if flat.size <= _PRODUCT:
        return float(flat.dot(flat))
    total = 0.0
    for start in range(0, flat.size, _PRODUCT):
        piece = flat[start : start + _PRODUCT]
        total += float(piece.dot(piece))
        if not total < math.inf:
            break
    return total
