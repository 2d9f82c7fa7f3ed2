"""Find what a program differentiates and compiles: each is watched from its first call on."""

import functools
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, cast

import mlx.core as mx
from mlx import nn

from anynan._base.patches import Patches
from anynan._base.sources import is_anynans, is_library
from anynan._everywhere import Found, spoiled
from anynan._steps.tracked import inside
from anynan.errors import AnomalyError
from anynan.mlx.messages import EAGER_MLX
from anynan.mlx.reading import is_float
from anynan.mlx.seams import SEAMS
from anynan.mlx.session import Session
from anynan.mlx.tracking import start
from anynan.options import Options
from anynan.tracker import Tracker

DOORS = ((nn, "value_and_grad"), (mx, "value_and_grad"), (mx, "grad"), (mx, "compile"))
# Trackers of functions that a program makes anew in each step: the last few are kept.
BETWEEN = 8
# What else takes functions: those of the program's run as they are in it.
OTHERS = ("vmap", "jvp", "vjp", "checkpoint")
# How a program looks at a number.
READS = {"item", "tolist", "__float__", "__format__", "__repr__", "__str__"}
ITEM: Any = mx.array.item
LOOKED_AT = 2**26  # bytes: a larger array is left alone as the program ends


def watch_all(options: Options, found: Found) -> Callable[[], None]:
    """Watch what a program differentiates or compiles, the outermost function as a step.

    Args:
        options: As for ``track``.
        found: Is given the trackers.

    Returns:
        What undoes it; the trackers stay.
    """
    watch, patches = Watch(options, found), Patches()
    for holder, name in DOORS:
        patches.change(holder, name, watch.making)
    for name in OTHERS:
        patches.change(mx, name, _taking)
    patches.change(nn.Module, "__init__", watch.having)
    for name in READS & vars(mx.array).keys():
        patches.change(mx.array, name, watch.reading)

    def undo() -> None:
        patches.undo()
        watch.end()

    return undo


class Watch:
    """Hold what is known of the program.

    Args:
        options: As for ``track``.
        found: Is given the trackers.
    """

    def __init__(self, options: Options, found: Found) -> None:
        self._options, self._found = options, found
        self._kept: dict[Hashable, Tracker] = {}
        self._trackers: list[Tracker] = []
        self.over = self.gave_way = False
        self._read, self._models = "", False

    def making(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Have what a function of MLX's makes of another watched."""

        @functools.wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            args = _bare(args)
            bare = make(*args, **kwargs)
            frame = sys._getframe(1)
            # What a library compiles is a step of its own only if it changes what it is given.
            plain = make.__name__ == "compile" and not kwargs.keys() & {"inputs", "outputs"}
            module = str(frame.f_globals.get("__name__")).partition(".")[0]
            if module in ("mlx", "anynan") or (plain and is_library(frame.f_code.co_filename)):
                return bare
            fn = next((x for x in args if callable(x) and not isinstance(x, nn.Module)), None)
            code = None if fn is None else getattr(inspect.unwrap(fn), "__code__", None)
            return Watched(bare, self, code and (make.__name__, code))

        return made

    def reading(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Remember where the program first looked at a NaN."""

        def read(x: Any, *args: Any) -> Any:
            out = real(x, *args)
            if not self._read and x.size == 1 and is_float(x):
                value: Any = out if isinstance(out, float) else ITEM(x)
                frame: Any = sys._getframe(1)
                while value != value and is_anynans(frame.f_code.co_filename):
                    frame = frame.f_back
                if value != value:
                    file = os.path.basename(frame.f_code.co_filename)
                    self._read = f"{file}:{frame.f_lineno}"
            return out

        return read

    def having(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Remember that the program has a model."""

        def init(*args: Any, **kwargs: Any) -> None:
            self._models = True
            real(*args, **kwargs)

        return init

    def start(self, fn: Any, key: Hashable) -> Tracker | None:
        """Watch a function, by the tracker of the one before that was made of the same code."""
        tracker = self._kept.pop(key, None)
        try:
            if tracker is not None:
                cast("Session", inside(tracker).adapter).renew(fn)
                return tracker
            tracker = start(fn, self._options)
        except AnomalyError as error:  # a weight is bad already
            if error.tracker is not None:
                self._found.add(error.tracker)
            raise
        except Exception as error:  # noqa: BLE001  it is not watched then, and that is said
            self._found.fail(getattr(fn, "__name__", "a function of MLX's"), error)
            return None
        self._found.add(tracker)
        self._trackers.append(tracker)
        return tracker

    def left(self, tracker: Tracker, key: Hashable) -> None:
        """Keep the tracker of a function that is gone, for the next of its kind."""
        self._kept[key] = tracker
        if len(self._kept) > BETWEEN or key is None:
            gone = self._kept.pop(next(iter(self._kept)))
            gone.remove()
            self._trackers.remove(gone)

    def end(self) -> None:
        """Say what the program leaves behind that is bad, and that nothing of MLX was read."""
        self.over = True
        main = dict(vars(sys.modules["__main__"]))
        for tracker in self._trackers:
            spoiled(inside(tracker), self._found)
        told = self.gave_way or self._found.bad()
        for name, x in () if told else main.items():
            with suppress(Exception):  # what cannot be computed is not told
                if name[0] != "_" and _is_lost(x):
                    self._found.harm(f"{name} holds NaN as the program ends")
        if self._read and not told:
            self._found.harm(f"a number was NaN as it was read, at {self._read}")
        used = self._models or any(x is mx or x is nn for x in main.values())
        if used and not (self._found.added or self.gave_way):
            self._found.unwatched(EAGER_MLX())


class Watched:
    """Stand for what MLX made of a function, tracked from its first call on.

    Args:
        bare: The function.
        watch: Knows its tracker.
        key: What it is known by, if the program makes it anew.
    """

    def __init__(self, bare: Any, watch: Watch, key: Hashable) -> None:
        functools.update_wrapper(self, bare)
        self.bare, self._watch, self._key = bare, watch, key
        self._tracker: Tracker | None = None
        self._alone = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, as one step; as a part of one, or where the program tracks, as it is."""
        watch = self._watch
        own = not all(session.tracker.found for session in SEAMS.sessions)
        watch.gave_way |= own
        if own or self._alone or watch.over or any(map(_is_busy, SEAMS.sessions)):
            return self.bare(*args, **kwargs)
        if self._tracker is None:
            self._tracker = watch.start(self.bare, self._key)
            if self._tracker is None:
                self._alone = True
                return self.bare(*args, **kwargs)
            weakref.finalize(self, watch.left, self._tracker, self._key).atexit = False
        return self._tracker(*args, **kwargs)


def _bare(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.bare if isinstance(x, Watched) else x for x in args)


def _taking(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: make(*_bare(args), **kwargs)


def _is_busy(session: Any) -> bool:
    return session.local.open or session.local.second is not None


def _is_lost(x: Any) -> bool:
    if not is_float(x) or not 0 < x.nbytes <= LOOKED_AT:
        return False
    return bool(mx.isnan(x).all().item())
