"""What the Python code of a step reaches: kept when the step begins, given to a second run."""

import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from anynan._base.sources import is_library
from anynan._diagnosis.evidence import ReplayError
from anynan._diagnosis.messages import NOT_PUT_BACK
from anynan._reach import Exhausted, Holder, Kinds, Reach, weak
from anynan._reach.messages import STATE_MISSED
from anynan.tensorflow.read.layers import Layers
from anynan.tensorflow.read.weights import raw

# Bytes of an array that is copied when a step begins, and how many of them.
BYTES = 2**20
MANY = 1000


class Began:
    """Hold what a step began with, beside its arguments and the tracked weights.

    Args:
        reach: What its code reaches.
        given: Its arguments by name.
        layers: Their variables are kept elsewhere.

    Attributes:
        variables: Other variables, and what they held.
        lost: What a second run did not find as it was, with the error.
        left: What was not put back after one.
    """

    def __init__(self, reach: Reach, given: list[tuple[str, Any]], layers: Layers) -> None:
        self.variables: list[tuple[Any, Any]] = []
        self.lost: list[str] = []
        self.left: list[str] = []
        self._reach, self._given, self._layers = reach, given, layers
        self._kept = reach.now(given)
        self._arrays: list[tuple[Holder, Any, Any]] = []
        for holder in self._kept.arrays[:MANY]:
            x = holder.get()
            if isinstance(x, tf.Variable):
                if layers.weights.name(x) is None:
                    self.variables.append((x, tf.convert_to_tensor(x)))
            elif isinstance(x, np.ndarray) and x.nbytes <= BYTES:
                self._arrays.append((holder, x, x.copy()))
        # The global state, which is the user's.
        self._numpy, self._python = np.random.get_state(), random.getstate()  # noqa: NPY002

    def lending(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Have Python's iterators keep what the step takes from them."""
        return self._reach.lending(args, kwargs)

    def notes(self) -> list[str]:
        """Say what a second run missed, and what it left."""
        found = [STATE_MISSED(what=what) for what in self.lost]
        return list(
            dict.fromkeys(
                found + [NOT_PUT_BACK(who="the second run", what=what) for what in self.left]
            )
        )

    @contextmanager
    def second_run(self) -> Iterator[None]:
        """Let code run again; afterwards everything is as it is now.

        Raises:
            ReplayError: If it takes from an iterator what the user's own run is to have.
        """
        now = Began(self._reach, self._given, self._layers)
        try:
            with self._reach.again():
                yield
        except Exhausted as end:
            msg = f"the step was not run again to its end: {end}"
            raise ReplayError(msg) from None
        finally:
            now.put_back()
            self.left += now.lost

    def put_back(self) -> None:
        """Make everything what it was when the step began."""
        np.random.set_state(self._numpy)  # noqa: NPY002
        random.setstate(self._python)
        self.lost += self._reach.put_back(self._kept)
        for holder, x, content in self._arrays:
            try:
                x[...] = content
            except (ValueError, TypeError) as error:
                if not np.array_equal(x, content):
                    self.lost.append(f"{holder.name} ({type(error).__name__}: {error})")


class Reached:
    """Keep what the code of a session's steps can reach.

    Args:
        layers: Layers whose code may run.
    """

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._reaches: dict[int, tuple[Any, Reach]] = {}

    def begin(
        self, fn: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Began:
        """Take what a step begins with.

        Args:
            fn: Its function, or a layer.
            args: What it is called with.
            kwargs: Likewise.
        """
        layers = self._layers.alive()
        code = _code(fn, layers)
        known = self._reaches.get(id(code))
        if known is None:  # the code is held, so nothing else gets its id
            known = self._reaches[id(code)] = code, Reach(code, _kinds(self._layers))
        reach = known[1]
        if reach.is_due():
            reach.search([weak(path or "the model", layer) for path, layer in layers.items()])
        mine = {id(layer) for layer in layers.values()}
        given = [(f"args[{i}]", x) for i, x in enumerate(args)] + list((kwargs or {}).items())
        given = [(name, x) for name, x in given if id(x) not in mine]
        return Began(reach, given, self._layers)


def _code(fn: Any, layers: dict[str, Any]) -> Any:
    """Give what of a step's function may be kept for long: no layer, and no library's code."""
    owner = getattr(fn, "__self__", None)
    if any(fn is layer for layer in layers.values()):
        fn = getattr(type(fn), "call", None) or type(fn).__call__
    elif any(owner is layer for layer in layers.values()):
        fn = fn.__func__
    else:
        return fn
    code = getattr(fn, "__code__", None)
    return None if code is not None and is_library(code.co_filename) else fn


def _kinds(layers: Layers) -> Kinds:
    """Say what TensorFlow's and Keras's own objects are."""
    keras: Any = sys.modules.get("keras")
    modules: tuple[type, ...] = (tf.Module,)
    if keras is not None:
        modules += (
            keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric,
            keras.losses.Loss,
        )  # fmt: skip
    return Kinds(
        arrays=(np.ndarray, tf.Variable),
        iterators=(tf.data.NumpyIterator,),
        modules=modules,
        inner=partial(_inner, layers),
        stays=frozenset({"built"}),
    )


def _inner(layers: Layers, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the variable inside a generator of random numbers, or a variable of Keras."""
    kind = type(value)
    if issubclass(kind, tf.random.Generator) or kind.__name__ == "SeedGenerator":
        yield "state", value.state
    elif kind.__module__.startswith("keras.") and layers.weights.name(value) is None:
        yield "value", raw(value)
