"""Warn at the user's own line."""

import re
import sys
import warnings
from types import FrameType

from anynan._base.sources import is_library, is_own
from anynan._base.tracebacks import last_own
from anynan.errors import AnynanWarning

blanket = [True]
"""Whether the program's filters of all warnings hold for anynan's, too: under ``anynan run`` only
those do that name them."""

ended_by: list[BaseException] = []
"""The exception that ended the program: what is told after it has the line that it left."""


def warn(text: str, category: type[Warning] = AnynanWarning) -> None:
    """Warn at the innermost line that is the user's, or at least not anynan's.

    Python's filters by module and by line, and the place it prints, then mean that line.

    Args:
        text: What to say.
        category: The warning's class.
    """
    frame = _where(sys._getframe(1))
    module = frame.f_globals.get("__name__")
    if not blanket[0] and _is_swept(text, category, str(module), frame.f_lineno):
        file, line = frame.f_code.co_filename, frame.f_lineno
        sys.stderr.write(warnings.formatwarning(text, category, file, line))
        return
    warnings.warn_explicit(
        text,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module if isinstance(module, str) else "<unknown>",
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _is_swept(text: str, category: type[Warning], module: str, line: int) -> bool:
    """Tell whether a filter that does not name anynan's warnings hides one, or raises it."""
    for action, message, kind, where, number in warnings.filters:
        said = message is None or re.match(message, text)
        here = (where is None or re.match(where, module)) and number in (0, line)
        if said and here and issubclass(category, kind):
            return action in ("error", "ignore") and message is None and kind is not category
    return False


def _where(start: FrameType) -> FrameType:
    foreign: FrameType | None = None
    frame: FrameType | None = start
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return frame
        if foreign is None and not is_own(frame):
            foreign = frame
        frame = frame.f_back
    left = next(map(last_own, ended_by), None)
    return foreign or start if left is None else left.tb_frame
