"""A tracked function inside the caller's own jit, grad, vmap, scan or shard_map.

There is no step of ours, and no array to look at: what is read is looked at inside the caller's
program, and only a bad reading calls back to the host.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from anynan._readings.readings import ProbePoint
from anynan.errors import AnomalyError, reason
from anynan.jax.graphs.bodies import CUSTOM
from anynan.jax.graphs.graph import Graph
from anynan.jax.graphs.layers import Layers
from anynan.jax.program.evaluator import Evaluator
from anynan.jax.program.program import Program
from anynan.jax.program.trace import ShutError
from anynan.jax.read import probes
from anynan.jax.read.readings import Plan, Probe


class Taps:
    """Run a tracked function as a part of the caller's program.

    Args:
        program: The function.
        bad_words: Says which words of a reading are bad.
        told: Takes readings of which one is bad: what they are of, their types, their words.
        say: Notes what is not watched.
    """

    def __init__(
        self, program: Program, bad_words: Callable[[ProbePoint], Any],
        told: Callable[[list[ProbePoint], list[Any], Any], None], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._program, self._bad_words, self._told = program, bad_words, told
        self._say = say

    def run(self, arrays: list[Any], *, backward: bool) -> Any:
        """Run the function.

        Args:
            arrays: Its arguments.
            backward: Whether gradients are read.

        Raises:
            TypeError: Under forward-mode differentiation, unless ``backward=False``.
        """
        program = self._program
        # What the function closes over may be the caller's own: it is an argument like the others.
        closed_over = list(program.closed.consts)
        arrays = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in (*closed_over, *arrays)]
        split = len(closed_over)
        points = program.inputs()
        points += program.points(backward=False, layers=program.settings.layers)
        points = [point for point in points if point.phase != "backward"]
        report = self._reporter(program.graph, points)

        def forward(*inner: Any) -> tuple[list[Any], Any]:
            plan = Plan(opaque=CUSTOM, detached=True)
            for point in points:
                program.want(plan, point.value, "code")
            outs, found = program.evaluate(plan, inner[split:], inner[:split])
            return outs, _words(found, points)

        if not backward:
            outs, words = forward(*arrays)
            report(words)
            return program.joined(outs)

        @jax.custom_vjp
        def watched(*inner: Any) -> list[Any]:
            outs, words = forward(*inner)
            report(words)
            return outs

        def ahead(*inner: Any) -> tuple[list[Any], Any]:
            outs, back, words = jax.vjp(forward, *inner, has_aux=True)
            report(words)
            return outs, back

        def behind(back: Any, gradients: Any) -> tuple[Any, ...]:
            try:
                return self._backward(back, gradients)
            except (AnomalyError, jax.errors.JaxRuntimeError):
                raise
            except Exception as error:  # noqa: BLE001  ours, or it comes again from the rule itself
                found: tuple[Any, ...] = back(gradients)
                self._say(f"the gradients inside a caller's grad were not read: {reason(error)}")
                return found

        watched.defvjp(ahead, behind)
        try:
            outs = watched(*arrays)
        except TypeError as error:
            if "forward-mode" not in str(error):
                raise
            msg = (
                "a tracked function whose gradients are watched can be differentiated in reverse "
                "mode only (grad, vjp); for jvp, jacfwd, hessian or linearize use "
                "track(fn, advanced=anynan.Advanced(backward=False)), or track the function that "
                "takes the derivative"
            )
            raise TypeError(msg) from error
        return program.joined(outs)

    def _backward(self, back: Any, gradients: Any) -> tuple[Any, ...]:
        """Run the backward pass, and read the gradients that come into each layer."""
        program = self._program
        flat, tree = jax.tree_util.tree_flatten(gradients)
        data = [x for x in flat if x.dtype != jax.dtypes.float0]

        def pure(*inner: Any) -> Any:
            left = iter(inner)
            leaves = [x if x.dtype == jax.dtypes.float0 else next(left) for x in flat]
            return back(jax.tree_util.tree_unflatten(tree, leaves))

        shapes: list[Any] = []

        def kept(*inner: Any) -> list[Any]:
            out = pure(*inner)
            shapes[:] = out
            return [x for x in out if x.dtype != jax.dtypes.float0]

        closed = jax.make_jaxpr(kept)(*data)
        graph = Graph(closed)
        for node in graph.nodes:  # all of it is a gradient's, under whatever name
            node.backward = True
        layers = Layers(graph, program.roots)
        arriving = [s for s in layers.arriving() if program.watched(s.layer)]
        points = [
            ProbePoint(index, None, "backward", "gradient of the result")
            for index in graph.arguments
        ]
        points += arriving
        split = len(program.closed.consts)
        left = [i for i, x in enumerate(shapes) if x.dtype != jax.dtypes.float0]
        for i, index in zip(left, graph.results, strict=True):
            value = graph.values[index]
            if value.argument is None and not value.known:
                if i < split:
                    continue
                leaf = program.leaves[i - split]
                weight = leaf.name if leaf.role == "parameter" else None
                layer = program.owner(leaf) if weight else None
                points.append(
                    ProbePoint(index, layer, "backward", f"grad of {leaf.name}", 0, weight)
                )
        points = [point for point in points if probes.checkable(graph.values[point.value].aval)]
        plan = Plan(opaque=CUSTOM, detached=True)
        for point in points:
            value = graph.values[point.value]
            plan.add(value.path, value.var, Probe(point.value))
        outs, found = Evaluator(plan).run(closed.jaxpr, closed.consts, data)
        if plan.shut:
            raise ShutError(plan.shut)
        self._reporter(graph, points)(_words(found, points))
        rest = iter(outs)
        return tuple(x if x.dtype == jax.dtypes.float0 else next(rest) for x in shapes)

    def _reporter(self, graph: Graph, points: list[ProbePoint]) -> Callable[[Any], None]:
        """Make what calls back to the host, and only where a reading is bad."""
        if not points:
            return _nothing
        table = np.stack([self._bad_words(point) for point in points])
        kinds = [graph.values[point.value].aval for point in points]

        def told(words: Any) -> None:
            self._told(points, kinds, np.asarray(words))

        @jax.custom_batching.custom_vmap
        def report(words: Any) -> Any:
            bad = jnp.any(jnp.take_along_axis(table, words.astype(jnp.int32)[:, None], axis=1))
            lax.cond(bad, lambda w: jax.debug.callback(told, w), _nothing, words)
            return jnp.float32(0)

        @report.def_vmap
        def _(size: int, batched: Any, words: Any) -> Any:
            # Over the batch first: a condition for each lane would call back for all of them.
            return report(jnp.max(words, axis=0) if batched[0] else words), False

        def call(words: Any) -> None:
            report(words)

        return call


def _nothing(words: Any) -> None:
    """Call nobody."""


def _words(found: list[Any], points: list[ProbePoint]) -> Any:
    rows = {item.probe.key: jnp.max(item.data) for item in found}
    if not points:
        return jnp.zeros(0, jnp.float32)
    return lax.stop_gradient(jnp.stack([rows[point.value] for point in points]))
