"""Queues: a second run is given what the first took from one, and hands nothing over."""

import queue
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from anynan._base.context import replaying
from anynan._reach.items import Record


class Taken:
    """Stand in the methods of one queue during a step, and keep for a second run what it gave.

    Args:
        held: The program's own queue.
        name: By which the step reaches it.

    Attributes:
        record: What it gave.
    """

    def __init__(self, held: Any, name: str) -> None:
        self._queue, self.record = held, Record(name)
        self._thread = threading.get_ident()
        self._get = held.get
        self._methods: dict[str, Callable[..., Any]] = {"get": self._take}
        self._methods |= {name: self._nothing(name) for name in ("put", "task_done", "join")}
        self._methods = {name: fn for name, fn in self._methods.items() if hasattr(held, name)}
        vars(held).update(self._methods)

    def end(self) -> None:
        """Leave the queue as it was."""
        for name, method in self._methods.items():
            if vars(self._queue).get(name) is method:
                del vars(self._queue)[name]

    def _take(self, *args: Any, **kwargs: Any) -> Any:
        if replaying():
            return self.record.again()
        if threading.get_ident() != self._thread:
            return self._get(*args, **kwargs)
        return self.record.take(partial(self._get, *args, **kwargs))

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
    return issubclass(type(value), kinds)  # an object may raise at every question
