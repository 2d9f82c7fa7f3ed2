"""One side of a comparison: evaluate a function's jaxpr, and keep what leaves its layers."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from anynan._apps.compare.captures import (
    Array,
    Capture,
    Choice,
    Operation,
    RecordedChoices,
    Runner,
    RunRequest,
    Taken,
    cotangent,
)
from anynan.jax.graphs import names
from anynan.jax.graphs.bodies import JITS, bodies
from anynan.jax.graphs.calls import Calls, Turn
from anynan.jax.graphs.graph import Graph, Node
from anynan.jax.graphs.layers import Layers
from anynan.jax.graphs.lines import call_site, source
from anynan.jax.graphs.versions import rebind, wide_numbers
from anynan.jax.messages import RAN_AS_JAX
from anynan.jax.observe import Run
from anynan.jax.program.objects import without_writes
from anynan.jax.program.scopes import named
from anynan.jax.program.trace import under_way
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
        node: Its first operation.
        drawn: Whether it draws random numbers.
    """

    eqn: Any
    path: Path
    name: str
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
            found[own] = Chooser(node.eqn, own, name, node)
    return list(found.values())


def gates(graph: Graph) -> Iterator[Node]:
    """Walk the comparisons of arrays, on which side of a limit each element lies."""
    for node in graph.nodes:
        if node.name not in _COMPARING or node.outs[0] is None or _draw(node) is not None:
            continue
        if any(eqn.primitive.name == "while" for eqn in node.chain):  # no gradient goes through
            continue
        if graph.values[node.outs[0]].aval.shape and checkable(graph.values[node.ins[0]].aval):
            yield node


def _draw(node: Node) -> tuple[Any, Path, str] | None:
    """Find the outermost draw that an operation is part of: equation, path, name."""
    at = 0
    for eqn in node.chain:
        at += 1
        name: Any = eqn.params.get("name")
        if eqn.primitive.name in JITS and name in _DRAWING:
            return eqn, node.path[:at], _DRAWING[name]
        at += eqn.primitive.name == "cond"
    if node.name == "random_bits":
        return node.eqn, (*node.path, node.order[-1]), "random"
    return None


