"""What is added to an exception that the tracked function would not have had."""

from types import FrameType

from anynan._base import tracebacks
from anynan._base.sources import is_library, is_own, user_source
from anynan.arrays.messages import STAND_IN_REFUSED
from anynan.arrays.tracked import TrackedArray, is_tracked

# What code raises that was given something of the wrong class.
_REFUSALS = (TypeError, ValueError, AttributeError, BufferError, LookupError)


def explain(error: BaseException) -> None:
    """Add a note to an exception of code that was given a tracked array and refused it."""
    through = [x.tb_frame for x in tracebacks.frames(error)]
    frames = [frame for frame in through if not is_own(frame)]
    named = _names_it(error)
    refused = bool(frames) and isinstance(error, _REFUSALS) and _holds_one(frames[-1])
    if not (named or refused):
        return
    line = user_source(frames[-1]) if frames else None
    where = "" if line is None else f" at {line.place}"
    note = STAND_IN_REFUSED(where=where)
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _names_it(error: BaseException) -> bool:
    try:
        return TrackedArray.__name__ in str(error)
    except Exception:  # noqa: BLE001  an exception of the program's own may do anything
        return False


def _holds_one(frame: FrameType) -> bool:
    """Tell whether it is a library's code that works on a tracked array here."""
    return is_library(frame.f_code.co_filename) and any(
        is_tracked(value) for value in list(frame.f_locals.values())
    )
