"""Warn at the user's own line."""

import linecache
import re
import sys
import warnings
from types import FrameType
from typing import Any

from anynan._base.sources import is_library, is_own
from anynan._base.tracebacks import last_own
from anynan.errors import AnynanWarning

blanket = [True]
"""Whether the program's filters of all warnings hold for anynan's, too: under ``anynan run`` only
those do that name them."""

ended_by: list[BaseException | None] = []
"""The exception that ended the program, None for its last line: what is told after it has the line
that it left."""


def warn(text: str, category: type[Warning] = AnynanWarning) -> None:
    """Warn at the innermost line that is the user's, or at least not anynan's.

    Python's filters by module and by line, and the place it prints, then mean that line.

    Args:
        text: What to say.
        category: The warning's class.
    """
    file, line, names = _where(sys._getframe(1))
    module = names.get("__name__")
    if not blanket[0] and _is_swept(text, category, str(module), line):
        sys.stderr.write(warnings.formatwarning(text, category, file, line))
        return
    warnings.warn_explicit(
        text,
        category,
        file,
        line,
        module if isinstance(module, str) else "<unknown>",
        names.setdefault("__warningregistry__", {}),
    )


def _is_swept(text: str, category: type[Warning], module: str, line: int) -> bool:
    """Tell whether a filter that does not name anynan's warnings hides one, or raises it."""
    for action, message, kind, where, number in warnings.filters:
        every = message is None or bool(re.match(message, ""))
        said = message is None or re.match(message, text)
        here = (where is None or re.match(where, module)) and number in (0, line)
        if said and here and issubclass(category, kind):
            return action in ("error", "ignore") and every and kind is not category
    return False


def _where(start: FrameType) -> tuple[str, int, dict[str, Any]]:
    """Give file, line and globals of the user's innermost frame, or of what comes nearest."""
    if ended_by:
        left = None if ended_by[0] is None else last_own(ended_by[0])
        main = sys.modules["__main__"]
        file = getattr(main, "__file__", None)
        if left is not None:
            return _of(left.tb_frame)
        if file is not None:
            return file, max(len(linecache.getlines(file)), 1), vars(main)
    foreign: FrameType | None = None
    frame: FrameType | None = start
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return _of(frame)
        if foreign is None and not is_own(frame):
            foreign = frame
        frame = frame.f_back
    return _of(foreign or start)


def _of(frame: FrameType) -> tuple[str, int, dict[str, Any]]:
    return frame.f_code.co_filename, frame.f_lineno, frame.f_globals
