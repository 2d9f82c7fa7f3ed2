"""Find the functions that a program compiles: each is watched from its first call on."""

import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
from jax import tree_util

from anynan._diagnosis.sources import is_library
from anynan._reach.patches import Patches
from anynan._runtime.imports import when_imported
from anynan._steps.everywhere import Found
from anynan._steps.tracker import Tracker
from anynan.errors import AnomalyError
from anynan.jax.program.trace import tracing
from anynan.jax.tracking import start
from anynan.options import Options

# Modules that are no part of JAX, and what compiles there.
DOORS = {"flax.nnx": "jit", "equinox": "filter_jit"}


def watch_all(options: Options, found: Found) -> Callable[[], None]:
    """Watch what the program's own code has compiled, by ``jax.jit`` and the like.

    What a library compiles stays as it is, and so does what was compiled before.

    Args:
        options: As for ``track``.
        found: Is given the trackers.

    Returns:
        What undoes it; the trackers stay.
    """
    patches = Patches()

    def change(owner: Any, name: str) -> None:
        patches.change(owner, name, functools.partial(_watching, options=options, found=found))

    for name in ("jit", "pmap"):
        change(jax, name)
    waiting = [
        when_imported(module, lambda module=module, name=name: change(sys.modules[module], name))  # type: ignore[misc]
        for module, name in DOORS.items()
    ]

    def undo() -> None:
        for leave in waiting:
            leave()
        patches.undo()

    return undo


def _watching(compile_: Callable[..., Any], options: Options, found: Found) -> Callable[..., Any]:
    """Give what compiles as before, and has a function of the program's own watched."""

    def compiling(*args: Any, **kwargs: Any) -> Any:
        made = compile_(*args, **kwargs)
        if is_library(sys._getframe(1).f_code.co_filename):
            return made
        if not args:  # it was given options alone, and returns a decorator
            return lambda *given, **more: Watched(made(*given, **more), options, found)
        return Watched(made, options, found)

    return compiling


class Watched:
    """Stand for a compiled function, tracked from its first call on."""

    def __init__(self, fn: Any, options: Options, found: Found) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._options, self._found = fn, options, found
        self._tracker: Tracker | None = None
        self._alone = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, as one step."""
        if self._alone or tracing():  # a tracked function that calls it sees all of it
            return self._fn(*args, **kwargs)
        tracker = self._tracker or self._track()
        if tracker is None:
            return self._fn(*args, **kwargs)
        try:
            return tracker(*args, **kwargs)
        except (AnomalyError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:
            if any(map(_is_gone, tree_util.tree_leaves((args, kwargs)))):
                raise
            failed = error
        out = self._fn(*args, **kwargs)
        self._leave(failed)
        return out

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind like a function."""
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        """Give ``lower``, ``trace`` and whatever else a compiled function has."""
        return getattr(self.__dict__["_fn"], name)

    def _track(self) -> Tracker | None:
        try:
            tracker = self._tracker = start(self._fn, self._options)
            weakref.finalize(self, tracker.remove).atexit = False
            self._found.add(tracker)
        except Exception as error:  # noqa: BLE001  it is not watched then, and that is said
            self._leave(error)
        return self._tracker

    def _leave(self, error: Exception) -> None:
        """Watch it no longer, and say why."""
        self._alone = True
        if self._tracker is not None:
            self._tracker.remove()
        self._found.fail(getattr(self, "__name__", "a compiled function"), error)


def _is_gone(x: Any) -> bool:
    """Tell whether an array was given away."""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted()
