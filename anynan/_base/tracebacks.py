"""Tracebacks that end where the user's code does, and what the functions in them hold."""

import inspect
import sys
from types import FrameType, TracebackType
from typing import Any

from anynan._base.sources import is_library, is_own


def shorten(error: BaseException) -> None:
    """Take anynan's own frames out of a traceback, and what lies below the user's last one.

    Args:
        error: An AnomalyError on its way out: its report says what happened below.
    """
    kept = frames(error)
    while kept and is_library(kept[-1].tb_frame.f_code.co_filename):
        kept.pop()
    error.__traceback__ = _joined(kept)


def without_own(error: BaseException) -> None:
    """Take anynan's own frames out of an exception of the program's, and of what it came from.

    Args:
        error: Any exception.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = _joined(frames(each))
        left += [each.__cause__, each.__context__]


def last_own(error: BaseException) -> TracebackType | None:
    """Give where an exception left the program's own code last; None if it was in none."""
    innermost = reversed(frames(error))
    return next((x for x in innermost if not is_library(x.tb_frame.f_code.co_filename)), None)


def frames(error: BaseException) -> list[TracebackType]:
    """List what an exception went through, the innermost last."""
    found: list[TracebackType] = []
    traceback = error.__traceback__
    while traceback is not None:
        found.append(traceback)
        traceback = traceback.tb_next
    return found


def variables(frame: FrameType) -> dict[str, Any]:
    """Give what a running function holds by name, and keep none of it alive.

    Before Python 3.13 a frame keeps the dict that it gives until its function ends, with what was
    in it then. It is emptied unless somebody else holds it.
    """
    held = frame.f_locals
    found = dict(held)
    kept = sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if kept and sys.getrefcount(held) <= 3:  # the frame's, ours, the argument's
        held.clear()
    return found


def _joined(taken: list[TracebackType]) -> TracebackType | None:
    kept = None
    for frame in reversed(taken):
        if not is_own(frame.tb_frame):
            frame.tb_next = kept
            kept = frame
    return kept
