"""An iterator that gives a second run of a step what it gave the first."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Self

# Iterators of these modules have no state of the program's own, and nothing but __next__.
_PLAIN = ("builtins", "itertools")
_MOVES = frozenset({"send", "throw", "close", "get", "get_nowait"})
_HANDS_OVER = frozenset({"put", "put_nowait"})
_MORE = (
    "it would have taken more from `{}` than the first run took, or from an iterator whose items "
    "cannot be kept: pass each batch as an argument"
)


class Exhausted(BaseException):
    """End a second run that asks for what the first run did not take; it says so.

    No ``except Exception`` of the program's is to see it.
    """

    @classmethod
    def of(cls, name: str) -> Self:
        """Say that of an iterator or a queue, by its name."""
        return cls(_MORE.format(name))


class Record:
    """Keep what a step takes from one place, and give it out again in a second run.

    Args:
        name: By which the step reaches the place.
    """

    __slots__ = ("_at", "_change", "_taken", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._taken: list[tuple[Any, BaseException | None]] = []
        self._at = 0
        self._change: Callable[[Any, str], Any] | None = None

    def take(self, fetch: Callable[[], Any]) -> Any:
        """Take an item, and keep it; the exception, too, where there is none."""
        try:
            item = fetch()
        except BaseException as error:
            self._taken.append((None, error))
            raise
        self._taken.append((item, None))
        return item

    def rewind(self, change: Callable[[Any, str], Any] | None = None) -> None:
        """Begin to give out what was taken, from the first on.

        Args:
            change: Gives, for an item and the place's name, what is given out.
        """
        self._at, self._change = 0, change or self._change

    def again(self) -> Any:
        """Give out the next item.

        Raises:
            Exhausted: If the step took no more.
        """
        if self._at == len(self._taken):
            raise Exhausted.of(self.name)
        item, error = self._taken[self._at]
        self._at += 1
        if error is not None:
            raise error
        return item if self._change is None else self._change(item, self.name)

    def go_on(self) -> None:
        """Change no more what is given out."""
        self._change = None


class Items:
    """Stand for an iterator during a step: pass its items on, and keep them for a second run.

    Args:
        iterator: The program's own.
        name: By which the step reaches it.

    Example:
        >>> from anynan._reach import Items
        >>> items = Items(iter([1, 2, 3]), "batches")
        >>> next(items), next(items)
        (1, 2)
        >>> items.rewind()
        >>> next(items), next(items)
        (1, 2)
        >>> items.go_on()
        >>> next(items)
        3
    """

    __slots__ = ("_again", "_iterator", "_record")

    def __init__(self, iterator: Iterator[Any], name: str) -> None:
        self._iterator, self._record = iterator, Record(name)
        self._again = False

    @property
    def iterator(self) -> Iterator[Any]:
        """The program's own iterator."""
        return self._iterator

    def rewind(self, change: Callable[[Any, str], Any] | None = None) -> None:
        """Give out again what was taken, from the first on.

        Args:
            change: Gives, for an item and the iterator's name, what is given out.
        """
        self._again = True
        self._record.rewind(change)

    def go_on(self) -> None:
        """Give out the iterator's own items again."""
        self._again = False
        self._record.go_on()

    def __iter__(self) -> "Items":
        return self

    def __next__(self) -> Any:
        return (
            self._record.again()
            if self._again
            else self._record.take(partial(next, self._iterator))
        )

    def __getattr__(self, name: str) -> Any:
        if self._again and name in _MOVES:
            raise Exhausted.of(self._record.name)
        if self._again and name in _HANDS_OVER:
            return _nothing
        return getattr(self._iterator, name)


def _nothing(*_: Any, **__: Any) -> None:
    """Hand nothing over: the first run did."""


def is_plain(iterator: Any) -> bool:
    """Tell whether an iterator is one of Python's own, which another may stand for.

    Generators, ``iter`` of a container, ``zip``, ``enumerate``, ``map``, ``itertools``.
    """
    return type(iterator).__module__ in _PLAIN