class _Values(Run):
    """Evaluate a program, and keep some of its values, in every turn of the loops around them.

    Args:
        graph: The program.
        choosers: Its discrete operations.
        wanted: Numbers of the values.
        follow: What discrete operations shall choose, in order.
        compiled: What was compiled of earlier runs for the same values.

    Attributes:
        found: The values.
        chosen: What was chosen: by what, in which turn, at which place among the values, what,
            and which share of it otherwise than by itself.
    """

    def __init__(
        self, graph: Graph, choosers: list[Chooser], wanted: Iterable[int],
        follow: Sequence[Choice], compiled: dict[Path, Any],
    ) -> None:  # fmt: skip
        self.turn, self.notes = (), []
        self.found: dict[tuple[int, Turn], tuple[int, Any]] = {}
        self.chosen: list[tuple[Chooser, int, Array, float]] = []
        self._graph, self._likes, self._compiled = graph, RecordedChoices(follow), compiled
        values = [graph.values[i] for i in wanted]
        self._places = {(value.path, value.var): value.index for value in values}
        self._choosers = {x.path: x for x in choosers}
        points = [*(value.path for value in values), *(path[:-1] for path in self._choosers)]
        self._inside = {path[:i] for path in points for i in range(len(path) + 1)}

    def run(self, jaxpr: Any, consts: Any, args: Any, path: Path) -> list[Any]:
        """Evaluate a jaxpr; the body of a loop compiled, if it has no choice, loop or branch."""
        if path not in self._compiled:
            self._compiled[path] = self._body(jaxpr, path) if self._is_plain(path) else None
        if self._compiled[path] is None:
            return super().run(jaxpr, consts, args, path)
        body, keys = self._compiled[path]
        outs, values = body(list(consts), list(args))
        for i, x in zip(keys, values, strict=True):
            self.found[i, self.turn] = len(self.found), x
        return list(outs)

    def _is_plain(self, path: Path) -> bool:
        around = len(self._graph.loops[path]), self._graph.branches[path]
        inner = [p for p, _ in self._places if p[: len(path)] == path]
        if not self.turn or any(p[: len(path)] == path for p in self._choosers):
            return False
        return all((len(self._graph.loops[p]), self._graph.branches[p]) == around for p in inner)

    def _body(self, jaxpr: Any, path: Path) -> tuple[Any, list[int]]:
        """Compile a turn of a loop, and give the numbers of the values that it tells of."""
        part, keys = copy.copy(self), list[int]()
        part.turn = ()

        def run(consts: list[Any], args: list[Any]) -> tuple[list[Any], list[Any]]:
            part.found = {}
            outs = Run.run(part, jaxpr, consts, args, path)
            keys[:] = [i for i, _ in part.found]
            values, part.found = [x for _, x in part.found.values()], {}
            return outs, values

        part.found = {}
        return jax.jit(run), keys

    def took(self, path: Path, var: Any, x: Any) -> None:
        """Keep a value that is wanted."""
        if (path, var) in self._places:
            self.found[self._places[path, var], self.turn] = len(self.found), x

    def equation(self, eqn: Any, ins: list[Any], path: Path) -> list[Any]:
        """Evaluate one equation; as a whole where nothing inside of it is wanted."""
        if path in self._choosers:
            return self._choose(self._choosers[path], ins)
        inner = bodies(eqn) if path in self._inside else []
        if inner and inner[0].kind != "shard_map":
            return self.inside(eqn, inner, ins, path)
        return self.bind(eqn, ins, None)

    def _choose(self, chooser: Chooser, ins: list[Any]) -> list[Any]:
        """Run a discrete operation, held to the other run's choice where there is one."""
        like = self._likes.next(chooser.name, chooser.shape)
        outs, own = _chosen(chooser.eqn, ins, None if like is None else jnp.asarray(like.picked))
        mine = np.asarray(own)
        picked = mine if like is None else like.picked.astype(mine.dtype)
        moved = float(np.mean(picked != mine))
        self.chosen.append((chooser, len(self.found), picked, moved))
        return outs


def _chosen(eqn: Any, operands: list[Any], held: Any) -> tuple[list[Any], Any]:
    """Run a discrete operation: its results with what it is held to, and its own choice."""
    name = eqn.primitive.name
    if name == "sort":
        dimension = eqn.params["dimension"]
        order = lax.broadcasted_iota(jnp.int32, operands[0].shape, dimension)
        *outs, own = rebind(eqn, [*operands, order])
        if held is not None:
            outs = [jnp.take_along_axis(x, held, dimension) for x in operands]
        return outs, own
    outs = rebind(eqn, operands)
    at = CHOOSING[name][1] if name in CHOOSING else 0
    own = outs[at]
    if held is not None:
        outs[at] = held.astype(own.dtype)
        if name == "top_k":
            outs[0] = jnp.take_along_axis(operands[0], held, eqn.params.get("axis", -1))
    return outs, own


# Of every value of these the elements are there before.
_QUIET = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "iota", "reshape"})

_HIDDEN = "layers inside shard_map were compared at the ends of it only"


def side_of(target: Any) -> Runner | None:
    """Give the side of a function; None for all that cannot be called."""
    return JaxSide(target) if callable(target) else None


class JaxSide(Runner):
    """Run a JAX function: its weights are the constants that its trace finds."""

    backend = "jax"
    can_widen = True
    can_look_inside = True

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self._traced: dict[Any, _Traced] = {}

    def run(self, batch: tuple[Any, ...], wish: RunRequest) -> Capture:
        """Run once: nothing is written to, so nothing needs to be put back."""
        with wide_numbers() if wish.wide else nullcontext():
            return self._run(batch, wish)

    def _run(self, batch: tuple[Any, ...], wish: RunRequest) -> Capture:
        leaves, tree = jax.tree_util.tree_flatten(tuple(map(_brought, batch)))
        at = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
        arrays = [leaves[i] for i in at]
        if wish.wide:  # what these meet is widened by them
            arrays = [x.astype(jnp.float64) if _float(x) else x for x in arrays]
        if wish.nudge is not None:
            arrays = [
                _moved(x, wish.nudge.factor(f"input {i}", x.shape)) if _float(x) else x
                for i, x in enumerate(arrays)
            ]
        key = (tree, wish.backward, tuple((x.shape, x.dtype) for x in arrays))
        if key not in self._traced:

            def call(*given: Any) -> Any:
                whole = list(leaves)
                for i, x in zip(at, given, strict=True):
                    whole[i] = x
                return self.call(*jax.tree_util.tree_unflatten(tree, whole))

            names = self.names()
            self._traced[key] = _Traced(self, call, arrays, names, backward=wish.backward)
        return self._traced[key].capture(arrays, wish)

    def names(self) -> dict[int, str]:
        """Name the weights that have names, by identity."""
        return {}


