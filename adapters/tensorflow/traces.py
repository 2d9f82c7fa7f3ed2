"""What was put into a graph while it was traced: which rows it writes, which scope is whose."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from anynan.events import Phase

if TYPE_CHECKING:
    from anynan.tensorflow.places import Places

# What watching adds to a graph is in this name scope.
SCOPE = "anynan"


@dataclass(slots=True)
class Spot:
    """Name one tensor that is read.

    Attributes:
        layer: Layer path, None outside every watched layer.
        phase: Phase of the reading.
        tensor: Which tensor (``output``, ``grad``).
        dtype: Short dtype name.
        dtype_max: The dtype's largest finite value.
        name: The tensor's name in its graph, empty where there is no graph.
        parameter: Name of the weight it belongs to.
    """

    layer: str | None
    phase: Phase
    tensor: str
    dtype: str
    dtype_max: float
    name: str = ""
    parameter: str | None = None


@dataclass(slots=True)
class Block:
    """Hold the rows that one write fills.

    Attributes:
        start: The first row on the board.
        spots: What each row reads, in execution order.
        order: All of them, and what only a replay looks at.
        backward: True for what a gradient call wrote.
        updates: True if its graph updates weights; None before that was asked.
        places: What the core knows the spots by, once they were read.
        confirmed: Spots whose NaN was seen to be one.
    """

    start: int
    spots: list[Spot]
    order: list[Spot]
    backward: bool = False
    updates: bool | None = None
    places: "Places | None" = None
    confirmed: set[int] = field(default_factory=set)


@dataclass
class Trace:
    """Know one graph.

    Attributes:
        blocks: What it writes, in the order of execution.
        scopes: Name scope -> layer path and number of the call.
        updates: Name scopes of optimizers.
        calls: How often each layer was called.
    """

    blocks: list[Block] = field(default_factory=list)
    scopes: dict[str, tuple[str, int]] = field(default_factory=dict)
    updates: set[str] = field(default_factory=set)
    calls: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def inside(self, graph: Any, layer: Any, path: str) -> Iterator[None]:
        """Note under which name scopes the operations of a layer's call are made."""
        name = str(getattr(layer, "name", None) or type(layer).__name__).replace("/", "_")
        if isinstance(layer, tf.Module):  # it opens no scope by itself, as Keras's layers do
            call = self.calls[path] = self.calls.get(path, -1) + 1
            with tf.name_scope(name) as scope:
                self.scopes[scope.rstrip("/")] = (path, call)
                yield
            return
        outer = tf.get_current_name_scope()
        before = graph.unique_name(name, mark_as_used=False)
        yield
        after = graph.unique_name(name, mark_as_used=False)
        self.enter(f"{outer}/{name}" if outer else name, before, after, path)

    def enter(self, base: str, before: str, after: str, path: str) -> None:
        """Note which name scopes a layer's call opened.

        Args:
            base: The scope it asks for.
            before: The scope it would have got before the call.
            after: The scope it would get now.
            path: Layer path.
        """
        call = self.calls[path] = self.calls.get(path, -1) + 1
        for i in range(_number(base, before), _number(base, after)):
            self.scopes.setdefault(base if not i else f"{base}_{i}", (path, call))

    def layer(self, name: str) -> tuple[str, int] | None:
        """Give the innermost layer, and its call, in whose scope an operation is."""
        parts = name.split("/")
        for end in range(len(parts), 0, -1):
            found = self.scopes.get("/".join(parts[:end]))
            if found is not None:
                return found
        return None


def _number(base: str, name: str) -> int:
    found = re.fullmatch(re.escape(base) + r"_(\d+)", name, re.IGNORECASE)
    return int(found[1]) if found else 0
