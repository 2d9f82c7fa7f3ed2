"""NumPy's floating point errors, with the lines that made them."""

import sys
import warnings
from contextvars import Context
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from anynan._diagnosis.sources import user_source
from anynan.events import Source

# Lines that are kept of one call.
MANY = 20
_KINDS = {
    "divide by zero": ("divide", 1), "overflow": ("over", 2), "invalid value": ("invalid", 8),
}  # fmt: skip


class FloatError(NamedTuple):
    """Name an error: what happened, in which function, at which line."""

    what: str
    name: str
    source: Source | None


class ErrorLog:
    """Note what NumPy finds wrong while it runs, and where.

    What the user asked NumPy to do about an error is done all the same: a warning is given at
    the line that it would have been given at, an exception is raised, a function called.

    Args:
        context: The context of the call, which knows what the user asked for.

    Attributes:
        lines: How often each error happened.
        deaf: True while anynan itself looks at something.
    """

    __slots__ = ("_context", "_errors", "deaf", "lines")

    def __init__(self, context: Context) -> None:
        self._context = context
        self.lines: dict[FloatError, int] = {}
        self.deaf = False

    def __enter__(self) -> Self:
        self._errors: Any = np.errstate(divide="log", over="log", invalid="log", call=self)
        self._errors.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._errors.__exit__(kind, error, trace)

    def write(self, text: str) -> None:
        """Take a line of NumPy's, and do what the user wanted done.

        Raises:
            FloatingPointError: If that is to raise.
        """
        if self.deaf:
            return
        said = text.strip().removeprefix("Warning: ")
        what, _, name = said.partition(" encountered in ")
        kind, flag = _KINDS.get(what, ("", 0))
        wanted, handler = self._wanted(kind)
        if wanted in ("warn", "ignore"):
            found = FloatError(what, name, user_source(sys._getframe(1)))
            if found in self.lines or len(self.lines) < MANY:
                self.lines[found] = self.lines.get(found, 0) + 1
        if wanted == "warn":
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        elif wanted == "raise":
            raise FloatingPointError(said)
        elif wanted == "print":
            sys.stderr.write(text)
        elif wanted in ("call", "log"):
            if wanted == "call":
                handler(what, flag)
            else:
                handler.write(text)

    def _wanted(self, kind: str) -> tuple[str, Any]:
        """Ask what the user wants done; a log around this one is anynan's, and knows it, too."""
        handler: Any = self
        while True:
            state: Any = handler._context.run(np.geterr)
            wanted, handler = state.get(kind, "ignore"), handler._context.run(np.geterrcall)
            if wanted != "log" or not isinstance(handler, ErrorLog):
                return wanted, handler

    def __str__(self) -> str:
        found = []
        for (what, name, source), count in list(self.lines.items())[:3]:
            where = "" if source is None else f" at {source.file.rpartition('/')[2]}:{source.line}"
            times = "" if count == 1 else f" ({count} times)"
            found.append(f"{what} in {name}{where}{times}")
        more = len(self.lines) - len(found)
        return ", ".join(found) + (f", and {more} more" if more else "")
