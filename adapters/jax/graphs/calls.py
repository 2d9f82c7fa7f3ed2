"""The calls of a program's layers: what goes in and comes out, turn by turn of a loop."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from anynan._base.walks import walk
from anynan.jax.graphs.graph import Graph, Node, Value
from anynan.jax.graphs.layers import Layers, inside
from anynan.jax.read.probes import checkable

Turn = tuple[int, ...]
# Values of a run, by number and by the turn of each loop around them; in the order in which they
# were made, of which each holds its place.
Seen = Mapping[tuple[int, Turn], tuple[int, Any]]
_Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Call:
    """Hold one call of a layer.

    Attributes:
        layer: Its path.
        way: ``forward`` or ``backward``.
        number: Which call, counted over the turns of loops.
        index: Which call in the program's text.
        turn: Which turn of each loop around the layer, outermost first.
        given: Numbers of the values that go in.
        made: Numbers of the values that come out.
        end: The place of the last of them in the run.
    """

    layer: str
    way: Literal["forward", "backward"]
    number: int
    index: int
    turn: Turn
    given: tuple[int, ...]
    made: tuple[int, ...]
    end: int


class Calls:
    """Know what goes into each layer of a program, and what comes out.

    Of the backward pass there is what arrives: inside a layer JAX adds gradients up where it
    likes.

    Args:
        graph: The program.
        layers: Its layers.
        first: Number of the first argument that is no weight.

    Attributes:
        hidden: Whether layers are inside shard_map, where nobody sees them.
    """

    def __init__(self, graph: Graph, layers: Layers, first: int) -> None:
        self.graph, self.layers = graph, layers
        self._live = self._reached(first)
        self.hidden = any(
            eqn.primitive.name == "shard_map"
            for node in graph.nodes
            for eqn in node.chain
            if layers.of(node) is not None
        )
        self._depths: dict[_Key, int] = {}
        self._forward = dict(self._passed())
        self._backward = self._arriving()

    def wanted(self) -> set[int]:
        """Give the numbers of the values that tell of the calls."""
        both = (i for values in self._forward.values() for part in values for i in part)
        return {*both, *(i for values in self._backward.values() for i in values)}

    def own(self, layer: str) -> Iterator[Node]:
        """Walk the operations of a layer's own code."""
        nodes = self.graph.nodes
        return (x for x in nodes if self.layers.of(x) == layer and not x.backward)

    def of(self, seen: Seen) -> list[Call]:
        """List the calls of a run, in the order in which they ended."""
        turns = defaultdict[int, list[Turn]](list)
        for i, turn in seen:
            turns[i].append(turn)
        ended: list[Call] = []
        for (layer, index), (given, made) in self._forward.items():
            for turn in dict.fromkeys(turn for i in made for turn in turns[i]):
                end = max(seen[i, turn][0] for i in made if (i, turn) in seen)
                ended.append(Call(layer, "forward", 0, index, turn, given, made, end))
        # A layer ends with its last operation, and before those around it.
        ended.sort(key=lambda x: (x.end, -x.layer.count("."), -len(x.layer)))
        counts = defaultdict[str, int](int)
        numbers: dict[tuple[str, int, Turn], int] = {}
        for i, call in enumerate(ended):
            number = numbers[call.layer, call.index, call.turn] = counts[call.layer]
            counts[call.layer] += 1
            ended[i] = replace(call, number=number)
        back: list[Call] = []
        for (layer, index), found in self._backward.items():
            for turn in turns[found[0]]:
                known = numbers.get((layer, index, turn), index if not turn else None)
                if known is not None:
                    end = seen[found[0], turn][0]
                    back.append(Call(layer, "backward", known, index, turn, found, (), end))
        return [*ended, *sorted(back, key=lambda x: x.end)]

    def _reached(self, first: int) -> set[int]:
        """Find the values that depend on the batch."""
        first_in = [
            value.index for value in self.graph.values
            if value.argument is not None and value.argument >= first
        ]  # fmt: skip
        return set(walk(first_in, lambda i: [*self.graph.makes(i), *self.graph.values[i].handed]))

    def _passed(self) -> Iterator[tuple[_Key, tuple[tuple[int, ...], tuple[int, ...]]]]:
        """Walk the layers with the values that go in and come out."""
        layers = self.layers
        nodes: dict[_Key, list[Node]] = {}
        for node in self.graph.nodes:
            path = layers.of(node)
            if node.after or node.backward or path is None:
                continue
            for layer in layers.around(path):
                nodes.setdefault((layer, layers.call(node, layer)), []).append(node)
        for (layer, index), inner in nodes.items():
            counted = [node for node in inner if not self._live.isdisjoint(node.outs)] or inner
            shared = list(zip(*(loops(node) for node in counted), strict=False))
            depth = next((i for i, x in enumerate(shared) if len(set(x)) > 1), len(shared))
            self._depths[layer, index] = depth
            branches = min(self.graph.branches[node.path] for node in counted)
            given = dict.fromkeys(
                i for node in inner for x in node.ins for i in self._at(x, depth)
                if self._branches(i) <= branches and self._comes_in(i, layer, depth)
            )  # fmt: skip
            made = dict.fromkeys(
                i for node in inner for x in node.outs if x is not None
                for i in self._out_at(x, depth)
                if self._branches(i) == branches and self._leaves(i, layer, depth)
            )  # fmt: skip
            yield (layer, index), (tuple(given), tuple(made))

    def _arriving(self) -> dict[_Key, tuple[int, ...]]:
        """Give the gradients that arrive at each layer."""
        found: dict[_Key, dict[int, None]] = {}
        for point in self.layers.arriving():
            layer, value = point.layer or "", self.graph.values[point.value]
            key = (layer, point.call)
            if value.loops == self._depths.get(key) and not self._joins(value.index, layer):
                found.setdefault(key, {})[value.index] = None
        return {key: tuple(values) for key, values in found.items()}

    def _branches(self, index: int) -> int:
        return self.graph.branches[self.graph.values[index].path]

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
