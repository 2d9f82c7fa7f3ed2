"""Queues: a second run is given what the first took from one, and hands nothing over."""

import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

from anynan._reach.items import Exhausted
from anynan._runtime.context import replaying


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
    return issubclass(type(value), kinds)  # an object may raise at every question
