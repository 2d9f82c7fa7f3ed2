"""Whether this thread traces a program, and what cannot be watched."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local

_state = local()


class UnwatchableError(Exception):
    """Say that a function was traced, and its program could not be taken apart."""


def tracing() -> bool:
    """Tell whether this thread is tracing a program."""
    return getattr(_state, "depth", 0) > 0


@contextmanager
def under_way() -> Iterator[None]:
    """Have this thread trace a program meanwhile."""
    _state.depth = getattr(_state, "depth", 0) + 1
    try:
        yield
    finally:
        _state.depth -= 1
