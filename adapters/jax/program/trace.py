"""Whether this thread traces a program, and what cannot be watched."""

import functools
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import local
from typing import Any

import jax
import jax.numpy as jnp

from anynan.jax.graphs.versions import trace_state

_state = local()


class UnwatchableError(Exception):
    """Say that a function was traced, and its program could not be taken apart."""


class ShutError(UnwatchableError):
    """Say that some equations could not be rebuilt.

    Args:
        paths: Where they are, and why.
    """

    def __init__(self, paths: Mapping[tuple[Any, ...], str]) -> None:
        super().__init__("; ".join(dict.fromkeys(paths.values())))
        self.paths = dict(paths)


class UntraceableError(TypeError):
    """Say that a function needs numbers where a trace has none."""


def traced(arrays: Any) -> bool:
    """Tell whether a call comes from inside a transformation of the caller's."""
    return any(issubclass(kind, jax.core.Tracer) for kind in set(map(type, arrays)))


@functools.cache
def _eager() -> Any:
    with ThreadPoolExecutor(1) as another:  # a thread begins outside of every trace
        return another.submit(trace_state).result()


def eager() -> bool:
    """Tell whether this is outside of every transformation; some that are none look like one."""
    return bool(trace_state() == _eager()) and not tracing()


def staged() -> bool:
    """Tell whether what is computed here becomes a part of a caller's program."""
    return trace_state() != _eager() and traced([jnp.negative(0)])


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
