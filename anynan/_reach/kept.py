"""The state of everything a search found, at one moment."""

import copy
import io
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from anynan._reach.search import ITEMS, Found, container_kind

# What a report says where not all could be put back for a second run.
Undo = Callable[[], object]


class Kept:
    """Take the present state of what a step can reach; putting it back touches only what moved.

    References are kept, and what containers hold: no value is copied.

    Args:
        found: Where everything is.

    Attributes:
        arrays: Where arrays are held, which are the caller's to keep.
    """

    __slots__ = ("_containers", "_generators", "_plain", "_spaces", "arrays")

    def __init__(self, *found: Found) -> None:
        self.arrays = [holder for one in found for holder in one.arrays]
        self._plain = [(holder, holder.get()) for one in found for holder in one.plain]
        self._spaces = [
            (holder.name, space, chosen, _picked(space, chosen))
            for one in found
            for holder, chosen in one.spaces
            if (space := holder.namespace()) is not None
        ]
        self._containers = [
            (holder.name, value, items(value))
            for one in found
            for holder in one.containers
            if (kind := container_kind(value := holder.get())) and kind.__len__(value) <= ITEMS
        ]
        self._generators = [
            (holder.name, generator_state(item))
            for one in found
            for holder in one.generators
            if (item := holder.get()) is not None
        ]

    def put_back(self, stands: Mapping[int, Any] | None = None) -> list[str]:
        """Make everything what it was, in the objects that it was.

        Args:
            stands: What stands for an object now, by the object's id.

        Returns:
            What could not be put back, with the error.
        """
        lost: list[str] = []
        stands = stands or {}
        for name, restore in self._generators:
            attempt(name, restore, lost)
        for name, value, held in self._containers:
            attempt(name, partial(refill, value, _standing(held, stands)), lost)
        for name, space, chosen, held_then in self._spaces:
            then = {key: stands.get(id(item), item) for key, item in held_then.items()}
            attempt(name, partial(assign, space, then, chosen), lost)
        for holder, before in self._plain:
            value = stands.get(id(before), before)
            if holder.get() is not value:
                attempt(holder.name, partial(holder.set, value), lost)
        return lost


def _standing(held: tuple[Any, ...], stands: Mapping[int, Any]) -> tuple[Any, ...]:
    """Put what stands for an item in its place; the items of a dict are pairs."""
    if not stands:
        return held
    return tuple(
        (item[0], stands.get(id(item[1]), item[1]))
        if type(item) is tuple and len(item) == 2
        else stands.get(id(item), item)
        for item in held
    )


def _picked(space: dict[str, Any], chosen: tuple[str, ...] | None) -> dict[str, Any]:
    if chosen is None:
        return dict(space)
    return {key: space[key] for key in chosen if key in space}


def attempt(name: str, restore: Undo, lost: list[str]) -> None:
    """Put one thing back; what could not be is named, with the error."""
    try:
        restore()
    except Exception as error:  # noqa: BLE001  the rest is put back all the same
        lost.append(f"{name} ({type(error).__name__}: {error})")


def assign(
    space: dict[str, Any], before: dict[str, Any], chosen: tuple[str, ...] | None = None
) -> None:
    """Make a namespace what it was, or some names of it, touching only what is not."""
    for key in list(space) if chosen is None else chosen:
        if key in space and key not in before:
            del space[key]
    for key, value in before.items():
        if key not in space or space[key] is not value:
            space[key] = value


def items(value: Any) -> tuple[Any, ...]:
    """List what a list, dict, set or deque holds, by the built-in types' own methods."""
    kind = container_kind(value)
    return tuple(kind.items(value) if issubclass(kind, dict) else kind.__iter__(value))


def refill(value: Any, held: tuple[Any, ...]) -> None:
    """Have a container hold this again; nothing is touched where nothing changed."""
    kind = container_kind(value)
    now = items(value)
    if len(now) == len(held) and all(map(_same, now, held)):
        return
    kind.clear(value)
    if issubclass(kind, dict):
        for key, item in held:
            kind.__setitem__(value, key, item)
    else:
        (kind.update if kind is set else kind.extend)(value, held)


def container_state(value: Any) -> Undo | None:
    """Take what a list, dict, set or deque holds; what is returned puts it back."""
    if container_kind(value) is None:
        return None
    held = items(value)
    return lambda: refill(value, held)


@contextmanager
def contents_stay(containers: Iterable[Any]) -> Iterator[None]:
    """Put back what lists, dicts, sets and deques held."""
    held = [container_state(value) for value in containers]
    try:
        yield
    finally:
        for put_back in filter(None, held):
            put_back()


def _same(a: Any, b: Any) -> bool:
    if type(a) is tuple and type(b) is tuple and len(a) == len(b) == 2:
        return a[0] is b[0] and a[1] is b[1]
    return a is b


def _place(stream: io.IOBase) -> Undo:
    """Take a stream's place; it has none while lines are taken from it, or once it is closed."""
    try:
        at = stream.tell()
    except (OSError, ValueError):
        return lambda: None
    return lambda: stream.closed or stream.tell() == at or stream.seek(at)


def generator_state(item: Any) -> Undo:
    """Take a random generator's state; what is returned puts it back.

    Args:
        item: NumPy's or Python's, or any with ``get_state`` and ``set_state``; or a stream, whose
            place it is.
    """
    if isinstance(item, io.IOBase):
        return _place(item)
    if isinstance(item, np.random.Generator):
        bits, held = item.bit_generator, copy.deepcopy(item.bit_generator.state)
        return lambda: setattr(bits, "state", held)
    if isinstance(item, random.Random):
        state = item.getstate()
        return lambda: item.setstate(state)
    state = item.get_state()
    return lambda: item.set_state(state)