class _Traced:
    """Hold one traced form of a function, and what leaves its layers."""

    def __init__(
        self, side: JaxSide, call: Callable[..., Any], arrays: list[Any], known: dict[int, str], *,
        backward: bool,
    ) -> None:  # fmt: skip
        roots: set[str] = set()
        with under_way(), named((side.call, arrays, None), roots):
            try:
                with without_writes():
                    closed = jax.make_jaxpr(call)(*arrays)
            except Exception as error:
                error.add_note(RAN_AS_JAX())
                raise
            self.consts = [jnp.asarray(x) if hasattr(x, "dtype") else x for x in closed.consts]
            self.floats = [i for i, x in enumerate(self.consts) if _float(x)]
            self.names = {i: known.get(id(closed.consts[i]), f"constant {i}") for i in self.floats}
            if backward:
                closed = self._differentiated(call, closed, arrays)
        self.backend, self.closed, self.backward = side.backend, closed, backward
        self.graph = Graph(closed)
        self.layers = Layers(self.graph, frozenset(roots))
        self.calls = Calls(self.graph, self.layers, len(self.floats) if backward else 0)
        finfo: Any = jnp.finfo
        made = {self.graph.values[i].aval.dtype for i in self.calls.wanted()}
        self.unit = max((float(finfo(dtype).eps) / 2 for dtype in made), default=0.0)
        self.choosers = choosers(self.graph)
        self.gates = list(gates(self.graph)) if backward else []
        self.compiled: dict[frozenset[int], dict[Path, Any]] = {}

    def _differentiated(self, call: Any, closed: Any, arrays: list[Any]) -> Any:
        """Trace once more with the gradient: the weights are what is differentiated."""
        chosen = [self.consts[i] for i in self.floats]

        def loss(weights: Any, inputs: Any) -> Any:
            consts = list(self.consts)
            for i, x in zip(self.floats, weights, strict=True):
                consts[i] = x
            outs = jax.core.eval_jaxpr(closed.jaxpr, consts, *inputs)
            floats = [x for x in outs if _float(x)]
            if len(floats) == 1 and floats[0].size == 1:
                return floats[0].reshape(())
            return sum(
                (x * jnp.asarray(cotangent(x.shape, i), x.dtype)).sum()
                for i, x in enumerate(floats)
            )

        return jax.make_jaxpr(jax.grad(loss))(chosen, arrays)

    def capture(self, arrays: list[Any], wish: RunRequest) -> Capture:
        """Evaluate, and sort what came out into layers."""
        consts = list(self.consts)
        if wish.nudge is not None:
            for i in self.floats:
                consts[i] = _moved(consts[i], wish.nudge.factor(f"weight {i}", consts[i].shape))
        own = [] if wish.inside is None else list(self.calls.own(wish.inside[0]))
        own = [node for node in own if self._counts(node)]
        outs = [*(node.outs for node in own), *(node.outs[:1] for node in self.gates)]
        wanted = self.calls.wanted() | {i for each in outs for i in each if i is not None}
        compiled = self.compiled.setdefault(frozenset(wanted), {})
        run = _Values(self.graph, self.choosers, wanted, wish.follow or (), compiled)
        if self.backward:
            # Constants that are no weights stand where the second trace found them.
            arrays = [*(consts[i] for i in self.floats), *arrays]
            consts = self.closed.consts
        run.run(self.closed.jaxpr, consts, arrays, ())
        calls = self.calls.of(run.found)

        def get(indices: Iterable[int | None], turn: Turn) -> tuple[Array, ...]:
            places = [(i, turn[: self.graph.values[i].loops]) for i in indices if i is not None]
            return tuple(_host(run.found[place][1]) for place in places if place in run.found)

        taken = [
            Taken(x.layer, "", x.number, x.way, get(x.given, x.turn), get(x.made, x.turn))
            for x in calls
        ]
        kept = self.floats if wish.weights else []
        weights = {self.names[i]: _host(self.consts[i]) for i in kept}
        forward = [call for call in calls if call.way == "forward"]
        ends = [call.end for call in forward]
        inside = [call for call in forward if (call.layer, call.number) == wish.inside]
        return Capture(
            self.backend, [x for x in taken if x.made or x.given], weights, self.unit,
            [*self._choices(run, ends), *self._gates(run, ends)],
            [
                Operation(_name(node), source(node.chain, node.eqn), get(node.outs, call.turn))
                for call in inside
                for node in own
                if node.loops == len(call.turn)
                and self.layers.call(node, call.layer) == call.index
            ],
            [_HIDDEN] if self.calls.hidden else [], whole_gradients=False,
        )  # fmt: skip

    def _counts(self, node: Node) -> bool:
        floats = any(i is not None and checkable(self.graph.values[i].aval) for i in node.outs)
        return floats and node.name not in _QUIET

    def _choices(self, run: _Values, ends: list[int]) -> Iterator[Choice]:
        for chooser, place, picked, moved in run.chosen:
            node, drawn = chooser.node, chooser.drawn
            yield self._choice(chooser.name, node, picked, place, ends, moved=moved, drawn=drawn)

    def _choice(
        self, name: str, node: Node, picked: Array, place: int, ends: list[int], **more: Any
    ) -> Choice:
        """Tell of what an operation chose at a place in the run, with the calls that had ended."""
        layer, before = self.layers.of(node) or "", sum(end < place for end in ends)
        return Choice(name, layer, source(node.chain, node.eqn), picked, before, **more)

    def _gates(self, run: _Values, ends: list[int]) -> Iterator[Choice]:
        """Walk the comparisons that open or close for some elements."""
        limits: dict[tuple[Any, ...], list[int]] = {}
        nodes: dict[int, Node] = {}
        for node in self.gates:  # beyond a limit and at it: one gate, since JAX 0.12
            held = [self.graph.values[i] for i in node.ins]
            key = tuple(str(x.constant) if x.known and not np.ndim(x.constant) else x.index
                        for x in held)  # fmt: skip
            nodes[node.outs[0] or 0] = node
            limits.setdefault((node.path, *key), []).append(node.outs[0] or 0)
        for first, *more in limits.values():
            for turn in [turn for i, turn in run.found if i == first]:
                sides = [np.asarray(run.found[i, turn][1]) for i in (first, *more)]
                picked = np.asarray(sum(side * 2**i for i, side in enumerate(sides)))
                if (picked != picked.ravel()[:1]).any():
                    place, node = run.found[first, turn][0], nodes[first]
                    yield self._choice(node.name, node, picked, place, ends, gate=True)


def _brought(x: Any) -> Any:
    """Bring a batch of any framework, whatever it is made of, to JAX."""

    def bring(item: Any) -> Any:
        if isinstance(item, jax.Array) or not hasattr(item, "dtype") or not hasattr(item, "shape"):
            return item
        detached = item.detach() if hasattr(item, "detach") else item
        return jnp.asarray(np.asarray(detached))

    return jax.tree_util.tree_map(bring, x)


def _name(node: Node) -> str:
    """Name an operation by the function of JAX it is a part of, else by its primitive."""
    whole = names.function(call_site(node.chain, node.eqn).functions)
    return whole or names.primitive(node.name)


def _float(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def _moved(x: Any, factor: Array) -> Any:
    return jnp.asarray(np.asarray(x, np.float64) * factor, x.dtype)


def _host(x: Any) -> Array:
    array = np.asarray(x)
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)
