"""What is read inside a program, and how the readings of a loop's rounds are joined."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from anynan.jax.read import probes

Path = tuple[Any, ...]
What = Literal["code", "sum", "nan", "ends", "span", "value"]
# Their first column is a total, which is a word only after a loop.
TOTALS = ("sum", "nan", "span")
# Words of rounds that are kept for one reading, and at most of a loop whose length is not known.
ROUNDS, WHILE = 4096, 256
# They are a row of numbers, and not one.
WIDE = ("ends", "span")


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask for one reading of a value.

    Attributes:
        key: What the reading is known by.
        what: ``code`` (the word), ``ends`` (word, smallest, largest), ``value`` (all of it); for
            every step ``sum`` (the total), ``nan`` (0 without one) and ``span`` (total, smallest,
            largest).
        at: For ``value``: the iteration of each loop around it, outermost first.
        number: For ``sum`` and ``span``: its place among the readings.
    """

    key: Any
    what: What = "code"
    at: tuple[int, ...] = ()
    number: int = 0


@dataclass
class Plan:
    """Say what to read where.

    Attributes:
        probes: Path of a jaxpr in the program -> variable -> probes.
        inside: Paths that hold a probe somewhere inside; others are run untouched.
        replaying: Leave out effects whose results nobody uses.
        opaque: Primitives that are not to be opened.
        extra: Further statistics beside the ends.
        detached: Keep the readings out of the caller's differentiation.
        factors: What totals are scaled by, while the program is traced.
        rounds: Keep the word of every round of a loop.
        callback: Binds the equations that call back to the host; None: they are run as they are.
        shut: Paths of the equations that could not be rebuilt, and why: set by the evaluation.
    """

    probes: dict[Path, dict[Any, list[Probe]]] = field(default_factory=dict)
    inside: set[Path] = field(default_factory=set)
    replaying: bool = False
    opaque: frozenset[str] = frozenset()
    extra: tuple[str, ...] = ()
    detached: bool = False
    factors: Any = None
    rounds: bool = False
    callback: Callable[[Any, list[Any], Path], list[Any]] | None = None
    shut: dict[Path, str] = field(default_factory=dict)

    def add(self, path: Path, var: Any, probe: Probe) -> None:
        """Ask for a reading."""
        self.probes.setdefault(path, {}).setdefault(var, []).append(probe)
        self.open(path)

    def open(self, path: Path) -> None:
        """Have a body evaluated equation by equation."""
        for length in range(len(path) + 1):
            self.inside.add(path[:length])


@dataclass(slots=True)
class Emission:
    """Hold one reading inside the program.

    Attributes:
        probe: What was asked for.
        data: The word, total, ends or array; with a leading axis of devices inside shard_map.
        its: Iteration of each loop around it in which the worst word was seen, outermost first.
        shards: True if there is a leading axis of devices.
        rounds: The word of every round, one axis for each loop, outermost first; None where
            they are not kept.
    """

    probe: Probe
    data: Any
    its: tuple[Any, ...] = ()
    shards: bool = False
    rounds: Any = None

    @property
    def word(self) -> Any:
        """Give the word out of the data."""
        found = self.data[..., 0] if self.wide else self.data
        return found if self.its or self.probe.what not in TOTALS else probes.words(found)

    @property
    def wide(self) -> bool:
        """Tell whether there is a row of numbers, and not one."""
        return self.probe.what in WIDE


# A transformation of JAX's hands them on like any tree of arrays.
jax.tree_util.register_dataclass(Emission, ["data", "its", "rounds"], ["probe", "shards"])


@dataclass(frozen=True, slots=True)
class Shape:
    """Say what a reading of a body will look like."""

    probe: Probe
    data: tuple[tuple[int, ...], Any]
    loops: int = 0
    shards: bool = False
    dims: tuple[int, ...] | None = None

    @property
    def kept(self) -> bool:
        """Tell whether there is a word for every round."""
        return bool(self.loops) and self.dims is not None

    def looped(self, length: int | None) -> "Shape":
        """Give the shape outside of a loop, None for a length that is not known."""
        if self.probe.what == "value":
            return self
        if length is None:  # the first rounds, as many as there is room for
            length = max(min(WHILE, ROUNDS // max(math.prod(self.dims or ()), 1)), 1)
        dims = None if self.dims is None else (length, *self.dims)
        if dims is not None and math.prod(dims) > ROUNDS:
            dims = None
        return replace(self, loops=self.loops + 1, dims=dims)

    def spread(self, size: int) -> "Shape":
        """Give the shape outside of shard_map."""
        return replace(self, data=((size, *self.data[0]), self.data[1]), shards=True)


def kept_as(probe: Probe, aval: Any, width: int) -> tuple[tuple[int, ...], Any]:
    """Give the shape and dtype of a reading of a value."""
    if probe.what == "value":
        return tuple(aval.shape), aval.dtype
    if probe.what == "code":
        return (), jnp.float32
    return (width,) if probe.what in WIDE else (), probes.wide()


def of_round(item: Emission) -> Any:
    """Give the words of the rounds inside of one round, or its own."""
    return item.word.astype(jnp.float32) if item.rounds is None else item.rounds


def with_rounds(items: list[Emission], shapes: list["Shape"], rounds: Any) -> list[Emission]:
    """Put the words of all rounds, the newest loop first, to readings that keep them."""
    left = iter(rounds)
    found = []
    for item, shape in zip(items, shapes, strict=True):
        kept = next(left) if shape.kept else None
        if kept is not None and shape.shards:
            kept = jnp.moveaxis(kept, 0, 1)
        found.append(replace(item, rounds=kept))
    return found


def folded(new: Emission, old: Emission, it: Any, depth: int) -> Emission:
    """Join what an iteration saw with what those before it saw."""
    if new.probe.what == "value":
        now = it == new.probe.at[depth]
        now = now if not jnp.ndim(now) else now.reshape(now.shape + (1,) * (new.data.ndim - 1))
        return replace(new, data=jnp.where(now, new.data, old.data))
    worse = new.word > old.word
    data = new.data
    if new.wide:
        low = jnp.minimum(new.data[..., 1], old.data[..., 1])
        high = jnp.maximum(new.data[..., 2], old.data[..., 2])
        word = jnp.maximum(new.word, old.word).astype(data.dtype)
        data = jnp.concatenate([jnp.stack([word, low, high], axis=-1), new.data[..., 3:]], axis=-1)
    else:
        data = jnp.maximum(new.word, old.word).astype(data.dtype)
    its = (jnp.broadcast_to(it, new.word.shape), *new.its)
    kept = tuple(jnp.where(worse, a, b) for a, b in zip(its, old.its, strict=True))
    return Emission(new.probe, data, kept, new.shards)
