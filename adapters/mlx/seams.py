"""Where MLX is changed while something is tracked, and what stands there."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx import optimizers

from anynan._base.patches import Patches, owner_of, through
from anynan._base.sources import is_anynans
from anynan.mlx.names import WRITING
from anynan.mlx.reading import EVALUATE

# What brings values to the host, beside ``mx.eval``. The buffer that NumPy reads has no such name.
_READING = ("item", "tolist", "__repr__", "__float__", "__int__", "__bool__")


class Seams:
    """Hold the sessions that watch, and the changes that they need."""

    def __init__(self) -> None:
        self.sessions: list[Any] = []
        self._patches = Patches()

    def add(self, session: Any) -> None:
        """Have a session told of what runs."""
        self.sessions.append(session)
        for kind in (optimizers.Optimizer, optimizers.MultiOptimizer):
            self._change(kind, "apply_gradients", self._through("update"))
        for name in WRITING:
            self._change(mx.array, name, self._writing)
        self._change(mx, "eval", self._evaluating)
        self._change(mx, "async_eval", self._evaluating)
        for name in _READING:
            self._change(mx.array, name, self._looking)
        self.cover(session.layers.classes())

    def cover(self, classes: set[type]) -> None:
        """Have calls of these classes' objects told."""
        for kind in classes:
            if any("__call__" in vars(owner) for owner in kind.__mro__):
                self._change(owner_of(kind, "__call__"), "__call__", self._through("layer"))

    def remove(self, session: Any) -> None:
        """Tell a session no more; after the last one MLX is what it was."""
        self.sessions = [each for each in self.sessions if each is not session]
        if not self.sessions:
            self._patches.undo()

    @contextmanager
    def alone(self, session: Any) -> Iterator[None]:
        """Have one told of what runs meanwhile, and nobody else."""
        before, self.sessions = self.sessions, []
        self.add(session)
        try:
            yield
        finally:
            self.sessions = before
            if not before:
                self._patches.undo()

    def _change(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._patches.change(owner, name, make)

    def _through(self, link: str) -> Callable[[Any], Any]:
        return through(lambda: self.sessions, link)

    def _writing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def write(x: Any, *args: Any) -> Any:
            for session in self.sessions:
                session.about_to_write(x)
            return real(x, *args)

        return write

    def _evaluating(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def evaluate(*args: Any) -> Any:
            waiting = [x for session in self.sessions for x in session.unread()]
            # One traversal of the graph computes what is read with what was asked for.
            result = _together(real, args, waiting) if waiting else real(*args)
            if real is EVALUATE:
                for session in list(self.sessions):
                    session.evaluated()
            return result

        return evaluate

    def _looking(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Judge where the program reads a value, which computes it."""

        def look(x: Any, *args: Any) -> Any:
            if self.sessions and not is_anynans(sys._getframe(1).f_code.co_filename):
                mx.eval(x)
            return real(x, *args)

        return look


def _together(real: Callable[..., Any], args: tuple[Any, ...], waiting: list[Any]) -> Any:
    try:
        return real(*args, waiting)
    except (
        RuntimeError,
        ValueError,
    ):  # some were made inside of mx.compile, and can never be computed
        return real(*args)


SEAMS = Seams()
