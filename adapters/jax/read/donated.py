"""What a step gives away: the program's array is gone, as it asked; a copy may be kept of it."""

import weakref
from typing import Any

import jax
import jax.numpy as jnp


class Copy:
    """Hold the copy of an array.

    Args:
        of: The array.
        array: The copy.
    """

    def __init__(self, of: Any, array: Any) -> None:
        self.of, self.array = weakref.ref(of), array


_copies: weakref.WeakValueDictionary[int, Copy] = weakref.WeakValueDictionary()


def copies(arrays: list[Any]) -> list[Copy]:
    """Copy arrays that a step is about to give away; each copy lasts as long as what is given."""
    arrays = [x for x in arrays if isinstance(x, jax.Array)]
    with jax.debug_nans(False), jax.debug_infs(False):  # it is for the step to fail by them
        found = list(map(Copy, arrays, _copied(arrays)))
    _copies.update((id(x), copy) for x, copy in zip(arrays, found, strict=True))
    return found


@jax.jit
def _copied(arrays: list[Any]) -> list[Any]:
    return list(map(jnp.copy, arrays))


def strong(x: Any) -> Any:
    """Give what is referred to weakly, None if it is gone."""
    return x() if isinstance(x, weakref.ref) else x


def is_gone(x: Any) -> bool:
    """Tell whether an array was given away."""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted()


def alive(x: Any) -> Any:
    """Give an array, its copy if it was given away, None if it is gone."""
    x = strong(x)
    if not is_gone(x):
        return x
    copy = _copies.get(id(x))
    return None if copy is None or copy.of() is not x else copy.array
