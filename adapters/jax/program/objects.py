"""Flax nnx modules and optimizers as arguments: taken apart, and changed in place afterwards.

A step that changes its arguments is no function. Their state goes in and comes out as arrays,
as ``nnx.jit`` does it, and is written back into the objects when the step is over.
"""

import operator
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jax import tree_util


class Objects:
    """Hold the nnx objects among a call's arguments."""

    def __init__(self, found: dict[Hashable, Any]) -> None:
        self.held = {_word(key): x for key, x in found.items()}
        made: Any = _nnx().split(self.held)
        self.definition, state = made
        self.states = {key: state[_word(key)] for key in found if _word(key) in state}

    def pure(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Make a function of states out of a function of objects."""
        nnx, definition, keys = _nnx(), self.definition, tuple(self.held)

        def stepped(*args: Any, **kwargs: Any) -> Any:
            named = {_word(i): i for i in range(len(args))} | {key: key for key in kwargs}
            given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
            states = {key: given[named[key]] for key in keys if key in named}
            held = nnx.merge(definition, _state(states))
            mine = _each(held)
            args = tuple(held.get(_word(i), x) for i, x in enumerate(args))
            kwargs = {key: held.get(key, x) for key, x in kwargs.items()}
            out = fn(*args, **kwargs)
            after, state = nnx.split(held)
            if after != definition or any(map(operator.is_not, mine, _each(held))):
                msg = (
                    "the step changed the structure of an nnx object, not only its arrays: a "
                    "compiled step cannot do that; build the model before it"
                )
                raise ValueError(msg)
            at = {id(x): Own(i) for i, x in enumerate(mine)}
            out = tree_util.tree_map(lambda x: at.get(id(x), x), out, is_leaf=lambda x: id(x) in at)
            return out, {key: state[key] for key in keys if key in state}

        return stepped

    def swapped(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put states in the objects' places."""
        return (
            tuple(self._state_of(i, x) for i, x in enumerate(args)),
            {key: self._state_of(key, x) for key, x in kwargs.items()},
        )

    def _state_of(self, key: Hashable, x: Any) -> Any:
        if _word(key) not in self.held:
            return x
        return self.states.get(key, _state({}))

    def update(self, states: dict[str, Any]) -> None:
        """Write the new state into the objects."""
        for key, state in states.items():
            _nnx().update(self.held[key], state)

    def given_back(self, out: Any) -> Any:
        """Put the program's own objects into a result that holds them."""
        mine = _each(self.held)
        return tree_util.tree_map(lambda x: mine[x.number] if isinstance(x, Own) else x, out)


@dataclass(frozen=True)
class Own:
    """Stand in a result for one of the objects that went in, by its number."""

    number: int


def refuse_shared(out: Any) -> None:
    """Refuse to take a result apart that holds one nnx variable twice: it would become two."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return
    refuse_cycles(out)
    leaves = tree_util.tree_leaves(out, is_leaf=lambda x: isinstance(x, nnx.Variable))
    held = [id(x) for x in leaves if isinstance(x, nnx.Variable)]
    if len(held) > len(set(held)):
        msg = (
            "it gives one nnx variable in two places, and taken apart the two would no longer "
            "change together"
        )
        raise ValueError(msg)


def variables(args: Any, kwargs: Any, *, split: bool) -> list[Any]:
    """List what the nnx variables hold that are in containers, and in no object of the call's.

    Args:
        args: Arguments by position.
        kwargs: Arguments by name.
        split: Whether states stand for objects.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return []
    given = [x for x in (*args, *kwargs.values()) if not (split and isinstance(x, nnx.State))]
    leaves = tree_util.tree_leaves(given, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return tree_util.tree_leaves([x for x in leaves if isinstance(x, nnx.Variable)])


def refuse_changed(before: list[Any], after: list[Any]) -> None:
    """Refuse a step that changes variables in containers: what it writes would be lost.

    Raises:
        ValueError: If it does.
    """
    if len(before) != len(after) or any(x is not y for x, y in zip(before, after, strict=True)):
        msg = "it may change nnx variables in a container: give it the module that holds them"
        raise ValueError(msg)


@contextmanager
def without_writes() -> Iterator[Callable[[], bool]]:
    """Have Keras's variables stay as they are while a program is traced: tracers would stay there.

    Yields:
        Tells whether something was written into one.
    """
    scope: Any = getattr(sys.modules.get("keras"), "StatelessScope", None)
    if scope is None:
        yield lambda: False
        return
    with scope() as written:
        yield lambda: bool(written.state_mapping)


def builds(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call builds a model of Keras's: traced, its weights would stay tracers."""
    if "keras" not in sys.modules:
        return False
    from anynan.keras.layers import unbuilt_in

    return bool(unbuilt_in(fn, (*args, *kwargs.values())))


def refuse_cycles(given: Any) -> None:
    """Refuse nnx objects that hold themselves: JAX walks them until the stack is full, for good.

    Raises:
        ValueError: If one does.
    """
    kind = getattr(sys.modules.get("flax.nnx"), "Pytree", None)
    if kind is None:
        return
    inside, done = set[int](), set[int]()

    def walk(x: Any) -> None:
        own = isinstance(x, kind)
        if id(x) in done or not (own or isinstance(x, list | tuple | dict)):
            return
        if id(x) in inside:
            msg = f"a {type(x).__name__} that it takes or gives holds itself"
            raise ValueError(msg)
        inside.add(id(x))
        for part in vars(x).values() if own else x.values() if isinstance(x, dict) else x:
            walk(part)
        done.add(id(x))

    walk(given)


def objects_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Objects | None:
    """Take nnx objects out of a call's arguments, None if there are none."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return None
    names = ("Module", "Optimizer", "Metric", "Rngs", "Object", "Pytree")
    given = (getattr(nnx, name, None) for name in names)
    kinds = tuple(kind for kind in given if isinstance(kind, type))
    found: dict[Hashable, Any] = {i: x for i, x in enumerate(args) if isinstance(x, kinds)}
    found.update((key, x) for key, x in kwargs.items() if isinstance(x, kinds))
    if not found:
        return None
    with nnx.update_context("anynan"):  # takes what cached_partial holds ready for nnx.jit
        return Objects(found)


def fresh(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Put copies in the place of nnx objects: a trace cannot write into those of before it."""
    found = objects_of(given, {})
    if found is None:
        return given
    states = {_word(key): state for key, state in found.states.items()}
    states = tree_util.tree_map(lambda x: x, states)  # variables are made anew
    held = _nnx().merge(found.definition, _state(states))
    return tuple(held.get(_word(i), x) for i, x in enumerate(given))


def _each(held: Any) -> list[Any]:
    """List the nnx objects and variables in what holds them."""
    nnx = _nnx()
    kinds = nnx.Module, nnx.Variable
    return [x for _, x in nnx.iter_graph(held) if isinstance(x, kinds)]


def _word(key: Hashable) -> str:
    return f"argument{key}" if isinstance(key, int) else str(key)


def _nnx() -> Any:
    return sys.modules["flax.nnx"]


def _state(states: dict[Any, Any]) -> Any:
    return _nnx().State(states)
