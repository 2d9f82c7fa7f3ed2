"""Operations as a user knows them: equations that one call made, and their gradients."""

from dataclasses import dataclass, field, replace
from typing import Any

from anynan.events import Phase, Source
from anynan.jax.graphs import lines, names
from anynan.jax.graphs.graph import Graph, Node
from anynan.jax.graphs.layers import Layers
from anynan.jax.read.probes import checkable


@dataclass(slots=True)
class Op:
    """Hold the equations of one operation, forward or backward.

    Attributes:
        index: Its number.
        nodes: Its equations.
        name: Canonical name.
        site: The call that made it.
        phase: Phase it runs in.
        layer: Layer path.
        call: Which call of the layer.
        forward: The forward operation, for a gradient's.
        direct: True for the user's own code in the backward pass.
        ins: Values that come from outside of it.
        outs: Values that others read.
    """

    index: int
    nodes: list[Node]
    name: str
    site: lines.CallSite
    phase: Phase
    layer: str | None
    call: int
    forward: "Op | None" = None
    direct: bool = False
    ins: list[int] = field(default_factory=list)
    outs: list[int] = field(default_factory=list)

    @property
    def raw(self) -> str:
        """Give the framework's own names."""
        found = dict.fromkeys(node.name for node in self.nodes if not node.passing)
        return ", ".join(list(found)[:4]) or self.nodes[0].name

    @property
    def source(self) -> Source | None:
        """Find the user's line: for a gradient the forward line."""
        node = (self.forward or self).nodes[0]
        found = lines.source(node.chain, node.eqn)
        if found is not None and self.direct and lines.in_rule(node.chain, node.eqn):
            # JAX keeps the line of the call, and none of the rule's.
            return replace(found, via="the backward rule of the custom_vjp called here")
        return found


