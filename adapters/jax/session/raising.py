"""What a function makes of JAX's exceptions: a tracked one raises the same."""

import logging
import re
import sys
from types import TracebackType
from typing import Any

import jax

from anynan._base.sources import is_anynans
from anynan.errors import AnomalyError


class OwnErrors:
    """Have ``equinox.filter_jit``'s exceptions raised in the place of JAX's.

    It tells what ``equinox.error_if`` was given, and JAX does not log the same beside it.

    Args:
        fn: The function that runs tracked.
    """

    def __init__(self, fn: Any) -> None:
        self._equinox = type(fn).__module__.startswith("equinox")

    def __enter__(self) -> None:
        """Begin the run."""
        if self._equinox:
            _logger.addFilter(_worth_a_line)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        """End it, maybe by an exception.

        Raises:
            Exception: The function's own.
        """
        if not self._equinox:
            return
        _logger.removeFilter(_worth_a_line)
        own = _as_equinox(error) if isinstance(error, RuntimeError | ValueError) else error
        if own is not None and own is not error:
            hand_on(error, own)
            raise own from None


_logger = logging.getLogger("jax._src.callback")


def ended(error: Exception) -> bool:
    """Tell whether an exception came of the numbers of a step that ran, or is ours about them."""
    of_jax = (AnomalyError, jax.errors.JaxRuntimeError)
    return isinstance(error, of_jax) or isinstance(error.__context__, of_jax)


def hand_on(error: Any, other: BaseException) -> None:
    """Give the reports that an exception takes along to another one."""
    for note in getattr(error, "__notes__", ()) if error is not other else ():
        if not note.startswith("---"):  # JAX's own, of its frames
            other.add_note(note)


def leave_out_own(error: Exception, *, around: bool = False) -> None:
    """Take frames of ours out of the stack that equinox tells in an exception.

    Args:
        error: The exception.
        around: Whether what is outside of them is left out, too.
    """
    text = str(error)
    frames = [*_FRAME.finditer(text)]
    ours = [i for i, frame in enumerate(frames) if is_anynans(frame[1])]
    for i in range(ours[-1], -1, -1) if around and ours else reversed(ours):
        text = text[: frames[i].start()] + text[frames[i].end() :]
    if ours:
        error.args = (text,)


_FRAME = re.compile(r'^  File "([^"]+)".*\n(?:    .*\n)*', re.MULTILINE)


def _worth_a_line(record: logging.LogRecord) -> bool:
    return record.getMessage() != "jax.pure_callback failed"


def _as_equinox(error: Exception) -> Exception:
    def fails() -> None:
        raise error

    try:
        sys.modules["equinox"].filter_jit(fails)()
    except Exception as own:  # noqa: BLE001  it is what is asked for
        if own is not error:
            leave_out_own(own, around=True)
        return own
    return error
