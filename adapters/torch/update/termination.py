"""A launcher that ends this process because another rank died: what is held is told first."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


class Termination:
    """Tell what is unread when torchrun sends SIGTERM, whose default ends a process at once.

    It does so as soon as one rank fails, before the others can say what they held.

    Args:
        tell: What to do first.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._telling = False
        self._number: int | None = None
        self._on = (
            "TORCHELASTIC_RUN_ID" in os.environ
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        if self._on:
            signal.signal(signal.SIGTERM, self._caught)

    def remove(self) -> None:
        """Give the default back, unless the program has a handler of its own by now."""
        if self._telling:
            return
        main = threading.current_thread() is threading.main_thread()
        if self._on and main and signal.getsignal(signal.SIGTERM) == self._caught:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def tell(self) -> None:
        """Tell what is unread; a signal that comes meanwhile waits for the end of it."""
        if self._telling:
            return
        self._telling = True
        try:
            self._tell()
        finally:
            if self._number is not None:
                signal.signal(self._number, signal.SIG_DFL)
                os.kill(os.getpid(), self._number)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        self.tell()
