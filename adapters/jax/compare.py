"""One side of a comparison: evaluate a function's jaxpr, and keep what leaves its layers."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anynan._compare.captures import (
    Array,
    Capture,
    Choice,
    Held,
    Operation,
    Side,
    Taken,
    Wish,
    cotangent,
)
from anynan.jax.graphs.bodies import rounds_of
from anynan.jax.graphs.calls import Calls, Turn, scans, turns
from anynan.jax.graphs.choices import Chooser, choosers, gates
from anynan.jax.graphs.graph import Graph, Node
from anynan.jax.graphs.layers import Layers
from anynan.jax.graphs.lines import call_site, source
from anynan.jax.graphs.names import FUNCTIONS, PRIMITIVES
from anynan.jax.graphs.versions import wide_numbers
from anynan.jax.program.scopes import named
from anynan.jax.program.trace import under_way
from anynan.jax.program.values import Values
from anynan.jax.read.probes import checkable

# Of every value of these the elements are there before.
_QUIET = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "iota", "reshape"})

_HIDDEN = (
    "layers inside a loop of JAX whose length is not known (while), inside a branch (cond) or "
    "inside shard_map were compared at the ends of it only"
)


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
        with wide_numbers() if wish.wide else nullcontext():
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

            names = self.names()
            self._traced[key] = _Traced(self, call, arrays, names, backward=wish.backward)
        return self._traced[key].capture(arrays, wish)

    def names(self) -> dict[int, str]:
        """Name the weights that have names, by identity."""
        return {}


class _Traced:
    """Hold one traced form of a function, and what leaves its layers."""

    def __init__(
        self,
        side: JaxSide,
        call: Callable[..., Any],
        arrays: list[Any],
        known: dict[int, str],
        *,
        backward: bool,
    ) -> None:
        roots: set[str] = set()
        with under_way(), named((side.call, arrays, None), roots):
            closed = jax.make_jaxpr(call)(*arrays)
            self.consts = [jnp.asarray(x) if hasattr(x, "dtype") else x for x in closed.consts]
            self.floats = [i for i, x in enumerate(self.consts) if _float(x)]
            self.names = {i: known.get(id(closed.consts[i]), f"constant {i}") for i in self.floats}
            if backward:
                closed = self._differentiated(call, closed, arrays)
        self.backend, self.closed, self.backward = side.backend, closed, backward
        self.graph = Graph(closed)
        self.layers = Layers(self.graph, frozenset(roots))
        self.calls = Calls(self.graph, self.layers, len(self.floats) if backward else 0)
        made = [self.graph.values[i].aval.dtype for call in self.calls.calls for i in call.made]
        self.unit = max([_unit(dtype) for dtype in made] or [0.0])
        self.choosers = [x for x in choosers(self.graph) if x.path[:-1] in self.calls.open]
        self.gates = [x for x in gates(self.graph) if backward and x.path in self.calls.open]
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

    def capture(self, arrays: list[Any], wish: Wish) -> Capture:
        """Evaluate, and sort what came out into layers."""
        consts = list(self.consts)
        if wish.nudge is not None:
            for i in self.floats:
                consts[i] = _moved(consts[i], wish.nudge.factor(f"weight {i}", consts[i].shape))
        inside = [x for x in self.calls.calls if (x.layer, x.number) == wish.inside]
        operations = [
            (call, node)
            for call in inside
            for node in self.calls.own(call)
            if call.way == "forward" and self._counts(node)
        ]
        wanted = sorted(
            {i for call in self.calls.calls for i in (*call.given, *call.made)}
            | {i for _, node in operations for i in node.outs if i is not None}
            | {i for node in self.gates for i in node.outs[:1] if i is not None}
        )
        held = self._held(wish.follow or ())
        found, own = jax.device_get(self._evaluated(wanted, consts, arrays, held))

        def get(indices: Iterable[int | None], turn: Turn) -> tuple[Array, ...]:
            return tuple(
                _host(found[i][turn[: self.graph.values[i].loops]])
                for i in indices
                if i is not None and i in found
            )

        taken = [
            Taken(x.layer, "", x.number, x.way, get(x.given, x.turn), get(x.made, x.turn))
            for x in self.calls.calls
        ]
        kept = self.floats if wish.weights else []
        weights = {self.names[i]: _host(self.consts[i]) for i in kept}
        return Capture(
            self.backend, [x for x in taken if x.made or x.given], weights, self.unit,
            [*self._choices(own, held), *self._gates(found)],
            [
                Operation(_name(node), source(node.chain, node.eqn), get(node.outs, call.turn))
                for call, node in operations
            ],
            [_HIDDEN] if self.calls.hidden else [], whole_gradients=False,
        )  # fmt: skip

    def _counts(self, node: Node) -> bool:
        floats = any(i is not None and checkable(self.graph.values[i].aval) for i in node.outs)
        return floats and node.name not in _QUIET

    def _turned(self) -> list[tuple[int, Chooser, Turn]]:
        """List discrete operations with the turns of the scans around them, as they run."""
        found = [
            (self.calls.when(x.node, turn), number, x, turn)
            for number, x in enumerate(self.choosers)
            for turn in turns(x.node, x.loops)
        ]
        return [(number, x, turn) for _, number, x, turn in sorted(found, key=lambda f: f[:2])]

    def _held(self, follow: Sequence[Choice]) -> dict[int, Array]:
        """Find what each discrete operation is held to; in every turn of a scan, or in none."""
        likes, found = Held(follow), dict[int, dict[Turn, Array]]()
        for number, x, turn in self._turned():
            like = likes.next(x.name, x.shape)
            if like is not None:
                found.setdefault(number, {})[turn] = like.picked
        arrays = {}
        for number, picks in found.items():
            chooser = self.choosers[number]
            lengths = [rounds_of(eqn) or 0 for eqn in scans(chooser.node)[: chooser.loops]]
            if len(picks) == math.prod(lengths):
                stacked = np.stack([picks[turn] for turn in sorted(picks)])
                arrays[number] = stacked.reshape((*lengths, *chooser.shape))
        return arrays

    def _choices(self, own: dict[int, Any], held: dict[int, Array]) -> Iterator[Choice]:
        mine = {number: np.asarray(x) for number, x in own.items()}
        for number, x, turn in self._turned():
            picked = mine[number][turn]
            like = held[number][turn].astype(picked.dtype) if number in held else picked
            yield Choice(
                x.name, self.layers.of(x.node) or "", source(x.node.chain, x.node.eqn), like,
                self.calls.before(x.node, turn), float(np.mean(like != picked)), drawn=x.drawn,
            )  # fmt: skip

    def _gates(self, found: dict[int, Any]) -> Iterator[Choice]:
        """Walk the comparisons that open or close for some elements."""
        limits: dict[tuple[Any, ...], list[Node]] = {}
        for node in self.gates:  # beyond a limit and at it: one gate, since JAX 0.12
            ends = [self.graph.values[i] for i in node.ins]
            key = tuple(str(x.constant) if x.known and not np.ndim(x.constant) else x.index
                        for x in ends)  # fmt: skip
            if node.outs[0] in found:
                limits.setdefault((node.path, *key), []).append(node)
        for node, *more in limits.values():
            for turn in turns(node, node.loops):
                sides = [np.asarray(found[x.outs[0] or 0][turn]) for x in (node, *more)]
                picked = sum(side * 2**i for i, side in enumerate(sides))
                if (picked != picked.ravel()[:1]).any():
                    yield Choice(
                        node.name, self.layers.of(node) or "", source(node.chain, node.eqn), picked,
                        self.calls.before(node, turn), gate=True,
                    )  # fmt: skip

    def _evaluated(
        self, wanted: list[int], consts: list[Any], arrays: list[Any], held: dict[int, Array]
    ) -> tuple[dict[int, Any], dict[int, Any]]:
        key = tuple(wanted)
        if key not in self.programs:
            values = [self.graph.values[i] for i in wanted]
            places = {(value.path, value.var): value.index for value in values}
            numbers = {x.path: number for number, x in enumerate(self.choosers)}
            self.programs[key] = jax.jit(Values(self.closed.jaxpr, places, numbers))
        if self.backward:
            # Constants that are no weights stand where the second trace found them.
            return self.programs[key](  # type: ignore[no-any-return]
                self.closed.consts, [*(consts[i] for i in self.floats), *arrays], held
            )
        return self.programs[key](consts, arrays, held)  # type: ignore[no-any-return]


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
