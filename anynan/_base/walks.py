"""Go over what can be reached from somewhere: the values behind a value, the classes of a class."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def walk(
    start: Iterable[T], more: Callable[[T], Iterable[T]], *, near: bool = False
) -> Iterator[T]:
    """Walk what can be reached, each once.

    Args:
        start: Where to begin.
        more: Gives what is next to one.
        near: The nearest first; else what was found last.

    Example:
        >>> from anynan._base.walks import walk
        >>> list(walk([1], lambda n: [n * 2 % 7, n * 3 % 7], near=True))
        [1, 2, 3, 4, 6, 5]
    """
    todo = deque(dict.fromkeys(start))
    seen = set(todo)
    while todo:
        item = todo.popleft() if near else todo.pop()
        yield item
        for other in more(item):
            if other not in seen:
                seen.add(other)
                todo.append(other)
