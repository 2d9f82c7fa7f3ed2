"""NumPy's floating point flags as a detector: what raised none, made no NaN and no Inf.

A flag tells that an operation *made* a bad value, at no cost and without a reading of the result.
It is blind to what only passes one on, and to code that clears or never sets the flags; so it is
asked only of finite operands, and only of ufuncs that were seen to be honest here.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from anynan._base.notices import warn
from anynan.arrays.errorlog import ErrorLog

# Below this number of elements a reading of the result costs less than a look at the flags.
WORTH = 2**13

_STATES = ("warn", "ignore")
_TAKEN = ("call", "log")  # by the one function that NumPy has for all errors
_ASKED = frozenset(
    {
        "add", "subtract", "multiply", "divide", "true_divide", "negative", "positive", "exp",
        "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "square", "cbrt", "reciprocal",
        "power", "sin", "cos", "tan", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh",
        "arcsinh", "arccosh", "arctanh", "hypot", "arctan2", "absolute", "fabs", "maximum",
        "minimum", "fmax", "fmin", "floor", "ceil", "rint", "trunc", "sign", "remainder", "fmod",
        "floor_divide", "logaddexp",
    }
)  # fmt: skip
_LENGTH = 97  # long enough for every vectorised loop and its remainder


class Flags:
    """Run one operation and note what it raised, on the user's own terms otherwise.

    Attributes:
        seen: What NumPy raised: ``divide by zero``, ``overflow``, ``invalid value``.
        usable: False where the user's ``errstate`` does more than warn: it is left alone.
    """

    __slots__ = ("seen", "state", "usable")

    def __init__(self) -> None:
        self.seen: list[str] = []
        state: Any = np.geterr()
        if "log" in state.values() and isinstance(log := np.geterrcall(), ErrorLog):
            state = log.under(state)
        self.state: dict[str, Any] = state
        self.usable = (
            state["divide"] in _STATES and state["over"] in _STATES and state["invalid"] in _STATES
            and state["under"] not in _TAKEN
        )  # fmt: skip

    def run(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function and collect its flags."""
        if not self.usable:
            return function(*args, **kwargs)
        with np.errstate(divide="call", over="call", invalid="call", call=self._note):
            return function(*args, **kwargs)

    def _note(self, kind: str, _: int) -> None:
        self.seen.append(kind)

    def warn(self, name: str) -> None:
        """Give the warnings that the user would have had, at the user's line."""
        for kind in self.seen:
            word = {"divide by zero": "divide", "overflow": "over"}.get(kind, "invalid")
            if self.state[word] == "warn":
                warn(f"{kind} encountered in {name}", RuntimeWarning)


@lru_cache(maxsize=1024)
def honest(ufunc: Any, method: str, dtype: np.dtype[Any]) -> bool:
    """Tell whether a ufunc raised a flag for every NaN and Inf that it made of finite numbers.

    It is tried here, on this machine's own loops, once for each dtype.

    Args:
        ufunc: A ufunc of any package.
        method: ``__call__``, ``reduce`` or ``accumulate``.
        dtype: Data type of the operands.

    Example:
        >>> import numpy
        >>> from anynan.arrays.floatflags import honest
        >>> honest(numpy.log, "__call__", numpy.dtype("float64"))
        True
    """
    name = ufunc.__name__
    known: Any = getattr(np, name, None)
    if name not in _ASKED or known is not ufunc or dtype.char not in "efd":
        return False
    if ufunc.nout != 1:
        return False
    numbers = _numbers(dtype)
    if method in ("reduce", "accumulate"):
        if name not in ("add", "multiply", "maximum", "minimum"):
            return False
        function = getattr(ufunc, method)
        return all(_flagged(function, (np.full(_LENGTH, value, dtype),)) for value in numbers)
    if method != "__call__":
        return False
    if ufunc.nin == 1:
        return all(_flagged(ufunc, (x,)) for value in numbers for x in _placed(value, dtype))
    return all(
        _flagged(ufunc, (x, y))
        for first in numbers
        for second in numbers
        for x, y in zip(_placed(first, dtype), _placed(second, dtype), strict=True)
    )


def _numbers(dtype: np.dtype[Any]) -> list[Any]:
    info: Any = np.finfo(dtype)
    edge = float(np.log(float(info.max)))
    return [0.0, -0.0, 1.0, -1.0, 0.5, -2.0, info.max, -info.max, info.tiny, edge * 1.1, -edge * 2]


def _placed(value: Any, dtype: np.dtype[Any]) -> list[Any]:
    """Put a number into the body and into the remainder of a vectorised loop."""
    found = []
    for at in (1, _LENGTH - 1):
        x = np.full(_LENGTH, 0.75, dtype)
        x[at] = value
        found.append(x)
    return found


def _flagged(function: Any, args: tuple[Any, ...]) -> bool:
    seen: list[str] = []
    with np.errstate(all="call", under="ignore", call=lambda kind, _: seen.append(kind)):
        result = function(*args)
    return bool(seen) or bool(np.isfinite(result).all())
