"""Tracebacks that end where the user's code does."""

from types import TracebackType

from anynan._base.sources import is_library, is_own


def shorten(error: BaseException) -> None:
    """Take anynan's own frames out of a traceback, and what lies below the user's last one.

    Args:
        error: An AnomalyError on its way out: its report says what happened below.
    """
    frames = _frames(error)
    while frames and is_library(frames[-1].tb_frame.f_code.co_filename):
        frames.pop()
    error.__traceback__ = _joined(frames)


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
        each.__traceback__ = _joined(_frames(each))
        left += [each.__cause__, each.__context__]


def last_own(error: BaseException) -> TracebackType | None:
    """Give where an exception left the program's own code last; None if it was in none."""
    frames = reversed(_frames(error))
    return next((x for x in frames if not is_library(x.tb_frame.f_code.co_filename)), None)


def _frames(error: BaseException) -> list[TracebackType]:
    frames: list[TracebackType] = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    return frames


def _joined(frames: list[TracebackType]) -> TracebackType | None:
    kept = None
    for frame in reversed(frames):
        if not is_own(frame.tb_frame):
            frame.tb_next = kept
            kept = frame
    return kept
