"""What a program computes outside of any jit.

JAX runs each such call by itself, and tells nobody. The last ones are held here with what they took
and gave, so that a bad number leads back to the call that made it, which can be made once more.
"""

import ast
import functools
import inspect
import math
import re
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice, takewhile
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import tree_util

from anynan._base import tracebacks
from anynan._base.sources import is_anynans, is_library, position
from anynan._steps import producers
from anynan.jax.graphs import names
from anynan.jax.graphs.lines import is_jax
from anynan.jax.graphs.versions import watch_calls
from anynan.jax.program.trace import under_way
from anynan.jax.read import probes
from anynan.jax.read.donated import alive, strong
from anynan.jax.read.probes import NAN
from anynan.jax.replay.placed import Fate, fates, is_nan, is_placed, place

# So many calls are held, and so many bytes of what they took and gave; a larger array is not kept
# alive.
CALLS, BYTES, LARGE = 4096, 1 << 26, 1 << 22
# A program may ask in every step whether its numbers are finite: so many calls are searched then.
ASKED = 1024
# So many functions and forms of them are compiled to tell what is placed.
RUNS = 64
# So many arrays are looked for in vain: a program that goes on with NaN has new ones in each step.
MISSES = 64
# What holds numbers, and is no tracer.
ARRAYS = frozenset(array for array in jax.Array.__subclasses__() if "__float__" in vars(array))
# How a program asks whether numbers are finite, and what it finds then; any other question with
# the answer yes or no goes wrong by a NaN.
_BOTH = frozenset({NAN, probes.POSINF})
ASKS = {"isnan": {NAN}, "isinf": {probes.POSINF}, "isfinite": _BOTH, "is_finite": _BOTH}


class Call(NamedTuple):
    """Hold one call.

    Attributes:
        fn: What was called.
        given: What it took, as leaves: an array, what refers to one weakly, or anything else.
        form: How the leaves make up ``(args, kwargs)``.
        gave: What it gave.
        code: The program's own code that led there.
        at: Where in it.
        size: How many bytes are kept alive.
        whole: The call of a function of JAX's that it is a part of, such as ``softmax``.
    """

    fn: Callable[..., Any]
    given: list[Any]
    form: Any
    gave: list[Any]
    code: CodeType
    at: int
    size: int
    whole: "Call | None" = None

    @property
    def place(self) -> str:
        """Give the line that made it."""
        return f"{Path(self.code.co_filename).name}:{position(self.code, self.at)[0]}"

    @property
    def brings(self) -> bool:
        """Tell whether it only brings an array of NumPy's in."""
        given = list(filter(_is_numpys, self.given))
        if not len(given) == len(self.gave) == 1:
            return False
        there = np.asarray(alive(self.gave[0]))
        return np.array_equal(given[0].astype(there.dtype), there, equal_nan=True)

    @property
    def number(self) -> str:
        """Name the bad number that it was given as one of Python's, "" if it was given none."""
        for x in filter(lambda x: isinstance(x, float), self.given):
            for made in filter(probes.checkable, self.gave):
                name, largest = probes.dtype(made)
                if x != x or largest < abs(x) < math.inf:
                    return "NaN" if x != x else f"{x:g}, which is beyond {name},"
        return ""

    def run(self) -> tuple[Callable[..., Any], list[Any]]:
        """Give a function that makes the call once more, in its line, and the arrays it takes."""
        line, end, column, end_column = position(self.code, self.at)
        leaves = list(map(alive, self.given))
        places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray)]

        def made(arrays: Iterable[Any]) -> Any:
            taken = list(leaves)
            for i, x in zip(places, arrays, strict=True):
                taken[i] = x
            args, kwargs = tree_util.tree_unflatten(self.form, taken)
            return self.fn(*args, **kwargs)

        place = {"lineno": line, "end_lineno": end, "col_offset": column}
        tree = ast.parse("made(arrays)", mode="eval")
        for node in ast.walk(tree):
            vars(node).update(place, end_col_offset=end_column)
        code = compile(tree, self.code.co_filename, "eval", dont_inherit=True)
        code = code.replace(co_name=self.code.co_name)

        def run(*arrays: Any) -> Any:
            return eval(code, {"made": made, "arrays": arrays})  # noqa: S307  it is our own

        run.__name__ = self.code.co_name
        return run, [leaves[i] for i in places]


