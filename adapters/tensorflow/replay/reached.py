"""What the Python code of a step can reach and a second run of it would move."""

import inspect
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from anynan._steps.adapter import ReplayError

ITERATOR = (
    "the step takes its data from an iterator ({name}), which a second run would advance, so it "
    "was not run again: give it the batch as an argument, and the operation is named"
)
_PLAIN = (int, float, complex, bool, str, bytes, type(None), np.generic)
_CONTAINERS: tuple[Any, ...] = (dict, list, set, deque)
# Far enough for counters and schedules; a whole program, or its data, hangs on some objects.
DEPTH = 3
LIMIT = 1000
ITEMS = 10_000
BYTES = 2**20

Undo = Callable[[], None]


class Reach:
    """Keep what a step's code can reach, as it is now: counters, containers, generators.

    Args:
        fn: The step's function.
        args: What it is called with.
        layers: Layers whose code may change their attributes.
        known: Tells which variables are kept elsewhere.

    Attributes:
        variables: Variables among it, and what they hold.
        iterator: The name of an iterator among it, None if there is none.
    """

    def __init__(
        self, fn: Any, args: Any = (), layers: Any = (), known: Callable[[Any], Any] = bool
    ) -> None:
        self.variables: list[tuple[Any, Any]] = []
        self.iterator: str | None = None
        self._fn, self._args, self._layers, self._known = fn, args, layers, known
        self._undo: list[Undo] = []
        self._seen: dict[int, Any] = {}
        self._generators()
        for cell, name in _cells(fn):
            self._cell(cell)
            self._keep(cell.cell_contents, name, 0)
        for space, name in _globals(fn):
            if isinstance(space[name], _PLAIN):
                self._undo.append(_item_setter(space, name, space[name]))
            self._keep(space[name], name, 0)
        owner = getattr(fn, "__self__", None) if inspect.isroutine(fn) else fn
        if owner is not None:
            self._keep(owner, "self", 0)
        for i, value in enumerate(args):
            self._keep(value, f"args[{i}]", 0)
        for layer in layers:
            self._counters(layer)

    @contextmanager
    def second_run(self) -> Iterator[None]:
        """Let code run again; afterwards everything is as it is now.

        Raises:
            ReplayError: If that would take from an iterator what the user's own run is to have.
        """
        if self.iterator is not None:
            raise ReplayError(ITERATOR.format(name=self.iterator))
        now = Reach(self._fn, self._args, self._layers, self._known)
        try:
            yield
        finally:
            now.put_back()

    def put_back(self) -> None:
        """Make everything what it was."""
        for undo in reversed(self._undo):
            undo()

    def _generators(self) -> None:
        legacy = np.random.get_state()  # noqa: NPY002  the user's global state, not ours
        python = random.getstate()
        self._undo.append(lambda: np.random.set_state(legacy))  # noqa: NPY002
        self._undo.append(lambda: random.setstate(python))

    def _cell(self, cell: Any) -> None:
        held = cell.cell_contents

        def undo() -> None:
            cell.cell_contents = held

        self._undo.append(undo)

    def _keep(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, _PLAIN) or depth > DEPTH or len(self._seen) > LIMIT:
            return
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        kind: Any = type(value)
        if isinstance(value, tf.Variable):
            if not self._known(value):
                self.variables.append((value, tf.convert_to_tensor(value)))
        elif isinstance(value, tf.Tensor) or inspect.isroutine(value) or inspect.ismodule(value):
            return
        elif isinstance(value, tf.random.Generator):
            self._keep(value.state, name, depth)
        elif isinstance(value, np.random.Generator):
            self._undo.append(_attribute_setter(value.bit_generator, value.bit_generator.state))
        elif isinstance(value, np.random.RandomState):
            state = value.get_state()
            self._undo.append(lambda: value.set_state(state))
        elif isinstance(value, random.Random):
            former = value.getstate()
            self._undo.append(lambda: value.setstate(former))
        elif isinstance(value, np.ndarray):
            if value.nbytes <= BYTES:
                content = value.copy()
                self._undo.append(lambda: value.__setitem__(..., content))
        elif kind in _CONTAINERS:
            self._container(value, name, depth)
        elif hasattr(kind, "__next__"):
            # TensorFlow's own is part of the graph, where it is looked for.
            if not isinstance(value, tf.data.Iterator):
                self.iterator = self.iterator or name
        elif isinstance(value, tf.Module) or hasattr(value, "built"):
            self._counters(value)
        elif not isinstance(value, type):
            self._attributes(value, name, depth)

    def _container(self, value: Any, name: str, depth: int) -> None:
        if len(value) > ITEMS:
            return
        held = list(value.items()) if type(value) is dict else list(value)

        def undo() -> None:
            now = list(value.items()) if type(value) is dict else list(value)
            if len(now) == len(held) and all(map(_same, now, held)):
                return
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(held)

        self._undo.append(undo)
        for item in value.values() if type(value) is dict else held:
            self._keep(item, name, depth + 1)

    def _attributes(self, value: Any, name: str, depth: int) -> None:
        held = getattr(value, "__dict__", None)
        if type(held) is not dict or not _is_own(value):
            return
        before = dict(held)

        def undo() -> None:
            for key, item in before.items():
                if held.get(key, before) is not item:
                    held[key] = item
            for key in held.keys() - before.keys():
                del held[key]

        self._undo.append(undo)
        for key, item in before.items():
            self._keep(item, f"{name}.{key}", depth + 1)

    def _counters(self, layer: Any) -> None:
        """Keep the numbers among a layer's own attributes: what it makes of itself stays."""
        for key, item in vars(layer).items() if _is_own(layer) else ():
            if isinstance(item, _PLAIN) and not key.startswith("_") and key != "built":
                self._undo.append(_item_setter(vars(layer), key, item))


