"""NumPy's floating point errors, with the lines that made them."""

import sys
import warnings
from collections import Counter
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from anynan._diagnosis.sources import user_source
from anynan.events import Source

# Lines that are kept of one call.
MANY = 20
_KINDS = {"divide by zero": "divide", "overflow": "over", "invalid value": "invalid"}


class FloatError(NamedTuple):
    """Name an error: what happened, in which function, at which line."""

    what: str
    name: str
    source: Source | None


class ErrorLog:
    """Note what NumPy finds wrong while it runs, and where.

    What the user asked NumPy to do about an error is done all the same: a warning is given at
    the line that it would have been given at, and an error that is to be raised, called for or
    printed is left alone.

    Attributes:
        lines: How often each error happened.
    """

    def __init__(self) -> None:
        self.lines: Counter[FloatError] = Counter()

    def __enter__(self) -> Self:
        state: Any = np.geterr()
        outer: Any = np.geterrcall()
        if isinstance(outer, ErrorLog):  # of the whole program: a part of it has its own
            state = {kind: outer._state[kind] if word == "log" else word
                     for kind, word in state.items()}  # fmt: skip
        self._state: dict[str, str] = state
        wanted = {kind: "log" for kind in _KINDS.values() if state[kind] in ("warn", "ignore")}
        if outer is not None and not isinstance(outer, ErrorLog):
            wanted = {}
        self._errors: Any = np.errstate(**wanted, call=self) if wanted else np.errstate()  # type: ignore[arg-type]
        self._errors.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._errors.__exit__(kind, error, trace)

    def write(self, text: str) -> None:
        """Take a line of NumPy's."""
        said = text.strip().removeprefix("Warning: ")
        what, _, name = said.partition(" encountered in ")
        if len(self.lines) < MANY:
            self.lines[FloatError(what, name, user_source(sys._getframe(1)))] += 1
        if self._state.get(_KINDS.get(what, "")) == "warn":
            warnings.warn(said, RuntimeWarning, stacklevel=2)

    def __str__(self) -> str:
        found = []
        for (what, name, source), count in list(self.lines.items())[:3]:
            where = "" if source is None else f" at {source.file.rpartition('/')[2]}:{source.line}"
            times = "" if count == 1 else f" ({count} times)"
            found.append(f"{what} in {name}{where}{times}")
        more = len(self.lines) - len(found)
        return ", ".join(found) + (f", and {more} more" if more else "")