class Calls:
    """Hold the last calls that a program made outside of any jit."""

    def __init__(self) -> None:
        self._held: deque[Call] = deque()
        self._past: Call | None = None
        self._size, self._lock = 0, threading.Lock()
        # What was compiled to tell where NaN in results is from, by function and form.
        self._runs: dict[Any, Any] = {}
        self.missed = 0

    def begin(self) -> Callable[[], None]:
        """Hold what is called from now on; give what ends it."""
        return watch_calls(self.note)

    def note(self, fn: Any, args: Any, kwargs: Any, out: Any, *, watched: bool = False) -> None:
        """Hold one more; it has run, and must not fail by us."""
        with suppress(Exception):
            gave = tree_util.tree_leaves(out)
            if not watched and (not gave or type(gave[0]) not in ARRAYS):  # it is being traced
                return
            frame: Any = sys._getframe(2)
            inner, of_jax = None, True
            while is_library(file := frame.f_code.co_filename):
                if is_anynans(file) and not watched:  # it is told of, or of our own
                    return
                if of_jax := of_jax and is_jax(file):
                    inner = frame if _is_whole(frame.f_code) else inner
                frame = frame.f_back
            whole, place = None, (frame.f_code, frame.f_lasti)
            if inner is not None and (made := _made_of(inner)) is not None:
                whole = _held(*made, [], *place)
            call = _held(fn, (args, kwargs), gave, *place)._replace(whole=whole)
            size = call.size + (0 if whole is None else whole.size)
            with self._lock:
                self._held.append(call._replace(size=size))
                self._size += size
                while len(self._held) > CALLS or self._size > BYTES:
                    self._size -= self._held.popleft().size

    def clear(self) -> None:
        """Let go of all."""
        with self._lock:
            self._held.clear()
            self._runs.clear()
            self._size, self._past = 0, None

    def origin(
        self, arrays: Iterable[Any], *, numpys: bool = False, floats: bool = False
    ) -> Call | None:
        """Find the first call that led to bad numbers and was given none; None if it is not held.

        Nor is one given where the numbers are made of what a step gave that was told.

        Args:
            arrays: The numbers, or answers to questions about them.
            numpys: Whether the first that was given a NaN in an array of NumPy's counts, too.
            floats: Whether the first that was given a NaN as a number of Python's counts, too.
        """
        found, sure = None, False
        arrays = list(arrays)
        wanted = self._new(arrays) or list(arrays)
        for call in self._before():
            gave = list(map(_alive, call.gave))
            made = [x for x in gave if any(x is each for each in wanted)]
            if not made:
                continue
            given = list(map(_alive, call.given))
            bad, worst = self._taken(call, given, made)
            if bad and producers.hand_on(bad, [x for x in arrays if isinstance(x, jax.Array)]):
                return None
            wanted += bad if worst else filter(_is_answer, given)
            came = max(map(_word, made))
            # A NaN may come of Infs that are meant so, as those of a mask.
            computed = came > worst
            new = computed or (numpys and worst == NAN and any(map(_is_numpys, bad)))
            new = new or (floats and worst == NAN and any(isinstance(x, float) for x in bad))
            # Where NaN was made of numbers, one that was put in is what a state begins with.
            if new and came and (computed or not sure) and not any(x is None for x in given):
                found, sure = call, sure or (computed and came == NAN)
        return found

    def _new(self, arrays: list[Any]) -> list[Any]:
        """Leave out what a state may begin with: what was placed, and an Inf beside a NaN."""
        return [x for x in arrays if _word(x) == NAN and not self.placed(x)]

    def _taken(self, call: Call, given: list[Any], made: list[Any]) -> tuple[list[Any], int]:
        """Give the worst of what a call took, and how bad it is; what was placed did no harm."""
        words = list(map(_word, given))
        worst = max(words, default=probes.FINE)
        new = self._new(given) if worst == NAN else []
        if new or (worst == NAN and self._makes(call, made)):
            return new, NAN if new else probes.FINE
        return [x for x, word in zip(given, words, strict=True) if word and word == worst], worst

    def placed(self, x: Any, *, numpys: bool = False) -> bool:
        """Tell whether an array holds NaN as the code wrote it, handed on from call to call.

        Args:
            x: The array.
            numpys: Whether what came in from NumPy counts, too: placed or data, as its use shows.
        """
        if is_placed(x) or self.missed >= MISSES or not is_nan(x):
            return is_placed(x)
        if isinstance(x, np.ndarray):
            return numpys
        wanted, chain = [x], list[Call]()
        for call in self._before():
            if any(y is each for y in map(_alive, call.gave) for each in wanted):
                chain.append(call)
                wanted += filter(is_nan, map(_alive, call.given))
        for call in reversed(chain):
            gave = [_alive(y) for y in call.gave]
            for i, fate in self._fates(call).items():
                if fate == "placed":
                    place(gave[i])
        brought = bool(chain) and chain[0].brings
        self.missed += not (is_placed(x) or brought)
        return is_placed(x) or (numpys and brought)

    def makes(self, given: list[Any], made: list[Any]) -> bool:
        """Tell whether the call that gave these made NaN itself, and was given placed NaN alone."""
        if not all(map(self.placed, filter(is_nan, given))):
            return False
        here = (c for c in self._before() if any(x is y for x in made for y in c.gave))
        call = next(here, None)
        return call is not None and self._makes(call, made)

    def _makes(self, call: Call, made: list[Any]) -> bool:
        found, gave = self._fates(call), list(map(_alive, call.gave))
        return any(f == "made" and any(gave[i] is x for x in made) for i, f in found.items())

    def _fates(self, call: Call) -> "dict[int, Fate]":
        """Tell where the NaN in what a call gave is from; nothing where it cannot be run again."""
        with suppress(Exception), under_way():
            run, arrays = call.run()
            types = tuple((x.shape, str(x.dtype)) for x in arrays)
            rest = tuple(None if hasattr(x, "dtype") else x for x in map(_alive, call.given))
            key = call.fn, call.form, types, rest
            if key not in self._runs:
                if len(self._runs) >= RUNS:
                    return {}
                self._runs[key] = jax.make_jaxpr(run)(*arrays), {}
            return fates(self._runs[key][0], arrays, call.gave, self._runs[key][1])
        return {}

    def goes_on(self) -> None:
        """Take the calls up to now as what the program went on from."""
        self._past = self._held[-1] if self._held else None

    def left(self) -> list[Any]:
        """List the arrays with a NaN that a call gave since then, and no other took."""
        taken, found = set[int](), list[Any]()
        for call in takewhile(lambda call: call is not self._past, self._before()):
            found += [x for x in map(_alive, call.gave) if id(x) not in taken and is_nan(x)]
            taken.update(map(id, map(_alive, call.given)))
        return found

    def asked(self, answer: Any) -> tuple[bool, bool] | None:
        """Tell whether an answer is one about bad numbers: if finiteness was asked for, and of one.

        Args:
            answer: An array, true or false.
        """
        wanted, asked, sizes = [answer], False, []
        for call in islice(self._before(), ASKED):
            if not any(x is each for x in map(_alive, call.gave) for each in wanted):
                continue
            name = str(getattr(call.fn, "__name__", ""))
            for x in map(_alive, call.given):
                if _is_answer(x):
                    wanted.append(x)
                elif _word(x) in ASKS.get(name, {NAN}):
                    asked = asked or name in ASKS
                    sizes.append(np.size(x))
        return (asked, set(sizes) == {1}) if sizes else None

    def _before(self) -> Iterable[Call]:
        with self._lock:
            return list(reversed(self._held))


