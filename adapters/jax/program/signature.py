"""What goes into a function and comes out: arrays apart from the rest, each with a name."""

import functools
import itertools
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax import tree_util

from anynan._arrays.arguments import bound

Role = Literal["input", "parameter", "buffer", "state"]
_WEIGHTS = re.compile(
    r"^(params?|weights?|variables?|model|net|network|theta|module|state|train_state|ts|"
    r"trainable\w*|.*_params|.*_weights|.*_model|.*_variables)$"
)
_STATES = re.compile(
    r"^(opt|optim|optimizer|optimiser|opt_?state\w*|optimi[sz]er_state|.*_opt_state|.*optimizer)$"
)
# One array alone is a weight or a state by its name only, and only if it comes back.
_ALONE = re.compile(
    r"^(w\d*|kernel|bias|best\w*|carry|hidden\w*|h\d*|memory|cache|running_\w+|ema\w*)$"
)
_COLLECTIONS = ("params", "batch_stats", "variables", "model", "value", "raw_value", "state")
_STATISTICS = ("batch_stats",)
_known: dict[type, bool] = {}


class Slot(int):
    """Stand for an array by its number; a class of the program's may ask for its shape."""

    aval: Any = None

    @classmethod
    def each(cls, avals: Iterable[Any]) -> "Iterator[Slot]":
        """Give one for each array of these types."""
        for number, kind in enumerate(avals):
            slot = cls(number)
            slot.aval = kind
            yield slot

    def __getattr__(self, name: str) -> Any:
        """Give what the array's type tells."""
        return getattr(self.aval, name)


@dataclass(frozen=True, slots=True)
class Leaf:
    """Describe one array that goes in.

    Attributes:
        name: What the user calls it: ``batch['image']``; a weight's own name.
        role: What it is to the function.
        argument: Number or name of the argument it is in.
        rest: Its path inside the argument.
    """

    name: str
    role: Role
    argument: Hashable
    rest: tuple[Any, ...]

    @property
    def short(self) -> str:
        """What its layer calls it."""
        return self.name.rpartition(".")[2]


def is_array(x: Any) -> bool:
    """Tell whether a leaf is data; anything else is part of the program."""
    if isinstance(x, np.ndarray | np.generic):
        return x.dtype.kind not in "OSUMmV" or _extended(x)
    return isinstance(x, jax.Array | bool | int | float | complex)


def _extended(x: Any) -> bool:
    return x.dtype.kind == "V" and hasattr(jax.numpy, x.dtype.name)


def aval(x: Any) -> Any:
    """Give an array's type, as a trace depends on it."""
    return jax.typeof(x)


def kinds(arrays: list[Any]) -> Hashable:
    """Say what of the arguments a trace depends on."""
    # The type with its sharding is slow to make and to compare, and this is done for every
    # weight in every step.
    array: Any = _array()
    alone = jax.sharding.SingleDeviceSharding
    return tuple(
        [x.aval if type(x) is array and type(x.sharding) is alone else aval(x) for x in arrays]
    )


@functools.cache
def _array() -> type:
    with jax.ensure_compile_time_eval():  # the first call may come while a caller is traced
        return type(jax.numpy.zeros(()))


@dataclass(frozen=True)
class Fixed:
    """Hold an argument that the user's own jit takes as static: to JAX, 1 is another than 1.0."""

    value: Any
    kind: type


