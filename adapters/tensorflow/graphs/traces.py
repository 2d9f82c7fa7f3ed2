"""What was put into a graph while it was traced: which rows it writes, which scope is whose."""

import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from anynan.tensorflow.read.buffers import Block


@dataclass
class Trace:
    """Know one graph.

    Attributes:
        blocks: What it writes, in the order of execution.
        scopes: Name scope -> layer path and number of the call.
        updates: Name scopes of optimizers.
        calls: How often each layer was called.
        sparse: Weights whose gradient is one of some rows.
        repairs: Name scope of what took an operation's place -> that operation's name.
        aside: Names of the nodes that were repaired: nothing takes them.
        lines: Name scope -> the lines that its operations were first run by.
    """

    blocks: list[Block] = field(default_factory=list)
    scopes: dict[str, tuple[str, int]] = field(default_factory=dict)
    updates: set[str] = field(default_factory=set)
    calls: dict[str, int] = field(default_factory=dict)
    sparse: set[str] = field(default_factory=set)
    repairs: dict[str, str] = field(default_factory=dict)
    aside: set[str] = field(default_factory=set)
    lines: dict[str, Any] = field(default_factory=dict)
    _open: list[str] = field(default_factory=list)

    @property
    def running(self) -> str | None:
        """Give the innermost layer that is traced at this moment."""
        return self._open[-1] if self._open else None

    @contextmanager
    def inside(self, graph: Any, layer: Any, path: str) -> Iterator[None]:
        """Note under which name scopes the operations of a layer's call are made."""
        with self.under(path), self._scoped(graph, layer, path):
            yield

    @contextmanager
    def under(self, path: str) -> Iterator[None]:
        """Note that a layer is traced."""
        self._open.append(path)
        try:
            yield
        finally:
            self._open.pop()

    def traceback(self, node: Any) -> Any:
        """Give the lines of a node: those it first ran by, where it is made again."""
        return next((self.lines[s] for s in scopes(node.name) if s in self.lines), node.traceback)

    @contextmanager
    def _scoped(self, graph: Any, layer: Any, path: str) -> Iterator[None]:
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
        return next((self.scopes[s] for s in scopes(name) if s in self.scopes), None)

    def repair(self, name: str) -> str | None:
        """Give the scope of the repair that an operation is a part of."""
        return next((s for s in scopes(name) if s in self.repairs), None)


class Traces:
    """Know the graphs that were traced while something was watched, as long as they live."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, Trace] = weakref.WeakKeyDictionary()

    def of(self, graph: Any) -> Trace:
        """Give what is known of a graph."""
        found = self._known.get(graph)
        if found is None:
            found = self._known[graph] = Trace()
        return found

    def writes(self, block: Block, weights: Callable[[], list[Any]]) -> bool:
        """Tell whether the graph that a block is read in updates one of these variables."""
        if block.updates is None:
            graphs = (graph for graph, trace in self._known.items() if block in trace.blocks)
            graph = next(graphs, None)
            block.updates = graph is not None and (
                bool(self.of(graph).updates) or _assigns(graph, weights())
            )
        return block.updates


def scopes(name: str) -> Iterator[str]:
    """Give an operation's name, and the scopes that it is in, the innermost first."""
    while name:
        yield name
        name = name.rpartition("/")[0]


def _assigns(graph: Any, weights: list[Any]) -> bool:
    handles = {id(weight.handle) for weight in weights}
    return any(
        id(outer) in handles and node.type.startswith("Assign")
        for outer, inner in graph.captures
        for node in inner.consumers()
    )


def _number(base: str, name: str) -> int:
    found = re.fullmatch(re.escape(base) + r"_(\d+)", name, re.IGNORECASE)
    return int(found[1]) if found else 0