def held(error: BaseException) -> list[Any]:
    """List the bad arrays that the functions have at hand which an exception ended."""
    found = []
    for each in tracebacks.frames(error):
        for name, value in each.tb_frame.f_locals.items():
            found += bad(value, masks=not _names(error, name))
    return found


def refused(error: BaseException) -> str:
    """Say which number was refused that is NaN or Inf: the exception names it; "" for none."""
    last = tracebacks.last_own(error)
    at = f", at {Path(last.tb_frame.f_code.co_filename).name}:{last.tb_lineno}" if last else ""
    for each in tracebacks.frames(error):
        for name, value in each.tb_frame.f_locals.items():
            if isinstance(value, float) and not math.isfinite(value) and _names(error, name):
                return f"{value} was refused as `{name}`{at}"
    return ""


def _names(error: BaseException, name: str) -> bool:
    return len(name) > 2 and re.search(rf"\b{name}\b", str(error)) is not None


def bad(value: Any, *, masks: bool = True) -> list[Any]:
    """List the arrays in something that hold a NaN or an Inf; a mask may hold -Inf."""
    leaves: list[Any] = []
    with suppress(Exception):  # what cannot be taken apart holds none
        leaves = tree_util.tree_leaves(value)
    found = [x for x in map(_alive, leaves) if type(x) in ARRAYS and _word(x)]
    mask = probes.NEGINF if masks else probes.FINE
    return [x for x in found if x.size == 1 or probes.worst(alive(x)) > mask]


