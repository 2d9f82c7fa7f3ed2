"""NumPy's floating point errors, with the lines that made them."""

import sys
import warnings
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from anynan._base.sources import is_own, user_source
from anynan._diagnosis.lineage import OpRecord
from anynan.arrays.names import canonical
from anynan.events import Kind, Source

# Lines that are kept of one call.
MANY = 20
_KINDS = {
    "divide by zero": ("divide", 1), "overflow": ("over", 2), "underflow": ("under", 4),
    "invalid value": ("invalid", 8),
}  # fmt: skip
_MODES: Any = {"divide": "log", "over": "log", "invalid": "log"}


def _variable() -> ContextVar[Any] | None:
    """Find where NumPy keeps what it is to do about an error: what ``errstate`` sets."""

    def inside() -> Context:
        with np.errstate(all="ignore"):
            return copy_context()

    found = list(Context().run(inside))
    return found[0] if len(found) == 1 else None


# Set by itself where ``errstate``, which makes its state anew, would take longer than a small
# function; None where NumPy keeps it elsewhere.
STATE = _variable()


class FloatError(NamedTuple):
    """Name an error: what happened, in which function, at which line."""

    what: str
    name: str
    source: Source | None

    def makes(self, kind: Kind) -> bool:
        """Tell whether it makes values of this kind."""
        return (self.what == "invalid value") == (kind == "nan")

    def record(self, index: int) -> OpRecord:
        """Tell of it as an operation of which no more is known."""
        name = self.name.removeprefix("scalar ")
        return OpRecord(
            index, canonical(name), f"numpy.{name}", "", "forward", None,
            source=self.source, said=self.what,
        )  # fmt: skip


class ErrorLog:
    """Note what NumPy finds wrong while it runs, and where.

    What the user asked NumPy to do about an error is done all the same: a warning is given at
    the line that it would have been given at, an exception is raised, a function called.

    Args:
        context: The context of the call, which knows what the user asked for.

    Attributes:
        lines: How often each error happened.
        deaf: True while anynan itself looks at something.
        below: What NumPy was asked to do, and
        state: what it is asked to do with this log: values of ``STATE``.
    """

    __slots__ = (
        "_asked", "_context", "_errors", "_modes", "below", "deaf", "lines", "state",
    )  # fmt: skip

    def __init__(self, context: Context) -> None:
        self._context = context
        self.lines: dict[FloatError, int] = {}
        self.deaf = False
        # NumPy has one function for all errors, so an underflow's comes here as well.
        passed_on = context.run(np.geterr)["under"] in ("call", "log")
        self._modes: Any = {**_MODES, "under": "log"} if passed_on else _MODES
        self.below: Any = None
        self.state: Any = None

    @classmethod
    def prepared(cls, state: ContextVar[Any]) -> Self:
        """Make a log for calls where NumPy is asked for what it is asked for now."""
        context, below = Context(), state.get()
        context.run(state.set, below)  # and nothing else: a log may outlive what a call knew
        log = cls(context)
        log.below = below
        with log:
            log.state = state.get()
        return log

    def __enter__(self) -> Self:
        self._errors: Any = np.errstate(**self._modes, call=self)
        self._errors.__enter__()
        self._asked = np.geterr()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        changes = self.changes()
        self._errors.__exit__(kind, error, trace)
        changes()

    def changes(self) -> Callable[[], object]:
        """Give what does again, outside of the log, what ``numpy.seterr`` did inside of it."""
        modes: Any = {k: mode for k, mode in np.geterr().items() if mode != self._asked.get(k)}
        handler = np.geterrcall()

        def again() -> None:
            if modes:
                np.seterr(**modes)
            if handler is not self:
                np.seterrcall(handler)

        return again

    def __call__(self, what: str, flag: int) -> None:
        """Hand an error on to the function that the user gave NumPy."""
        if not self.deaf:
            self._wanted("")[1](what, flag)

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
            frame, level = sys._getframe(1), 2
            while is_own(frame) and frame.f_back is not None:  # a tracked array's operator
                frame, level = frame.f_back, level + 1
            warnings.warn(said, RuntimeWarning, stacklevel=level)
        elif wanted == "raise":
            raise FloatingPointError(said)
        elif wanted == "print":
            sys.stderr.write(text)
        elif wanted == "call":
            handler(what, flag)
        elif wanted == "log":
            handler.write(text)

    def _wanted(self, kind: str) -> tuple[str, Any]:
        """Ask what the user wants done; a log around this one is anynan's, and knows it, too."""
        handler: Any = self
        while True:
            state: Any = handler._context.run(np.geterr)
            wanted, handler = state.get(kind, "ignore"), handler._context.run(np.geterrcall)
            if wanted != "log" or not isinstance(handler, ErrorLog):
                return wanted, handler

    def told(self, index: int, kind: Kind, known: int = 0) -> OpRecord | None:
        """Give the one place where errors were met as an operation.

        Args:
            index: Of the record.
            kind: What it is to have made.
            known: How many errors, the first of all, are not meant.

        Returns:
            None where there were more, or where the one makes no such value.
        """
        met = [error for error in list(self.lines)[known:] if error.name != "cast"]
        made = [error.record(index) for error in met if error.makes(kind)]
        one = len({(error.name, error.source) for error in met}) == 1 and len(self) < MANY
        return made[0] if one and made else None

    def first_nan(self) -> OpRecord | None:
        """Give the first error that made NaN as an operation, None if none did."""
        found = (error for error in self.lines if error.makes("nan"))
        return next((error.record(0) for error in found), None)

    def __len__(self) -> int:
        return len(self.lines)

    def __str__(self) -> str:
        found = []
        for (what, name, source), count in list(self.lines.items())[:3]:
            where = "" if source is None else f" at {source.place}"
            times = "" if count == 1 else f" ({count} times)"
            found.append(f"{what} in {name}{where}{times}")
        more = len(self.lines) - len(found)
        return ", ".join(found) + (f", and {more} more" if more else "")
