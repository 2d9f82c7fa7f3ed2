"""Warn at the user's own line."""

import sys
import warnings
from types import FrameType

from anynan._base.sources import is_library, is_own
from anynan.errors import AnynanWarning


def warn(text: str, category: type[Warning] = AnynanWarning) -> None:
    """Warn at the innermost line that is the user's, or at least not anynan's.

    Python's filters by module and by line, and the place it prints, then mean that line.

    Args:
        text: What to say.
        category: The warning's class.
    """
    frame = _where(sys._getframe(1))
    module = frame.f_globals.get("__name__")
    warnings.warn_explicit(
        text,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module if isinstance(module, str) else "<unknown>",
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _where(start: FrameType) -> FrameType:
    foreign: FrameType | None = None
    frame: FrameType | None = start
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return frame
        if foreign is None and not is_own(frame):
            foreign = frame
        frame = frame.f_back
    return foreign or start
