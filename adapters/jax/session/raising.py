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
            for note in getattr(error, "__notes__", ()):
                if not note.startswith("---"):  # JAX's own, of its frames
                    own.add_note(note)
            raise own from None


_logger = logging.getLogger("jax._src.callback")


def ended(error: Exception) -> bool:
    """Tell whether an exception came of the numbers of a step that ran, or is ours about them."""
    of_jax = (AnomalyError, jax.errors.JaxRuntimeError)
    return isinstance(error, of_jax) or isinstance(error.__context__, of_jax)


def _worth_a_line(record: logging.LogRecord) -> bool:
    return record.getMessage() != "jax.pure_callback failed"


def _as_equinox(error: Exception) -> Exception:
    def fails() -> None:
        raise error

    try:
        sys.modules["equinox"].filter_jit(fails)()
    except Exception as own:  # noqa: BLE001  it is what is asked for
        if own is not None and own is not error:
            own.args = tuple(map(_inside, own.args))
        return own
    return error


def _inside(text: str) -> str:
    """Take what is around the trace out of the stack that equinox tells of it: that is ours."""
    head, *frames = re.split(r'(?m)^(?=  File ")', text)
    ours = (i for i, x in enumerate(frames, 1) if is_anynans(x.split('"')[1]))
    return head + "".join(frames[max(ours, default=0) :])
