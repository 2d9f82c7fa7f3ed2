"""A program as one flat list of operations, whatever calls, loops and branches it is made of."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import core as jc

from anynan._base.walks import walk
from anynan.jax.graphs import lines
from anynan.jax.graphs.bodies import Body, bodies, hides
from anynan.jax.graphs.stacks import Place, place
from anynan.jax.graphs.versions import dropped
from anynan.jax.read.probes import checkable
from anynan.jax.read.readings import Path

# These read values and make none: what is bad in them was bad before.
PASSING = frozenset(
    {
        "reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "slice", "rev",
        "dynamic_slice", "gather", "copy", "copy_p", "device_put", "stop_gradient", "name", "split",
        "optimization_barrier", "sharding_constraint", "pvary", "pcast", "reshard",
        "layout_constraint", "mesh_cast", "real", "imag", "pbroadcast", "all_gather", "ppermute",
        "bitcast_convert_type", "all_gather_invariant", "all_to_all",
    }
)  # fmt: skip


def _keeps_dtype(eqn: Any) -> bool:
    """Tell whether something is a conversion that leaves the numbers as they are."""
    if eqn.primitive.name != "convert_element_type":
        return False
    return bool(eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype)


def fills(eqn: Any) -> bool:
    """Tell whether a read gives NaN where its index is out of range."""
    mode = str(eqn.params.get("mode"))
    if eqn.primitive.name != "gather" or not mode.endswith("FILL_OR_DROP"):
        return False
    fill = eqn.params.get("fill_value")
    return checkable(eqn.outvars[0].aval) and (fill is None or fill != fill)


@dataclass(slots=True)
class Value:
    """Hold one value of the program.

    Attributes:
        index: Its number.
        aval: Shape and dtype.
        path: Path of the jaxpr it is defined in.
        var: The variable there.
        writer: Number of the operation that makes it, None for what comes in.
        feeds: Other values it may be: of the round before in a loop, of a branch.
        argument: Number of the program's argument it is.
        constant: What it holds, where that is known at trace time.
        known: True if ``constant`` counts.
        readers: Operations that read it.
        handed: Values that it feeds.
        result: True if the program returns it.
        loops: How many loops are around it.
    """

    index: int
    aval: Any
    path: Path
    var: Any
    writer: int | None = None
    feeds: list[int] = field(default_factory=list)
    argument: int | None = None
    constant: Any = None
    known: bool = False
    readers: list[int] = field(default_factory=list)
    handed: list[int] = field(default_factory=list)
    result: bool = False
    loops: int = 0


@dataclass(slots=True)
class Node:
    """Hold one operation.

    Attributes:
        index: Position in the order of the program's text.
        eqn: The equation.
        path: Path of the jaxpr it is in.
        chain: The equations around it, outermost first.
        name: The primitive's name.
        ins: Values that go in.
        outs: Values that come out, None for one that nobody wants.
        place: What its name stack says.
        order: Where it stands in execution: positions, with a slot for each loop's iteration.
        loops: How many loops are around it.
        backward: True for a gradient's operation, and for what only such need.
        after: True for what works on gradients outside of any differentiation: the update.
        passing: True if it only reads values: what is bad in its result was bad before.
    """

    index: int
    eqn: Any
    path: Path
    chain: tuple[Any, ...]
    name: str
    ins: tuple[int, ...]
    outs: tuple[int | None, ...]
    place: Place
    order: tuple[Any, ...]
    loops: int
    backward: bool = False
    after: bool = False
    passing: bool = False


class Graph:
    """Flatten a closed jaxpr.

    Args:
        closed: The jaxpr.
        shut: Equations that are not opened, since they could not be rebuilt, and why.
    """

    def __init__(self, closed: Any, shut: Mapping[Path, str] | None = None) -> None:
        self.nodes: list[Node] = []
        self.values: list[Value] = []
        # The primitives that are not opened, and why where that is known.
        self.strange: dict[str, str] = {}
        self.shut = shut or {}
        # The loops around each body, by its path.
        self.loops: dict[Path, tuple[Any, ...]] = {}
        # How many branches are around it.
        self.branches: dict[Path, int] = {}
        given = [self._value(var, ()) for var in closed.jaxpr.invars]
        for i, value in enumerate(given):
            value.argument = i
        self.arguments = [value.index for value in given]
        pairs = zip(closed.jaxpr.constvars, closed.consts, strict=True)
        consts = [self._const(held, var, ()) for var, held in pairs]
        self.results = self._walk(closed.jaxpr, consts, self.arguments, (), (), "", ())
        for index in self.results:
            self.values[index].result = True
        self._follow()

    def _fold(self, node: Node) -> None:
        """Take a number in another dtype or shape for the number: who uses it is asked."""
        out = node.outs[0]
        if out is None or not self._written(node.ins[0]):
            return
        node.passing = all(reader is not None for reader in self.readers(out))
        if node.passing:
            made = self.values[out]
            made.constant, made.known = self.values[node.ins[0]].constant, True

    def _written(self, index: int) -> bool:
        """Tell whether a value is a number of the code's own that is not finite."""
        value = self.values[index]
        held = value.constant
        if not value.known or np.ndim(held) or not checkable(value.aval):
            return False
        return not np.isfinite(np.asarray(held, complex)).item()

    def takes_inf(self, index: int) -> bool:
        """Tell whether an Inf of the code's own is among what a value is made of."""
        return any(self._written(i) for i in walk([index], self.made_of))

    def placed(self, index: int) -> bool:
        """Tell whether a value is nothing but an Inf of the code's own, read on and on."""
        nodes, outside = self.origins(index)
        return not nodes and all(
            value.known and np.size(value.constant) == 1 and checkable(value.aval)
            and np.isinf(np.asarray(value.constant, complex)).item()
            for value in outside
        )  # fmt: skip

    def _value(self, var: Any, path: Path, loops: int = 0) -> Value:
        value = Value(len(self.values), var.aval, path, var, loops=loops)
        self.values.append(value)
        return value

    def _walk(
        self, jaxpr: Any, consts: list[int], ins: list[int], path: Path, chain: tuple[Any, ...],
        stack: str, order: tuple[Any, ...],
    ) -> list[int]:  # fmt: skip
        env: dict[Any, int] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, ins, strict=True))
        self.loops[path] = tuple(eqn for eqn in chain if eqn.primitive.name in ("scan", "while"))
        self.branches[path] = sum(eqn.primitive.name == "cond" for eqn in chain)

        loops = sum(part is None for part in order)

        def read(var: Any) -> int:
            if isinstance(var, jc.Literal):
                return self._const(var.val, var, path, loops)
            return env[var]

        for i, eqn in enumerate(jaxpr.eqns):
            operands = [read(var) for var in eqn.invars]
            here = "/".join(part for part in (stack, str(eqn.source_info.name_stack)) if part)
            point, position = (*path, i), (*order, i)
            inner = [] if point in self.shut else bodies(eqn)
            if inner:
                outs = self._open(eqn, inner, operands, point, (*chain, eqn), here, position)
            else:
                outs = [
                    None if dropped(var) else self._value(var, path, loops).index
                    for var in eqn.outvars
                ]
                node = Node(
                    len(self.nodes), eqn, path, chain, eqn.primitive.name, tuple(operands),
                    tuple(outs), place(here), position, loops,
                )  # fmt: skip
                written = any(self._written(i) for i in operands)
                moves = node.name in PASSING or _keeps_dtype(eqn)
                node.passing = moves and not written and not fills(eqn)
                self.nodes.append(node)
                if point in self.shut or hides(eqn):
                    self.strange.setdefault(node.name, self.shut.get(point, ""))
                for out in outs:
                    if out is not None:
                        self.values[out].writer = node.index
            made = zip(eqn.outvars, outs, strict=True)
            env.update((var, out) for var, out in made if out is not None)
        return [read(var) for var in jaxpr.outvars]

    def _open(
        self, eqn: Any, inner: list[Body], operands: list[int], point: Path, chain: tuple[Any, ...],
        stack: str, order: tuple[Any, ...],
    ) -> list[int | None]:  # fmt: skip
        first = inner[0]
        loops = sum(part is None for part in order)
        consts = [
            [
                self._const(held, var, body.path(point))
                for held, var in zip(body.consts, body.jaxpr.constvars, strict=True)
            ]
            for body in inner
        ]
        if first.kind == "call":
            return list(
                self._walk(first.jaxpr, consts[0], operands, first.path(point), chain, stack, order)
            )
        outside = [self._value(var, point[:-1], loops) for var in eqn.outvars]
        if first.kind == "cond":
            for body, held in zip(inner, consts, strict=True):
                path = body.path(point)
                outs = self._walk(
                    body.jaxpr, held, operands[body.skip :], path, chain, stack, (*order, body.step)
                )
                for value, out in zip(outside, outs, strict=True):
                    value.feeds.append(out)
        else:
            deeper = loops + (first.kind != "shard_map")
            arguments = [self._value(var, first.path(point), deeper) for var in first.jaxpr.invars]
            for value, operand in zip(arguments, operands[first.skip :], strict=True):
                value.feeds.append(operand)
            looped = (*order, None) if first.kind != "shard_map" else order
            outs = self._walk(
                first.jaxpr, consts[0], [v.index for v in arguments], first.path(point), chain,
                stack, looped,
            )  # fmt: skip
            for i, (value, out) in enumerate(zip(outside, outs, strict=True)):
                value.feeds.append(out)
                if i < first.carried:
                    arguments[first.fixed + i].feeds.append(out)
                    value.feeds.append(arguments[first.fixed + i].index)  # no round at all
        return [
            None if dropped(var) else value.index
            for var, value in zip(eqn.outvars, outside, strict=True)
        ]

    def _const(self, held: Any, var: Any, path: Path, loops: int = 0) -> int:
        value = self._value(var, path, loops)
        # What is of the caller's own trace has no number yet.
        value.known = not isinstance(held, jax.core.Tracer)
        value.constant = held if value.known else None
        return value.index

    # Who reads what.

    def _follow(self) -> None:
        for node in self.nodes:
            for i in node.ins:
                self.values[i].readers.append(node.index)
        for value in self.values:
            for i in value.feeds:
                self.values[i].handed.append(value.index)
        for node in self.nodes:
            node.backward = node.place.backward
            if node.name in ("broadcast_in_dim", "convert_element_type"):
                self._fold(node)
        if any(node.backward for node in self.nodes):
            self._find_coefficients()
            self._find_updates()

    def _find_coefficients(self) -> None:
        """Put what only the backward pass needs into it: the slopes at the forward values."""
        for node in reversed(self.nodes):
            if node.backward:
                continue
            readers = [r for i in node.outs if i is not None for r in self.readers(i)]
            node.backward = bool(readers) and all(r is not None and r.backward for r in readers)
        # A slope follows the operation whose it is; the last operation of a forward pass whose
        # result nobody takes is none.
        for node in self.nodes:
            if not node.backward or node.place.backward:
                continue
            before = self.nodes[node.index - 1] if node.index else None
            if before is None or before.place.backward or before.path[:-1] != node.path[:-1]:
                node.backward = False
            else:
                mine = lines.call_site(node.chain, node.eqn).near
                node.backward = mine == lines.call_site(before.chain, before.eqn).near

    def readers(self, index: int) -> Iterator[Node | None]:
        """Walk the operations that read a value, across loops; None for the program's result."""
        for i in walk([index], lambda i: self.values[i].handed):
            value = self.values[i]
            if value.result:
                yield None
            yield from (self.nodes[number] for number in value.readers)

    def made_of(self, index: int) -> list[int]:
        """Give the values that a value is made of."""
        value = self.values[index]
        return [*value.feeds, *(() if value.writer is None else self.nodes[value.writer].ins)]

    def makes(self, index: int) -> list[int]:
        """Give the values that are made of a value."""
        readers = (reader for reader in self.readers(index) if reader is not None)
        return [i for reader in readers for i in reader.outs if i is not None]

    def _find_updates(self) -> None:
        """Mark what comes after the gradients: it reads them and is no gradient itself."""
        touched: set[int] = set()
        for node in self.nodes:
            reads = any(not touched.isdisjoint(self.sources(i)) for i in node.ins)
            if node.backward or reads:
                touched.update(out for out in node.outs if out is not None)
                node.after = reads and not node.backward and not node.place.differentiated
        for node in reversed(self.nodes):  # what an update alone needs: decayed averages
            if node.backward or node.after or node.place.differentiated or node.place.names:
                continue
            readers = [r for i in node.outs if i is not None for r in self.readers(i)]
            node.after = bool(readers) and all(r is not None and r.after for r in readers)

    def sources(self, index: int) -> set[int]:
        """Give the values that a value may be, itself included."""
        return set(walk([index], lambda i: self.values[i].feeds))

    def origins(self, index: int) -> tuple[list[Node], list[Value]]:
        """Find who wrote a value: operations, through reads and loops, and what came in."""
        nodes: dict[int, Node] = {}
        outside: list[Value] = []

        def through(i: int) -> list[int]:
            writer = self.values[i].writer
            stops = writer is not None and not self.nodes[writer].passing
            return self.values[i].feeds if stops else self.made_of(i)

        for i in walk([index], through):
            value = self.values[i]
            if value.writer is not None:
                node = self.nodes[value.writer]
                if not node.passing:
                    nodes[node.index] = node
            elif value.argument is not None or value.known:
                outside.append(value)
        return list(nodes.values()), outside