def _is_own(value: Any) -> bool:
    """Tell whether something is of the user's own class: a framework's keeps its state itself."""
    return type(value).__module__.partition(".")[0] not in ("keras", "tensorflow", "anynan")


def _same(a: Any, b: Any) -> bool:
    if type(a) is tuple and type(b) is tuple and len(a) == len(b) == 2:
        return a[0] is b[0] and a[1] is b[1]
    return a is b


def _item_setter(space: dict[str, Any], name: str, value: Any) -> Undo:
    def undo() -> None:
        space[name] = value

    return undo


def _attribute_setter(generator: Any, state: Any) -> Undo:
    def undo() -> None:
        generator.state = state

    return undo


def _python(fn: Any) -> Any:
    fn = getattr(fn, "python_function", fn)
    fn = inspect.unwrap(fn)
    return getattr(fn, "__func__", fn)


def _cells(fn: Any) -> Iterator[tuple[Any, str]]:
    """Walk the filled cells of a function, and of the functions in them."""
    todo, seen = [_python(fn)], set()
    while todo:
        inner = todo.pop()
        if id(inner) in seen or getattr(inner, "__closure__", None) is None:
            continue
        seen.add(id(inner))
        for name, cell in zip(inner.__code__.co_freevars, inner.__closure__, strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # empty
                continue
            yield cell, name
            if inspect.isfunction(value):
                todo.append(value)


def _globals(fn: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Walk the globals that a function's code names, and those of its own module's functions."""
    todo, seen = [_python(fn)], set()
    while todo:
        inner = todo.pop()
        code = getattr(inner, "__code__", None)
        if code is None or id(code) in seen:
            continue
        seen.add(id(code))
        space = inner.__globals__
        for name in _names(code):
            if name not in space:
                continue
            yield space, name
            value = space[name]
            if inspect.isfunction(value) and value.__globals__ is space:
                todo.append(value)


def _names(code: Any) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if inspect.iscode(inner):
            yield from _names(inner)
