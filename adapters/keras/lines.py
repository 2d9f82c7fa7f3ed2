"""The user's line behind each operation of a functional model."""

import ast
import functools
import linecache
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import keras
from keras.src.models.functional import Functional

from anynan._base.identity import ByIdentity
from anynan._base.patches import Patches
from anynan._base.sources import user_source
from anynan.events import Source
from anynan.keras.layers import is_symbolic

Through = Callable[[Callable[..., Any], Any, Any], Any]


def remember(patches: Patches) -> None:
    """Have each operation of a functional model run below the line that put it there.

    Keras keeps no such line. So the operation runs through a function that says it stands there:
    that is what TensorFlow and JAX keep of a stack for what they compile, and what a stack says
    where nothing is compiled. An operation that is called twice has two lines, and gets none.

    A layer that a model of Keras's own calls runs below the line that made the layer. One that the
    program calls has that call's line, but for the activation that it was made with.

    Args:
        patches: Undoes it.
    """
    places: ByIdentity[Any, Through | None] = ByIdentity()
    calling = threading.local()

    def noting(symbolic_call: Any) -> Any:
        def call(operation: Any, *args: Any, **kwargs: Any) -> Any:
            out = symbolic_call(operation, *args, **kwargs)
            source = None if operation in places else user_source(framework="keras")
            places[operation] = None if source is None else _standing(source)
            return out

        return call

    # Not around ``__init__``, which a warning of Keras's names as the place that it is of.
    def made(new: Any) -> Any:
        def call(kind: Any, *args: Any, **kwargs: Any) -> Any:
            layer, source = new(kind, *args, **kwargs), user_source(framework="keras")
            if source is not None:
                places[layer] = _standing(source)
            return layer

        return call

    def placed(run: Any) -> Any:
        def call(operation: Any, *args: Any, **kwargs: Any) -> Any:
            if is_symbolic(args, kwargs):
                return run(operation, *args, **kwargs)
            layer = isinstance(operation, keras.layers.Layer)
            known = not layer or getattr(calling, "by_keras", False)
            through = places.get(operation)
            with by_keras(now=False):
                if through is None:
                    return run(operation, *args, **kwargs)
                if known:
                    return through(run, (operation, *args), kwargs)
                with _activated(operation, through):
                    return run(operation, *args, **kwargs)

        return call

    def whole(run: Any) -> Any:
        @functools.wraps(run)
        def call(*args: Any, **kwargs: Any) -> Any:
            with by_keras(now=True):
                return run(*args, **kwargs)

        return call

    @contextmanager
    def by_keras(*, now: bool) -> Iterator[None]:
        before = getattr(calling, "by_keras", False)
        calling.by_keras = now
        try:
            yield
        finally:
            calling.by_keras = before

    patches.change(keras.Operation, "symbolic_call", noting)
    patches.change(keras.Operation, "__call__", placed)
    patches.change(keras.layers.Layer, "__new__", made)
    for kind in (keras.Sequential, Functional):
        patches.change(kind, "call", whole)


class _Below(NamedTuple):
    """Stand for an activation that runs through a function."""

    through: Through
    run: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        return self.through(self.run, args, kwargs)


@contextmanager
def _activated(layer: Any, through: Through) -> Iterator[None]:
    """Have a layer of Keras's own run its activation through a function while it is called."""
    held, given = vars(layer), vars(layer).get("activation")
    own = type(layer).__module__.startswith("keras.")
    if given is None or not own or isinstance(given, _Below):  # another thread calls it, too
        yield
        return
    held["activation"] = _Below(through, given)  # Keras keeps account of what ``setattr`` sets
    try:
        yield
    finally:
        held["activation"] = given


def _standing(source: Source) -> Through:
    """Make a function that calls another, and whose code says that it stands in a line."""
    tree = ast.parse("lambda run, args, kwargs: run(*args, **kwargs)", mode="eval")
    before, text, _ = linecache.getline(source.file, source.line).partition(source.text)
    known = text and source.column is not None  # an expression over several lines has no place
    columns = (source.column, source.end_column) if known else (0, 0)
    start, end = (len((before + text[:at]).encode()) for at in columns)
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.arg):
            node.lineno = node.end_lineno = source.line
            node.col_offset, node.end_col_offset = start, end
    codes = compile(tree, source.file, "eval").co_consts
    code = next(code for code in codes if isinstance(code, CodeType))
    return FunctionType(code.replace(co_name=source.function, co_qualname=source.function), {})
