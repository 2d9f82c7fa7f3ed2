"""A call of plain arrays: what it takes and what it returns is cleared by one sum of each."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextvars import Context
from operator import is_
from typing import Any

import numpy as np

from anynan._arrays.arguments import bound, positional
from anynan.arrays.errorlog import ErrorLog
from anynan.arrays.reachable import SMALL, mark
from anynan.arrays.state import FLOATS, PRODUCT, squares
from anynan.arrays.tape import Tape
from anynan.events import Event

NUMBERS = (float, np.float64, np.float32)
_ROOT = 1e150  # the square of a number below is finite
_MOST = 10_000  # arrays and numbers, of arguments or of a result
_ARRAY = np.ndarray
_OTHERS = (int, bool, str, type(None), np.bool_, np.int64)
_TEXT = frozenset({str})


class FastPath:
    """Hold the little that a call of plain arrays and numbers began with.

    They may be in lists, tuples and dicts. While the call runs it stands where a tape would: a
    check inside makes one of it. Its methods are few and long, since every call of a tracked
    function pays for each of them.

    Args:
        look_closer: Makes a tape of it, where more is to be known.
        log: Takes NumPy's errors.
        context: As the call found it.
        fn: The function.
        args: Its arguments.
        kwargs: Those by name.

    Attributes:
        bad: Which of the arrays that were given hold NaN or Inf, and where; empty if none does.
        begins_clean: False where one of the arguments wants more than one sum.
        closed: True: what a namespace makes is the library's own.
        containers: Each list and dict that was given, the keys of a dict, and what it held.
        deepened: True once a check inside made more of it.
        gave: Whether it returned any number that could be bad.
        held: Each array that was given, its sum of squares (NaN if it holds no floats), and a
            copy of a small one, of a larger one some elements.
        kinds: What the arguments and the result are: the letters of the dtypes of arrays, the
            sizes or keys of containers, the types of all else. (A dtype itself is slow as a key.)
        squares: The sums of squares of the floats among them.
    """

    __slots__ = (
        "_look_closer", "args", "bad", "begins_clean", "containers", "context", "deepened", "fn",
        "gave", "held", "kinds", "kwargs", "log", "squares",
    )  # fmt: skip
    closed = True

    def __init__(
        self, look_closer: Callable[["FastPath"], Tape], log: ErrorLog, context: Context,
        fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
    ) -> None:  # fmt: skip
        self._look_closer, self.log, self.context = look_closer, log, context
        self.fn, self.args, self.kwargs = fn, args, kwargs
        self.held: list[tuple[Any, float, Any]] = []
        self.containers: list[tuple[Any, tuple[Any, ...] | None, tuple[Any, ...]]] = []
        self.kinds: list[Any] = []
        self.squares: list[float] = []
        self.deepened = self.gave = False
        self.bad: tuple[Any, ...] = ()
        given = [*args, *kwargs.values()] if kwargs else [*args]
        clean = self._cleared(given, self.kinds, self.squares, first=True)
        self.begins_clean = clean and not self.bad

    def _cleared(
        self, values: list[Any], kinds: list[Any], sums: list[float], *, first: bool = False
    ) -> bool:
        """Tell whether all of these are known to be finite by a sum of each array.

        Args:
            values: The values; what containers among them hold is added to the list.
            kinds: Takes what they are.
            sums: Takes the sums of the squares of the floats.
            first: Keep what is needed to run the call again: they are its arguments.
        """
        held, containers = self.held, self.containers
        for x in values:
            kind = type(x)
            if kind is _ARRAY:
                dtype = x.dtype
                if dtype in FLOATS:
                    short = x.ndim == 1 and x.size <= PRODUCT
                    square = float(x.dot(x)) if short else squares(x)
                    if not square < math.inf:
                        if not first:
                            return False
                        seen = x if x.nbytes <= SMALL else np.frombuffer(mark(x), dtype)
                        self.bad += len(held), np.isfinite(seen).tobytes()
                        square = math.nan
                    sums.append(square)
                elif dtype.kind in "biu":
                    square = math.nan
                else:
                    return False
                kinds.append(dtype.char)
                if first:
                    held.append((x, square, x.copy() if x.nbytes <= SMALL else mark(x)))
            elif kind in _OTHERS:
                kinds.append(kind)
            elif kind in NUMBERS:
                if not abs(x) < _ROOT:
                    return False
                kinds.append(kind)
                if not first:
                    sums.append(float(x) ** 2)
            elif kind is list or kind is tuple or kind is dict:
                if len(values) + len(x) > _MOST:
                    return False
                if kind is dict:
                    keys, items = tuple(x), tuple(x.values())
                    if keys and set(map(type, keys)) != _TEXT:
                        return False
                    kinds.append(keys)
                else:
                    keys, items = None, tuple(x)
                    kinds.append((kind, len(items)))
                values += items
                if first and kind is not tuple:
                    containers.append((x, keys, items))
            else:
                return False
        return True

    def ends_clean(self, result: Any) -> bool:
        """Look at the arguments once more, which the call may have written into, and the result."""
        for x, square, _ in self.held:
            if square == square:
                short = x.ndim == 1 and x.size <= PRODUCT
                if not (float(x.dot(x)) if short else squares(x)) < math.inf:
                    return False
        for value, keys, items in self.containers:
            now = value if keys is None else value.values()
            same = len(value) == len(items) and all(map(is_, now, items))
            if not same and not self._cleared([*now], [], []):
                return False
        before = len(self.squares)
        clean = self._cleared([result], self.kinds, self.squares)
        self.gave = len(self.squares) > before
        return clean

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield the arrays that the call was given, each by its name."""
        then = {id(value): (keys, items) for value, keys, items in self.containers}
        given = bound(positional(self.fn), self.args, self.kwargs)
        return ((name, x) for name, x in named(given, then) if type(x) is _ARRAY)

    def take(self, event: Event, array: Any, later: int) -> bool:
        """Report what a direct check inside found, with all that a tape knows."""
        if self.bad:  # nothing is looked into
            return False
        return self._look_closer(self).take(event, array, later)


def named(
    values: list[tuple[str, Any]],
    then: Mapping[int, tuple[tuple[Any, ...] | None, tuple[Any, ...]]] | None = None,
) -> list[tuple[str, Any]]:
    """List values and what containers among them hold, in the order in which they are cleared.

    Args:
        values: The values by name.
        then: What containers held before, by their ids.
    """
    found = list(values)
    for name, x in found:
        kind = type(x)
        if kind is dict or kind is list or kind is tuple:
            keys, items = (then or {}).get(id(x), (None, x))
            if kind is dict:
                pairs = x.items() if keys is None else zip(keys, items, strict=True)
                found += [(f"{name}[{key!r}]", item) for key, item in pairs]
            else:
                found += [(f"{name}[{i}]", item) for i, item in enumerate(items)]
    return found