def static_arguments(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[Hashable]:
    """Find the arguments that a jitted function takes as static, by position or name."""
    trace = getattr(fn, "trace", None)
    plain = [i for i, x in enumerate(args) if not any(map(is_data, tree_util.tree_leaves(x)))]
    if trace is None or not (plain or kwargs):
        return set()
    given: Any = getattr(getattr(fn, "jitted_fn", fn), "_jit_info", None)  # or nnx.jit's own
    numbers = getattr(given, "static_argnums", (-1,))
    if min(numbers, default=0) >= 0:  # several plain numbers do not tell which of them is static
        return {*numbers, *given.static_argnames}
    positional, named = trace(*args, **kwargs).args_info
    count = len(args) - len(positional)
    structures = [tree_util.tree_structure(x) for x in positional]
    for chosen in itertools.combinations(plain, count):
        rest = [tree_util.tree_structure(x) for i, x in enumerate(args) if i not in chosen]
        if rest == structures:
            return {*chosen, *(key for key in kwargs if key not in named)}
    return {key for key in kwargs if key not in named}


def is_data(x: Any) -> bool:
    """Tell whether a leaf is an array, and no plain number."""
    known = _known.get(type(x))
    if known is None:  # asking JAX takes longer than to remember
        known = _known[type(x)] = isinstance(x, jax.Array | np.ndarray | np.generic)
    return known


@dataclass(frozen=True)
class Flat:
    """Hold a call's arguments, taken apart.

    Attributes:
        arrays: What a trace makes abstract.
        fixed: What it does not, by position.
        tree: How to put both together again.
        size: How many leaves there are.
    """

    arrays: list[Any]
    fixed: tuple[tuple[int, Any], ...]
    tree: Any
    size: int

    def key(self) -> Hashable:
        """Say what a compiled program depends on."""
        fixed = tuple((i, x if _hashable(x) else id(x)) for i, x in self.fixed)
        return self.tree, fixed, kinds(self.arrays)

    def joined(self, arrays: Any) -> Any:
        """Put other arrays into the arrays' places."""
        leaves = list(arrays)
        for i, x in self.fixed:  # in rising order
            leaves.insert(i, x)
        return tree_util.tree_unflatten(self.tree, leaves)

    def arguments(self, arrays: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put other arrays into the arrays' places of a call."""
        args, kwargs = self.joined(arrays)
        return tuple(map(_freed, args)), {key: _freed(x) for key, x in kwargs.items()}


def _freed(x: Any) -> Any:
    return x.value if isinstance(x, Fixed) else x


def _hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


@dataclass(frozen=True)
class Compared:
    """Stand for a key that has no hash, as that of an nnx module with a list."""

    key: Any

    def __hash__(self) -> int:
        """Leave it to the comparison."""
        return 0


def hashed(key: Any) -> Hashable:
    """Give a key that has a hash, and is equal to what the key is equal to."""
    return key if _hashable(key) else Compared(key)


def flatten(
    args: tuple[Any, ...], kwargs: dict[str, Any], static: set[Hashable], *, plain: bool = False
) -> Flat:
    """Take arguments apart.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        static: Those that are no data, by position or name.
        plain: Plain numbers are no data either, as equinox has it.
    """
    if static:
        args = tuple(Fixed(x, type(x)) if i in static else x for i, x in enumerate(args))
        kwargs = {key: Fixed(x, type(x)) if key in static else x for key, x in kwargs.items()}
    return parted((args, kwargs), plain=plain)


def parted(tree: Any, *, plain: bool = False) -> Flat:
    """Take a tree apart into data and the rest."""
    leaves, structure = tree_util.tree_flatten(tree)
    one_of_each = {type(leaf): leaf for leaf in leaves}
    if all(map(is_data, one_of_each.values())):  # as in most training steps
        return Flat(leaves, (), structure, len(leaves))
    arrays, fixed = [], []
    modules = set() if plain else _in_modules(tree)
    for i, leaf in enumerate(leaves):
        if is_data(leaf) or (is_array(leaf) and not plain and i not in modules):
            arrays.append(leaf)
        else:
            fixed.append((i, leaf))
    return Flat(arrays, tuple(fixed), structure, len(leaves))


def _in_modules(tree: Any) -> set[int]:
    """Find the leaves inside equinox modules: numbers there are part of the program."""
    equinox = sys.modules.get("equinox")
    if equinox is None:
        return set()
    return _leaves_inside(tree, lambda x: isinstance(x, equinox.Module))


def _leaves_inside(tree: Any, wanted: Callable[[Any], bool]) -> set[int]:
    """Number the leaves of a tree that are inside of some of its nodes."""
    found: set[int] = set()
    at = 0
    for item in tree_util.tree_leaves(tree, is_leaf=wanted):
        size = len(tree_util.tree_leaves(item)) if wanted(item) else 1
        found.update(range(at, at + size) if wanted(item) else ())
        at += size
    return found


def leaves_of(tree: Any, names: tuple[str, ...], returned: set[Hashable]) -> list[Leaf]:
    """Name every array of ``(args, kwargs)`` and say what it is.

    Args:
        tree: The arguments.
        names: Names of the positional parameters.
        returned: Arguments that come out again, as a new state or as gradients.
    """
    args, kwargs = tree
    found: list[Leaf] = []
    keys = (*range(len(args)), *kwargs)
    for key, (name, value) in zip(keys, bound(names, args, kwargs), strict=True):
        flat, _ = tree_util.tree_flatten_with_path(value)
        container = len(flat) != 1 or bool(flat[0][0])
        bare = name.rpartition(".")[2]
        told = key in returned or _WEIGHTS.match(bare) or _STATES.match(bare) or _module(value)
        kept = bool(told) if container else key in returned and is_kept(bare)
        moments = _moments(value)
        for at, (path, leaf) in enumerate(flat):
            if not isinstance(leaf, Slot):
                continue
            if not kept:
                found.append(Leaf(name + spelled(path), "input", key, path))
                continue
            steps = words(path)
            role: Role = "parameter"
            if at in moments or any(_STATES.match(word) for word in (bare, *steps[:1])):
                role = "state"
            elif any(step in _STATISTICS for step in steps[:2]):
                role = "buffer"
            own = weight_name(steps, name if role == "state" else "") if container else name
            found.append(Leaf(own, role, key, path))
    return found


def is_kept(name: str) -> bool:
    """Tell by its name whether one array alone is a weight or a state."""
    return any(pattern.match(name) for pattern in (_WEIGHTS, _STATES, _ALONE))


def _moments(value: Any) -> set[int]:
    """Find the leaves of an argument that optax made, whatever the argument is called."""
    return _leaves_inside(value, lambda x: type(x).__module__.partition(".")[0] == "optax")


def _module(value: Any) -> bool:
    """Tell whether an argument is a model, by what its class comes from."""
    kinds = [kind.__module__.partition(".")[0] for kind in type(value).__mro__]
    return "equinox" in kinds or "flax" in kinds


def spelled(path: Any) -> str:
    """Spell a path in a tree as code would: ``['image'][0]``."""
    try:
        return str(tree_util.keystr(path))
    except Exception:  # noqa: BLE001  a key whose repr raises
        return "".join(f"[{word}]" for word in words(path))


def _word(step: Any) -> str:
    try:
        return str(step)
    except Exception:  # noqa: BLE001  a key that cannot be spelled
        return type(step).__name__


def words(path: Any) -> list[str]:
    """Give the steps of a path in a tree as plain words."""
    found: list[str] = []
    for step in path:
        for name in ("key", "name", "idx"):
            if hasattr(step, name):
                found += [part for part in _word(getattr(step, name)).split("/") if part != "~"]
                break
        else:
            found.append(_word(step).strip(".[]'\""))
    return found


def weight_name(steps: list[str], prefix: str = "") -> str:
    """Give a weight's own name: ``block_0.up.kernel``."""
    kept = list(steps)
    while len(kept) > 1 and kept[0] in _COLLECTIONS:
        kept = kept[1:]
    while len(kept) > 1 and kept[-1] in ("value", "raw_value"):
        kept = kept[:-1]
    name = ".".join(kept) or "weight"
    return f"{prefix}.{name}" if prefix else name


def subtrees(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """List the places of a result that may be an argument come back: it, and its items."""
    found: list[tuple[tuple[Any, ...], Any]] = [((), tree)]
    for depth in range(3):
        more = []
        for path, item in found:
            if len(path) == depth and type(item) in (tuple, list):
                more += [((*path, i), child) for i, child in enumerate(item)]
            elif len(path) == depth and type(item) is dict:
                more += [((*path, key), child) for key, child in item.items()]
        found += more
    return found
