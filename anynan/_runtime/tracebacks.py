"""Tracebacks that end where the user's code does."""

from types import TracebackType

from anynan._diagnosis.sources import is_library, is_own


def shorten(error: BaseException) -> None:
    """Take anynan's own frames out of a traceback, and what lies below the user's last one.

    Args:
        error: An AnomalyError on its way out: its report says what happened below.
    """
    frames: list[TracebackType] = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    while frames and is_library(frames[-1].tb_frame.f_code.co_filename):
        frames.pop()
    kept = None
    for frame in reversed(frames):
        if not is_own(frame.tb_frame):
            frame.tb_next = kept
            kept = frame
    error.__traceback__ = kept
