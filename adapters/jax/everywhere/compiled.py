"""What a program compiles: each is watched from its first call on."""

import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, cast

import jax
from jax import tree_util

from anynan._steps.tracked import inside
from anynan.jax.everywhere.watch import Watch, traced_anew
from anynan.jax.messages import COMPILED_AHEAD
from anynan.jax.program.objects import refuse_cycles
from anynan.jax.program.trace import tracing, under_way
from anynan.jax.read.donated import is_gone
from anynan.jax.session.raising import ended
from anynan.jax.session.session import Session
from anynan.jax.tracking import start
from anynan.options import Options
from anynan.tracker import Tracker

_config: Any = jax.config


class Watched:
    """Stand for a compiled function, tracked from its first call on.

    Args:
        fn: The function.
        watch: Is given its tracker.
        again: What it is known by, if the program compiles it anew.
        options: As for ``track``; the watch's if not given.
    """

    def __init__(
        self, fn: Any, watch: Watch, again: Hashable = None, options: Options | None = None
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._watch, self._again = fn, watch, again
        self._options = options or watch.options
        self._tracker: Tracker | None = None
        self._alone = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, as one step."""
        self._watch.goes_on()
        # A tracked function that calls it sees all of it; without jit it is eager code.
        if self._alone or tracing() or _config.jax_disable_jit:
            return self._fn(*args, **kwargs)
        tracker = self._tracker or self._track()
        if tracker is None:
            return self._fn(*args, **kwargs)
        try:
            return tracker(*args, **kwargs)
        except Exception as error:
            if ended(error) or self._cannot_again(args, kwargs):
                raise
            failed = error
        out = self._fn(*args, **kwargs)
        self._leave(failed)
        return out

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind like a function."""
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        """Give whatever else a compiled function has."""
        return getattr(self.__dict__["_fn"], name)

    def __repr__(self) -> str:
        """Show the compiled function."""
        return repr(self._fn)

    def __reduce__(self) -> Any:
        """Leave nothing of ours in a file or a copy."""
        return operator.getitem, ((self._fn,), 0)

    def clear_cache(self) -> None:
        """Forget what was traced, as it does itself: the next call traces anew."""
        self._fn.clear_cache()
        if self._tracker is not None:
            traced_anew([inside(self._tracker)])

    def _cache_size(self) -> int:
        """Count what was compiled, as it does itself."""
        session: Any = None if self._tracker is None else inside(self._tracker).judge.adapter
        watched = 0 if session is None else session.compiled
        return int(self._fn._cache_size()) + watched

    # JAX knows a compiled function by these, and asks its class for them.

    @property
    def lower(self) -> Any:
        """Give what lowers it."""
        name = getattr(self, "__name__", "a function")
        return self._ahead("lower", lambda: self._watch.found.unwatched(COMPILED_AHEAD(name=name)))

    @property
    def trace(self) -> Any:
        """Give what traces it."""
        return self._ahead("trace", lambda: None)

    @property
    def eval_shape(self) -> Any:
        """Give what tells the shapes that it gives."""
        return self._ahead("eval_shape", lambda: None)

    def _ahead(self, name: str, tell: Callable[[], None]) -> Any:
        """Give what makes its program, which may be exported: it is the user's own."""
        found = getattr(self._fn, name)

        @functools.wraps(found)
        def made(*args: Any, **kwargs: Any) -> Any:
            tell()
            with under_way():
                return found(*args, **kwargs)

        return made

    def _track(self) -> Tracker | None:
        try:
            tracker = self._tracker = self._watch.kept(self._again)
            if tracker is None:
                tracker = self._start()
                inside(tracker).judge.steps.since_the_start()
                self._watch.found.add(tracker)
            weakref.finalize(self, self._watch.left, tracker, self._again).atexit = False
        except Exception as error:  # noqa: BLE001  it is not watched then, and that is said
            self._leave(error)
        return self._tracker

    def _start(self) -> Tracker:
        tracker = self._tracker = start(self._fn, self._options)
        session, calls = cast("Session", inside(tracker).judge.adapter), self._watch.calls
        session.outside = self._watch.outside
        session.may_be_meant = functools.partial(calls.placed, numpys=True)
        session.placed, session.excuses = calls.note, True
        return tracker

    def _cannot_again(self, *given: Any) -> bool:
        """Tell whether a call cannot be made once more: its arrays are given away."""
        try:
            refuse_cycles(given)
        except ValueError:
            return True
        return any(map(is_gone, tree_util.tree_leaves(given)))

    def _leave(self, error: Exception) -> None:
        """Watch it no longer, and say why."""
        self._alone = True
        if self._tracker is not None:
            self._tracker.remove()
        self._watch.found.fail(getattr(self, "__name__", "a compiled function"), error)


class Given(Watched):
    """Stand for what equinox compiles of a module: of a model, its method, or its gradient.

    A program may compile it anew in each step, and equinox knows it by its form. So one function
    is compiled for all of a kind, and is given the module.

    Args:
        fn: What equinox made.
        watch: Is given the tracker.
        module: What it made that of.
        options: Those that it was given.
    """

    def __init__(self, fn: Any, watch: Watch, module: Any, options: dict[str, Any]) -> None:
        super().__init__(fn, watch)
        self._module, self._given = module, options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, as one step."""
        name = getattr(self._module, "__name__", type(self._module).__name__)
        held, key = (
            self._watch.modules,
            (name, type(self._module), repr(sorted(self._given.items()))),
        )
        if key not in held:

            def given(model: Any, *args: Any, **kwargs: Any) -> Any:
                return model(*args, **kwargs)

            given.__name__ = name
            compiled = sys.modules["equinox"].filter_jit(given, **self._given)
            held[key] = Watched(compiled, self._watch)
        return held[key](self._module, *args, **kwargs)


def is_module(x: Any) -> bool:
    """Tell whether something is of equinox's own kind: a model, or a function that it made."""
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(x, equinox.Module)
