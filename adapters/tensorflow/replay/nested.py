"""Trace a step anew with its nested functions in place and its recurrent layers unrolled."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from anynan.tensorflow.replay.steps import State


@contextmanager
def in_place(
    state: State, layers: Iterable[Any], *, unrolled: bool, asked: bool = False
) -> Iterator[None]:
    """Have nested functions traced in place, with what is in them unrolled.

    Args:
        state: What the thread knows.
        layers: What is watched.
        unrolled: Whether recurrent layers of Keras are unrolled.
        asked: Whether loops and branches are, which run by the values that they ask for.
    """
    rolled = [x for x in layers if getattr(x, "unroll", None) is False]
    for layer in rolled if unrolled else ():
        layer.unroll = True
    state.inline, state.asked = True, asked
    try:
        yield
    finally:
        state.inline = state.asked = False
        for layer in rolled if unrolled else ():
            layer.unroll = False


def anew(fn: Any, *first: Callable[[], None]) -> Any:
    """Make a compiled function again, which was not traced yet.

    Args:
        fn: The function.
        first: Called when its code begins to run.
    """
    jit = bool(getattr(fn, "_jit_compile", False))
    return tf.function(begun(fn.python_function, *first), jit_compile=jit or None)


def begun(fn: Any, *first: Callable[[], None]) -> Any:
    """Make a function that begins with something: one that makes variables is traced twice."""
    if not first:
        return fn
    before = [tf.autograph.experimental.do_not_convert(each) for each in first]

    def run(*args: Any, **kwargs: Any) -> Any:
        for each in before:
            each()
        return fn(*args, **kwargs)

    return functools.update_wrapper(run, fn, updated=())
