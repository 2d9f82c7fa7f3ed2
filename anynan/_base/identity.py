"""Objects told apart by what they are, whatever their own ``==`` and hash say."""

import weakref
from collections.abc import Iterator, MutableMapping
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ByIdentity(MutableMapping[K, V]):
    """A table whose keys go as nothing else holds them.

    ``weakref.WeakKeyDictionary`` asks its keys: the ``==`` of a metric gives another metric, that
    of other objects a tensor, which has no truth, and a hash may change as the object does.

    Example:
        >>> class Same:
        ...     def __eq__(self, other: object) -> bool:
        ...         return True
        ...     __hash__ = None
        >>> table, first, second = ByIdentity(), Same(), Same()
        >>> table[first] = "seen"
        >>> second in table
        False
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[K], V]] = {}

    def __setitem__(self, key: K, value: V) -> None:
        found, number = self._found, id(key)
        found[number] = weakref.ref(key, lambda _: found.pop(number, None)), value

    def __getitem__(self, key: K) -> V:
        return self._found[id(key)][1]

    def __contains__(self, key: object) -> bool:
        return id(key) in self._found

    def __delitem__(self, key: K) -> None:
        del self._found[id(key)]

    def __iter__(self) -> Iterator[K]:
        for ref, _ in list(self._found.values()):
            key = ref()
            if key is not None:
                yield key

    def __len__(self) -> int:
        return len(self._found)


class SetByIdentity(ByIdentity[K, None]):
    """A set of what it is told of, likewise."""

    def add(self, *keys: K) -> None:
        """Take these up."""
        for key in keys:
            self[key] = None
