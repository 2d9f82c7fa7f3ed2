"""Queues: a second run is given what the first took from one, and waits for no other thread."""

import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from anynan._reach.items import Exhausted
from anynan._reach.patches import Patches
from anynan._runtime.context import replaying

# Seconds that a second run waits for another thread, which may have nothing more to hand over.
PATIENCE = 30.0

_WAITED = (
    f"it would have waited for another thread for more than {PATIENCE:.0f} s, as for something "
    "that was handed over in the first run"
)
_lock = threading.Lock()
_bounded = Patches()
_running = [0]


class Taken:
    """Stand in the methods of one queue during a step, and keep for a second run what it gave.

    Args:
        held: The program's own queue.
        name: By which the step reaches it.
    """

    def __init__(self, held: Any, name: str) -> None:
        self._queue, self._name = held, name
        self._items: list[tuple[Any, BaseException | None]] = []
        self._thread = threading.get_ident()
        self._get = held.get
        self._methods: dict[str, Callable[..., Any]] = {"get": self._take}
        self._methods |= {name: self._nothing(name) for name in ("put", "task_done", "join")}
        self._methods = {name: fn for name, fn in self._methods.items() if hasattr(held, name)}
        self._at = 0
        self._change: Callable[[Any, str], Any] | None = None
        vars(held).update(self._methods)

    def rewind(self, change: Callable[[Any, str], Any] | None = None) -> None:
        """Give out again what was taken, from the first on.

        Args:
            change: Gives, for an item and the queue's name, what is given out.
        """
        self._at, self._change = 0, change or self._change

    def end(self) -> None:
        """Leave the queue as it was."""
        for name, method in self._methods.items():
            if vars(self._queue).get(name) is method:
                del vars(self._queue)[name]

    def _take(self, *args: Any, **kwargs: Any) -> Any:
        if replaying():
            return self._again()
        if threading.get_ident() != self._thread:
            return self._get(*args, **kwargs)
        try:
            item = self._get(*args, **kwargs)
        except Exception as error:  # it was empty
            self._items.append((None, error))
            raise
        self._items.append((item, None))
        return item

    def _again(self) -> Any:
        if self._at == len(self._items):
            raise Exhausted.of(self._name)
        item, error = self._items[self._at]
        self._at += 1
        if error is not None:
            raise error
        return item if self._change is None else self._change(item, self._name)

    def _nothing(self, name: str) -> Callable[..., Any]:
        """Give a method that does nothing in a second run."""
        real = getattr(self._queue, name, None)

        def method(*args: Any, **kwargs: Any) -> Any:
            return None if replaying() or real is None else real(*args, **kwargs)

        return method


def is_queue(value: Any) -> bool:
    """Tell whether an object is one of Python's queues, in whose methods another may stand."""
    processes = sys.modules.get("multiprocessing.queues")
    kinds = (queue.Queue,) if processes is None else (queue.Queue, processes.Queue)
    return isinstance(value, kinds)


@contextmanager
def waiting_briefly() -> Iterator[None]:
    """Let no second run wait for another thread without an end.

    Raises:
        Exhausted: Inside, where one would.
    """
    with _lock:
        if not _running[0]:
            _bounded.change(threading.Condition, "wait", _wait)
        _running[0] += 1
    try:
        yield
    finally:
        with _lock:
            _running[0] -= 1
            if not _running[0]:
                _bounded.undo()


def _wait(real: Callable[..., bool]) -> Callable[..., bool]:
    def wait(self: Any, timeout: float | None = None) -> bool:
        if timeout is not None or not replaying():
            return real(self, timeout)
        if not real(self, PATIENCE):
            raise Exhausted(_WAITED)
        return True

    return wait
