"""The discrete operations of a program: what chooses, what draws, whose gradient jumps."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from anynan.jax.graphs.bodies import JITS
from anynan.jax.graphs.graph import Graph, Node
from anynan.jax.read.probes import checkable
from anynan.jax.read.readings import Path

# Primitives whose result jumps where their operand moves by a rounding unit; which of their
# results tells the choice. A sort tells it by what it moves along with its keys.
CHOOSING = {"top_k": ("topk", 1), "argmax": ("argmax", 0), "argmin": ("argmin", 0)}
# The functions of jax.random that are compiled apart, whole operations to their users.
_DRAWING = {
    "_bernoulli": "bernoulli", "_categorical": "categorical", "_exponential": "exponential",
    "_gumbel": "gumbel", "_normal": "normal", "_normal_real": "normal", "_poisson": "poisson",
    "_randint": "randint", "_shuffle": "permutation", "_truncated_normal": "truncated_normal",
    "_uniform": "uniform", "_gamma": "gamma", "_beta": "beta", "_laplace": "laplace",
}  # fmt: skip
_COMPARING = frozenset({"gt", "lt", "ge", "le", "eq", "ne", "sign"})


@dataclass(frozen=True, slots=True)
class Chooser:
    """Hold one discrete operation.

    Attributes:
        eqn: Its equation.
        path: Path of the equation.
        name: What it does, in the field's word.
        loops: How many loops are around it.
        node: Its first operation.
        drawn: Whether it draws random numbers.
    """

    eqn: Any
    path: Path
    name: str
    loops: int
    node: Node
    drawn: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Give the shape of what it chooses in one turn of the loops around it."""
        eqn = self.eqn
        at = CHOOSING[eqn.primitive.name][1] if eqn.primitive.name in CHOOSING else 0
        return tuple(eqn.outvars[at].aval.shape)


def choosers(graph: Graph) -> list[Chooser]:
    """List the discrete operations of the forward pass, in the order of the program's text."""
    found: dict[Path, Chooser] = {}
    for node in graph.nodes:
        if node.backward or node.after:
            continue
        drawn, own = _draw(node), (*node.path, node.order[-1])
        if drawn is not None:
            found.setdefault(drawn[1], Chooser(*drawn, node, drawn=True))
            continue
        name = CHOOSING[node.name][0] if node.name in CHOOSING else node.name
        sorts = name == "sort" and len(node.ins) > node.eqn.params.get("num_keys", 1)
        if (sorts or node.name in CHOOSING) and checkable(graph.values[node.ins[0]].aval):
            found[own] = Chooser(node.eqn, own, name, node.loops, node)
    return list(found.values())


def gates(graph: Graph) -> Iterator[Node]:
    """Walk the comparisons of arrays, on which side of a limit each element lies."""
    for node in graph.nodes:
        if node.name not in _COMPARING or node.outs[0] is None or _draw(node) is not None:
            continue
        if graph.values[node.outs[0]].aval.shape and checkable(graph.values[node.ins[0]].aval):
            yield node


def _draw(node: Node) -> tuple[Any, Path, str, int] | None:
    """Find the outermost draw that an operation is part of: equation, path, name, loops."""
    at = loops = 0
    for eqn in node.chain:
        at += 1
        name: Any = eqn.params.get("name")
        if eqn.primitive.name in JITS and name in _DRAWING:
            return eqn, node.path[:at], _DRAWING[name], loops
        at += eqn.primitive.name == "cond"
        loops += eqn.primitive.name in ("scan", "while")
    if node.name == "random_bits":
        return node.eqn, (*node.path, node.order[-1]), "random", loops
    return None
