"""One side of a comparison: evaluate a function's jaxpr, and keep what leaves its layers."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anynan._compare.captures import (
    Array,
    Capture,
    Operation,
    Side,
    Taken,
    Way,
    Wish,
    cotangent,
)
from anynan.jax.graphs.bodies import bodies, dropped
from anynan.jax.graphs.graph import Graph, Node
from anynan.jax.graphs.layers import Layers, inside
from anynan.jax.graphs.lines import call_site, source
from anynan.jax.graphs.names import FUNCTIONS, PRIMITIVES
from anynan.jax.program.evaluator import rebind
from anynan.jax.program.scopes import named
from anynan.jax.program.trace import under_way
from anynan.jax.read.probes import checkable

_jax: Any = jax
_wide = _jax.enable_x64 if hasattr(jax, "enable_x64") else _jax.experimental.enable_x64
# Of every value of these the elements are there before.
_QUIET = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "iota", "reshape"})


def side_of(target: Any) -> Side | None:
    """Give the side of a function; None for all that cannot be called."""
    return JaxSide(target) if callable(target) else None


class JaxSide(Side):
    """Run a JAX function: its weights are the constants that its trace finds."""

    backend = "jax"
    can_widen = True
    can_look_inside = True

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self._traced: dict[Any, _Traced] = {}

    def run(self, batch: tuple[Any, ...], wish: Wish) -> Capture:
        """Run once: nothing is written to, so nothing needs to be put back."""
        with _wide(True) if wish.wide else nullcontext():
            return self._run(batch, wish)

    def _run(self, batch: tuple[Any, ...], wish: Wish) -> Capture:
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

            self._traced[key] = _Traced(self.call, call, arrays, wish.backward)
        return self._traced[key].capture(arrays, wish)


class _Traced:
    """Hold one traced form of a function, and what leaves its layers."""

    def __init__(
        self, fn: Any, call: Callable[..., Any], arrays: list[Any], backward: bool
    ) -> None:
        roots: set[str] = set()
        with under_way(), named((fn, arrays, None), roots):
            closed = jax.make_jaxpr(call)(*arrays)
            self.consts = [jnp.asarray(x) if hasattr(x, "dtype") else x for x in closed.consts]
            self.floats = [i for i, x in enumerate(self.consts) if _float(x)]
            if backward:
                closed = self._differentiated(call, closed, arrays)
        self.closed, self.backward = closed, backward
        self.graph = Graph(closed)
        self.layers = Layers(self.graph, frozenset(roots))
        self.calls = list(self._calls())
        made = [self.graph.values[i].aval.dtype for _, _, outs in self.calls for i in outs]
        self.unit = max([_unit(dtype) for dtype in made] or [0.0])
        self.programs: dict[Any, Any] = {}

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

        traced = jax.make_jaxpr(jax.grad(loss))(chosen, arrays)
        self.weights = len(chosen)
        return traced

    def _calls(self) -> Iterator[tuple[tuple[str, Way, int], list[int], list[int]]]:
        """Walk the calls of layers in the order in which they end: what goes in, what comes out.

        Of the backward pass there is what arrives: inside a layer JAX adds gradients up where it
        likes.
        """
        graph, layers = self.graph, self.layers
        ends: dict[tuple[str, int], int] = {}
        ins: dict[tuple[str, int], dict[int, None]] = {}
        outs: dict[tuple[str, int], dict[int, None]] = {}
        for node in graph.nodes:
            path = layers.of(node)
            if node.after or node.backward or path is None or node.loops:
                continue
            for layer in layers.around(path):
                key = (layer, layers.call(node, layer))
                ends[key] = node.index
                for i in node.ins:
                    if self._comes_in(i, layer):
                        ins.setdefault(key, {})[i] = None
                for out in node.outs:
                    if out is not None and self._leaves(out, layer):
                        outs.setdefault(key, {})[out] = None
        # A layer ends with its last operation, and before those around it.
        order = sorted(ends, key=lambda key: (ends[key], -key[0].count("."), -len(key[0])))
        for key in order:
            if key in outs:
                yield (key[0], "forward", key[1]), list(ins.get(key, ())), list(outs[key])
        arriving: dict[tuple[str, int], list[int]] = {}
        for spot in layers.arriving():
            if not graph.values[spot.value].loops and not self._joins(spot.value, spot.layer or ""):
                arriving.setdefault((spot.layer or "", spot.call), []).append(spot.value)
        for (layer, call), found in arriving.items():
            yield (layer, "backward", call), found, []

    def _comes_in(self, index: int, layer: str) -> bool:
        value = self.graph.values[index]
        if value.known or not checkable(value.aval) or value.loops:
            return False
        if value.writer is None:
            return value.argument is not None and value.argument >= self._first_input()
        return not inside(self.layers.of(self.graph.nodes[value.writer]), layer)

    def _leaves(self, index: int, layer: str) -> bool:
        value = self.graph.values[index]
        if not checkable(value.aval) or value.loops or self.graph.placed(index):
            return False
        return any(
            reader is None or (not reader.backward and not inside(self.layers.of(reader), layer))
            for reader in self.graph.readers(index)
        )

    def _joins(self, index: int, layer: str) -> bool:
        """Tell whether a gradient is only added to those that a layer's inputs get from it."""
        readers = [reader for reader in self.graph.readers(index) if reader is not None]
        own = [node for node in readers if node.backward and inside(self.layers.of(node), layer)]
        return all(node.name == "add_any" for node in own)

    def _first_input(self) -> int:
        return len(self.floats) if self.backward else 0

    def capture(self, arrays: list[Any], wish: Wish) -> Capture:
        """Evaluate, and sort what came out into layers."""
        consts = list(self.consts)
        if wish.nudge is not None:
            for i in self.floats:
                consts[i] = _moved(consts[i], wish.nudge.factor(f"weight {i}", consts[i].shape))
        operations = [] if wish.inside is None else list(self._own(*wish.inside))
        wanted = sorted(
            {i for _, given, made in self.calls for i in (*given, *made)}
            | {i for node in operations for i in node.outs if i is not None}
        )
        found = dict(zip(wanted, self._evaluated(wanted, consts, arrays), strict=True))
        held = {i: _host(x) for i, x in found.items() if x is not None}
        taken = [
            Taken(
                layer, "", call, way,
                tuple(held[i] for i in given if i in held),
                tuple(held[i] for i in made if i in held),
            )
            for (layer, way, call), given, made in self.calls
        ]  # fmt: skip
        kept = self.floats if wish.weights else []
        weights = {f"constant {i}": _host(self.consts[i]) for i in kept}
        notes = []
        if any(node.loops for node in self.graph.nodes):
            notes.append("layers inside a loop of JAX (scan, while) were compared at its ends only")
        return Capture(
            "jax", [x for x in taken if x.made or x.given], weights, self.unit, [],
            [
                Operation(
                    _name(node), source(node.chain, node.eqn),
                    tuple(held[i] for i in node.outs if i in held),
                )
                for node in operations
            ],
            notes, whole_gradients=False,
        )  # fmt: skip

    def _own(self, layer: str, call: int) -> Iterator[Node]:
        """Walk the operations of a layer's own code."""
        for node in self.graph.nodes:
            mine = self.layers.of(node) == layer and self.layers.call(node, layer) == call
            floats = any(i is not None and checkable(self.graph.values[i].aval) for i in node.outs)
            counts = floats and node.name not in _QUIET
            if mine and counts and not node.backward and not node.loops:
                yield node

    def _evaluated(self, wanted: list[int], consts: list[Any], arrays: list[Any]) -> list[Any]:
        values = [self.graph.values[i] for i in wanted]
        places = {(value.path, value.var): n for n, value in enumerate(values)}
        key = tuple(wanted)
        if key not in self.programs:
            self.programs[key] = jax.jit(partial(_evaluate, self.closed.jaxpr, places))
        if self.backward:
            mine = [consts[i] for i in self.floats]
            given, held = [*mine, *arrays], self.closed.consts
            # Constants that are no weights stand where the second trace found them.
        else:
            given, held = arrays, consts
        found: dict[int, Any] = self.programs[key](held, given)
        return [found.get(n) for n in range(len(wanted))]


