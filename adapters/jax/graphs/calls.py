"""The calls of a program's layers: what goes in and comes out, turn by turn of a loop."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from anynan._base.walks import walk
from anynan.jax.graphs.bodies import backwards, bodies, rounds_of
from anynan.jax.graphs.graph import Graph, Node, Value
from anynan.jax.graphs.layers import Layers, inside
from anynan.jax.read.probes import checkable
from anynan.jax.read.readings import Path

Turn = tuple[int, ...]
_Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Call:
    """Hold one call of a layer.

    Attributes:
        layer: Its path.
        way: ``forward`` or ``backward``.
        number: Which call, counted over the turns of loops.
        index: Which call in the program's text.
        turn: Which turn of each ``scan`` around the layer, outermost first.
        given: Numbers of the values that go in.
        made: Numbers of the values that come out.
    """

    layer: str
    way: Literal["forward", "backward"]
    number: int
    index: int
    turn: Turn
    given: tuple[int, ...]
    made: tuple[int, ...]


class Calls:
    """Walk the calls of layers in the order in which they end.

    Of the backward pass there is what arrives: inside a layer JAX adds gradients up where it
    likes.
    """

    def __init__(self, graph: Graph, layers: Layers, first: int) -> None:
        """Begin.

        Args:
            graph: The program.
            layers: Its layers.
            first: Number of the first argument that is no weight.
        """
        self.graph, self.layers = graph, layers
        self._live = self._reached(first)
        self.open = opened(graph)
        self.hidden = False
        self.calls = list(self._forward())
        self._numbers = {(x.layer, x.index, x.turn): x.number for x in self.calls}
        self._ends = [self._end[x.layer, x.index, x.turn] for x in self.calls]
        self.calls += self._backward()

    def own(self, call: Call) -> Iterator[Node]:
        """Walk the operations of a layer's own code."""
        for node in self.graph.nodes:
            here = self.layers.of(node) == call.layer and not node.backward
            here = here and node.path in self.open and node.loops == len(call.turn)
            if here and self.layers.call(node, call.layer) == call.index:
                yield node

    def before(self, node: Node, turn: Turn) -> int:
        """Count the calls that have ended when an operation runs."""
        return sum(end < _filled(node, turn) for end in self._ends)

    def _reached(self, first: int) -> set[int]:
        """Find the values that depend on the batch."""
        first_in = [
            value.index for value in self.graph.values
            if value.argument is not None and value.argument >= first
        ]  # fmt: skip
        return set(walk(first_in, lambda i: [*self.graph.makes(i), *self.graph.values[i].handed]))

    def _forward(self) -> Iterator[Call]:
        layers = self.layers
        nodes: dict[_Key, list[Node]] = {}
        for node in self.graph.nodes:
            path = layers.of(node)
            if node.after or node.backward or path is None:
                continue
            self.hidden = self.hidden or node.path not in self.open
            for layer in layers.around(path):
                nodes.setdefault((layer, layers.call(node, layer)), []).append(node)
        found: list[tuple[tuple[float, ...], Call]] = []
        self.depths: dict[_Key, int] = {}
        self._end: dict[tuple[str, int, Turn], tuple[float, ...]] = {}
        for (layer, index), inner in nodes.items():
            counted = [node for node in inner if self._lively(node)] or inner
            shared = list(zip(*(loops(node) for node in counted), strict=False))
            depth = next((i for i, x in enumerate(shared) if len(set(x)) > 1), len(shared))
            self.depths[layer, index] = depth
            given = dict.fromkeys(
                i for node in inner for x in node.ins for i in self._at(x, depth)
                if self._comes_in(i, layer, depth)
            )  # fmt: skip
            made = dict.fromkeys(
                i for node in inner for x in node.outs if x is not None
                for i in self._out_at(x, depth) if self._leaves(i, layer, depth)
            )  # fmt: skip
            if not made:
                continue
            last = counted[0]
            for turn in turns(last, depth):
                end = max(_filled(node, turn) for node in counted)
                self._end[layer, index, turn] = end
                found.append(
                    (end, Call(layer, "forward", 0, index, turn, tuple(given), tuple(made)))
                )
        # A layer ends with its last operation, and before those around it.
        found.sort(key=lambda x: (x[0], -x[1].layer.count("."), -len(x[1].layer)))
        counts: dict[str, int] = {}
        for _, call in found:
            number = counts[call.layer] = counts.get(call.layer, -1) + 1
            yield Call(call.layer, "forward", number, call.index, call.turn, call.given, call.made)

    def _backward(self) -> Iterator[Call]:
        arriving: dict[_Key, dict[int, None]] = {}
        for point in self.layers.arriving():
            layer, value = point.layer or "", self.graph.values[point.value]
            key = (layer, point.call)
            if self._joins(value.index, layer) or value.loops != self.depths.get(key):
                continue
            if value.path in self.open:
                arriving.setdefault(key, {})[value.index] = None
        ordered: list[tuple[tuple[float, ...], Call]] = []
        for (layer, index), found in arriving.items():
            reader = self.graph.nodes[self.graph.values[next(iter(found))].readers[0]]
            for turn in turns(reader, self.depths[layer, index]):
                number = self._numbers.get((layer, index, turn), index if not turn else None)
                if number is not None:
                    call = Call(layer, "backward", number, index, turn, tuple(found), ())
                    ordered.append((_filled(reader, turn), call))
        yield from (call for _, call in sorted(ordered, key=lambda x: x[0]))

    def _lively(self, node: Node) -> bool:
        return any(i in self._live for i in node.outs)

    def _at(self, index: int, depth: int) -> Iterator[int]:
        """Follow a value out of the loops inside a layer."""
        values = self.graph.values
        for i in walk([index], lambda i: values[i].feeds if values[i].loops > depth else ()):
            if values[i].loops <= depth:
                yield i

    def _out_at(self, index: int, depth: int) -> Iterator[int]:
        """Follow what an operation makes out of the loops and branches inside a layer."""
        values = self.graph.values

        def more(i: int) -> list[int]:
            after = [j for j in values[i].handed if values[j].loops >= depth]
            return [j for j in after if not self._begins(values[j])]

        return (i for i in walk([index], more) if values[i].loops == depth)

    def _begins(self, value: Value) -> bool:
        """Tell whether a value is what a turn of a loop begins with."""
        return any(self.graph.values[i].loops < value.loops for i in value.feeds)

    def _comes_in(self, index: int, layer: str, depth: int) -> bool:
        value = self.graph.values[index]
        if value.known or not checkable(value.aval) or index not in self._live:
            return False
        if value.path not in self.open:
            return False
        if value.argument is not None or self._begins(value):
            return True
        nodes = [value.writer] if value.writer is not None else self._writers(value, depth)
        return not any(inside(self.layers.of(self.graph.nodes[n]), layer) for n in nodes)

    def _writers(self, value: Value, depth: int) -> list[int]:
        """Find the operations of a loop or a branch that make what it gives."""
        values = [self.graph.values[i] for i in self.graph.sources(value.index)]
        return [x.writer for x in values if x.writer is not None and x.loops > depth] or [
            x.writer for x in values if x.writer is not None
        ]

    def _leaves(self, index: int, layer: str, depth: int) -> bool:
        value = self.graph.values[index]
        if not checkable(value.aval) or value.known or self.graph.placed(index):
            return False
        if value.path not in self.open:
            return False
        if depth and any(
            self._begins(self.graph.values[i]) and self.graph.values[i].loops == depth
            for i in value.handed
        ):
            return True  # the next turn takes it
        return any(
            reader is None or (not reader.backward and not inside(self.layers.of(reader), layer))
            for reader in self.graph.readers(index)
        )

    def _joins(self, index: int, layer: str) -> bool:
        """Tell whether a gradient is only added to those that a layer's inputs get from it."""
        readers = [reader for reader in self.graph.readers(index) if reader is not None]
        own = [node for node in readers if node.backward and inside(self.layers.of(node), layer)]
        return all(node.name == "add_any" for node in own)


