"""Let Ctrl-C stop work of our own, and nothing that puts things back after it."""

import functools
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Interrupts:
    """Hold SIGINT back outside of the part that it may stop.

    Only the main thread is interrupted by Python, so elsewhere this does nothing. Inside,
    between ``begin`` and ``end``, an interrupt goes where it went before, once; any other is
    passed on when the work is over.

    Example:
        >>> from anynan._base.interrupts import Interrupts
        >>> with Interrupts() as interrupts:
        ...     kept = ["what is put back below"]
        ...     try:
        ...         interrupts.begin()
        ...         # what may take long
        ...     finally:
        ...         interrupts.end()
        ...         kept.clear()
    """

    def __init__(self) -> None:
        self._open = self._on = False
        self._before: Any = None
        self._late: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> Self:
        """Take over the handler, where it is one of Python's."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGINT)
            if callable(self._before):
                signal.signal(signal.SIGINT, self._caught)
                self._on = True
        return self

    def __exit__(self, *_: object) -> None:
        """Give the handler back, and pass on what came meanwhile."""
        if self._on:
            self._on = False
            signal.signal(signal.SIGINT, self._before)
            if self._late is not None:
                self._before(*self._late)

    def begin(self) -> None:
        """Let an interrupt through from now on."""
        self._open = True

    def end(self) -> None:
        """Hold interrupts back again."""
        self._open = False

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if not self._open:
            self._late = number, frame
            return
        self._open = False  # it may raise, and what follows puts things back
        self._before(number, frame)
        self._open = True


def whole(function: Callable[P, R]) -> Callable[P, R]:
    """Have Ctrl-C wait until a function is through.

    For what puts something in its place and notes how to take it away, or takes it away: half of
    it would leave something behind. What has not begun may be begun again.

    Args:
        function: Short, and none of the program's code.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with Interrupts():
            return function(*args, **kwargs)

    return run
