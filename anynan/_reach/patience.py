"""A second run that waits for what the first was given already comes to an end."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from anynan._base.context import replaying
from anynan._base.patches import Patches
from anynan._reach.items import Exhausted

# Seconds, and times the first run, after which a second one is thought to wait for ever.
PATIENCE = 30.0
TIMES = 100

_WAITED = (
    "it would have waited for more than {:.0f} s, as for something that another thread or process "
    "handed to the first run"
)
_lock = threading.Lock()
_bounded = Patches()
_limits: list[float] = []  # of the second runs that are at work, in all threads


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Let a second run wait for no longer than this.

    In the main thread, a call of the system's is ended, too, where the program has no alarm of
    its own; in all threads, what waits in Python's ``threading``.

    Args:
        seconds: What the first run took.

    Raises:
        Exhausted: Inside, where it would wait longer.
    """
    limit = PATIENCE + TIMES * seconds
    with _lock:
        if not _limits:
            _bounded.change(threading.Condition, "wait", _wait)
        _limits.append(limit)
    try:
        with ExitStack() as stack:
            if _may_have_an_alarm():
                stack.enter_context(_alarm(limit))
            yield
    finally:
        with _lock:
            _limits.remove(limit)
            if not _limits:
                _bounded.undo()


def _wait(real: Callable[..., bool]) -> Callable[..., bool]:
    def wait(self: Any, timeout: float | None = None) -> bool:
        limit = max(_limits, default=None)
        if timeout is not None or limit is None or not replaying():
            return real(self, timeout)
        if not real(self, limit):
            raise Exhausted(_WAITED.format(limit))
        return True

    return wait


def _may_have_an_alarm() -> bool:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        return False
    used = signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL
    return not used and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@contextmanager
def _alarm(limit: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Exhausted(_WAITED.format(limit))

    signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, limit)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