def _evaluate(jaxpr: Any, places: Any, consts: Any, args: Any) -> dict[int, Any]:
    """Evaluate a jaxpr, and give the values that are wanted, by number."""
    found: dict[int, Any] = {}

    def walk(jaxpr: Any, consts: Any, args: Any, path: tuple[Any, ...]) -> list[Any]:
        env: dict[Any, Any] = {}

        def write(var: Any, x: Any) -> None:
            env[var] = x
            if (path, var) in places:
                found[places[path, var]] = x

        def read(var: Any) -> Any:
            return var.val if hasattr(var, "val") else env[var]

        for var, x in zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True):
            write(var, x)
        for i, eqn in enumerate(jaxpr.eqns):
            operands = [read(var) for var in eqn.invars]
            inner = bodies(eqn)
            if inner and inner[0].kind == "call":
                body = inner[0]
                outs = walk(body.jaxpr, body.consts, operands, body.path((*path, i)))
            else:
                outs = rebind(eqn, operands)
            for var, x in zip(eqn.outvars, outs, strict=True):
                if not dropped(var):
                    write(var, x)
        return [read(var) for var in jaxpr.outvars]

    walk(jaxpr, consts, args, ())
    return found


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
    for name in call_site(node.chain, node.eqn).functions:
        if name in FUNCTIONS:
            return FUNCTIONS[name]
    return PRIMITIVES.get(node.name, node.name)


def _unit(dtype: Any) -> float:
    finfo: Any = jnp.finfo
    return float(finfo(dtype).eps) / 2


def _float(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def _moved(x: Any, factor: Array) -> Any:
    return jnp.asarray(np.asarray(x, np.float64) * factor, x.dtype)


def _host(x: Any) -> Array:
    array = np.asarray(x)
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)