class Operations:
    """Group the equations of a program."""

    def __init__(self, graph: Graph, layers: Layers) -> None:
        self.graph, self.layers = graph, layers
        self.ops: list[Op] = []
        self.of: dict[int, Op] = {}
        self._sites = [lines.call_site(n.chain, n.eqn) for n in graph.nodes]
        self._forward: dict[Any, list[Op]] = {}
        self._whole: dict[Any, list[Op]] = {}
        self._join()
        self._differentiate()
        for op in self.ops:
            self._border(op)

    def _open(
        self, node: Node, name: str, forward: Op | None = None, *, direct: bool = False
    ) -> Op:
        place = node if forward is None else forward.nodes[0]
        op = Op(
            len(self.ops), [], name, self._sites[node.index], self.layers.phase(node),
            self.layers.of(place), self.layers.call(place, self.layers.of(place)), forward, direct,
        )  # fmt: skip
        self.ops.append(op)
        return op

    def _add(self, op: Op, node: Node) -> None:
        op.nodes.append(node)
        self.of[node.index] = op

    def _join(self) -> None:
        """Make the forward operations: a function of JAX is one, else each primitive is."""
        open_op: Op | None = None
        ahead = not any(node.backward for node in self.graph.nodes)
        slopes: dict[int, Op] = {}
        for node in self.graph.nodes:
            if node.backward:
                continue
            site = self._sites[node.index]
            whole = names.function(site.functions)
            if whole is not None:
                if open_op is None or (open_op.site.key, open_op.name) != (site.key, whole):
                    open_op = self._open(node, whole)
                    self._known(self._whole, site, whole, open_op)
                self._add(open_op, node)
                continue
            open_op = None
            if node.passing:
                continue
            primal = self._primal(node) if ahead else None
            if primal is not None:
                op = slopes.get(primal.index) or self._open(node, primal.name, primal)
                op.phase = "backward"
                slopes[primal.index] = op
                self._add(op, node)
                continue
            op = self._open(node, names.primitive(node.name))
            self._known(self._forward, site, site.inside, op)
            self._add(op, node)

    def _primal(self, node: Node) -> Op | None:
        """Give the operation whose slope, in forward mode, an equation is of."""
        site = self._sites[node.index]
        same = self._forward.get((site.key, site.inside))
        if not node.place.differentiated or not same or not site.near:
            return None
        return same[-1] if same[-1].nodes[0].name != node.name else None

    def _differentiate(self) -> None:
        """Give each gradient's equation to the forward operation whose it is.

        The gradient of a gradient is an operation of its own: it runs after that, on what it gave.
        """
        mine: dict[Any, Op] = {}
        for node in self.graph.nodes:
            if not node.backward:
                continue
            forward = self._forward_of(node)
            if forward is None:
                if not node.passing:
                    name = names.primitive(node.name)
                    self._add(self._open(node, name, direct=node.place.backward), node)
                continue
            key = forward.index, node.place.nested
            op = mine.get(key)
            if op is None:
                op = mine[key] = self._open(node, forward.name, forward)
                op.phase = "backward"
            self._add(op, node)

    def _known(self, table: dict[Any, list[Op]], site: lines.CallSite, what: Any, op: Op) -> None:
        for near in (site.key, site.near):
            table.setdefault((near, what), []).append(op)

    def _forward_of(self, node: Node) -> Op | None:
        site = self._sites[node.index]
        whole = names.function(site.functions)
        found: list[Op] = []
        for near in (site.key, site.near):  # a body run again has other calls around it
            found = found or self._whole.get((near, whole)) or []
            found = found or self._forward.get((near, site.inside)) or []
        found = [op for op in found if op.nodes[0].index < node.index]
        if len(found) < 2:
            return found[0] if found else None
        # The same line ran more than once: the values it works on say which time it was.
        roots = {self.root(i) for i in node.ins}
        unknown = {i for i in roots if not self.graph.values[i].known}
        shapes = {self.graph.values[i].aval.shape for i in node.ins}
        latest = found[::-1]
        shared = (op for op in latest if not unknown.isdisjoint(self._own(op)))
        shaped = (op for op in latest if not shapes.isdisjoint(self._shapes(op)))
        return next(shared, None) or next(shaped, None) or latest[0]

    def _own(self, op: Op) -> set[int]:
        """Give the values that an operation works on and makes, and those its gradient makes."""
        own = [i for n in op.nodes for i in (*n.ins, *n.outs)]
        own += [i for other in self.ops if other.forward is op for n in other.nodes for i in n.outs]
        return {self.root(i) for i in own if i is not None}

    def _shapes(self, op: Op) -> list[tuple[int, ...]]:
        """Give the shapes of what an operation makes at last."""
        return [self.graph.values[i].aval.shape for i in op.nodes[-1].outs if i is not None]

    def root(self, index: int) -> int:
        """Follow a value back through what only reads it."""
        while True:
            value = self.graph.values[index]
            if value.writer is None:
                if len(value.feeds) != 1:
                    return index
                index = value.feeds[0]
                continue
            node = self.graph.nodes[value.writer]
            if not node.passing or not node.ins or node.index in self.of:
                return index
            index = node.ins[0]

    def _border(self, op: Op) -> None:
        graph = self.graph
        members = {node.index for node in op.nodes}
        ins: dict[int, None] = {}
        outs: dict[int, None] = {}
        for node in op.nodes:
            for i in node.ins:
                writer = graph.values[i].writer
                if writer is None or writer not in members:
                    ins.setdefault(i)
            for out in node.outs:
                if out is None or not self._readable(out):
                    continue
                readers = list(graph.readers(out))
                if not readers or any(self._outside(reader, op) for reader in readers):
                    outs.setdefault(out)
        if not outs:  # only its gradient takes what it gives
            last = op.nodes[-1].outs
            outs = {i: None for i in last if i is not None and self._readable(i)}
        op.ins, op.outs = list(ins), list(outs)

    def _readable(self, index: int) -> bool:
        return checkable(self.graph.values[index].aval)

    def _outside(self, reader: Node | None, op: Op) -> bool:
        """Tell whether a reader is neither the operation's own nor its gradient's."""
        if reader is None:
            return True
        mine = self.of.get(reader.index)
        # A single equation's result is an operand of its gradient, and what it is all about.
        return mine is not op and (len(op.nodes) == 1 or mine is None or mine.forward is not op)

    def writers(self, index: int) -> list[Op]:
        """Give the operations that wrote a value."""
        nodes, _ = self.graph.origins(index)
        found = {op.index: op for node in nodes if (op := self.of.get(node.index)) is not None}
        return list(found.values())