@functools.cache
def _is_whole(code: CodeType) -> bool:
    """Tell whether it is the code of a function of JAX's that is one operation to its users."""
    return names.function((code.co_name,)) is not None


def _made_of(frame: Any) -> tuple[Any, Any] | None:
    """Give the function that a frame runs and what it was given, None if that is not known."""
    code, held = frame.f_code, frame.f_locals
    fn = frame.f_globals.get(code.co_name)
    if not callable(fn) or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        return None
    first, only = code.co_posonlyargcount, code.co_argcount + code.co_kwonlyargcount
    given = [(name, held[name]) for name in code.co_varnames[:only]]
    return fn, (tuple(x for _, x in given[:first]), dict(given[first:]))


def _held(fn: Any, given: Any, gave: list[Any], code: CodeType, at: int) -> Call:
    leaves, form = tree_util.tree_flatten(given)
    return Call(fn, leaves, form, gave, code, at, sum([_lighten(leaves), _lighten(gave)]))


def _lighten(leaves: list[Any]) -> int:
    """Hold large arrays weakly; give the bytes of the others."""
    size = 0
    for i, x in enumerate(leaves):
        if type(x) in ARRAYS or isinstance(x, np.ndarray):
            own = x.size * x.dtype.itemsize
            size += own if own <= LARGE else 0
            if own > LARGE:
                leaves[i] = weakref.ref(x)
    return size


def _alive(x: Any) -> Any:
    """Give what a call took or gave, None where that is gone."""
    x = strong(x)
    return None if alive(x) is None else x


def _is_numpys(x: Any) -> bool:
    """Tell data from what a program may begin with, which is one number."""
    return isinstance(x, np.ndarray) and x.ndim > 0


def _is_answer(x: Any) -> bool:
    return type(x) in ARRAYS and x.dtype == bool


def _word(x: Any) -> int:
    """Give the worst kind in what a call took or gave: an Inf of either sign, or NaN."""
    if isinstance(x, float):
        return NAN if x != x else probes.POSINF if math.isinf(x) else probes.FINE
    if not isinstance(x, jax.Array | np.ndarray | np.generic) or not probes.checkable(x):
        return probes.FINE
    kind = probes.worst(alive(x))
    return probes.POSINF if kind == probes.NEGINF else kind