def loops(node: Node) -> tuple[tuple[object, ...], ...]:
    """Name the loops around an operation, outermost first."""
    return tuple(node.order[:i] for i, part in enumerate(node.order) if part is None)


def opened(graph: Graph) -> set[Path]:
    """List the paths of a program whose values can be taken: all around them is calls and scans."""
    found: set[Path] = {()}
    for node in graph.nodes:
        for i, eqn in enumerate(node.chain):
            if bodies(eqn)[0].kind not in ("call", "scan"):
                break
            found.add(node.path[: i + 1])
    return found


def turns(node: Node, depth: int) -> Iterator[Turn]:
    """Walk the turns of the scans around an operation, the outermost ``depth`` of them."""
    yield from itertools.product(*(range(rounds_of(x) or 0) for x in scans(node)[:depth]))


def scans(node: Node) -> list[Any]:
    """List the equations of the loops around an operation, outermost first."""
    return [eqn for eqn in node.chain if eqn.primitive.name in ("scan", "while")]


def _filled(node: Node, turn: Turn) -> tuple[float, ...]:
    """Say when an operation runs in a turn; in all turns of the loops further inside."""
    left = iter([
        (rounds_of(scan) or 0) - 1 - i if backwards(scan) else i
        for i, scan in zip(turn, scans(node), strict=False)
    ])  # fmt: skip
    return tuple(next(left, inf) if part is None else part for part in node.order)
