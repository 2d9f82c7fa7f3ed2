"""Plain calls of a Keras model on JAX: run as they are, and read when the model's call is over."""

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anynan._arrays.arguments import bound, positional
from anynan._arrays.containers import leaves
from anynan._base import context
from anynan._diagnosis.lineage import Replay
from anynan._readings.readings import ProbePoint
from anynan._steps.messages import INSIDE_LOOP
from anynan.jax.graphs.stacks import LAYER
from anynan.jax.program import signature
from anynan.jax.program.trace import tracing
from anynan.jax.read import probes
from anynan.jax.read.places import fill, sites_of
from anynan.jax.replay.replay import replay
from anynan.jax.replay.steps import Step
from anynan.keras.jax_steps import Named, Part
from anynan.keras.layers import layers_of, symbolic, weights_of
from anynan.keras.messages import PLAIN_CALLS, TRACED_ELSEWHERE


class Call:
    """Hold what one plain call of the outermost layer left behind."""

    def __init__(
        self, layer: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.layer, self.path, self.args, self.kwargs = layer, path, args, kwargs
        self.points: list[ProbePoint] = []
        self.arrays: list[Any] = []
        self.expected: dict[int, dict[str, str]] = {}
        self.counts: dict[str, int] = {}
        self.traced: set[str | None] = set()
        # Arrays do not change: what the variables hold now is there for a replay.
        self.before = {
            id(w.variable): w.variable._value for w in weights_of({"": layer, **layers_of(layer)})
        }

    def take(self, layer: str | None, phase: Any, label: str, value: Any) -> None:
        """Note what is to be read of a value."""
        count = 0
        if layer is not None:
            count = self.counts.get(layer, 0)
            self.counts[layer] = count + 1
        for name, x in leaves(value, label):
            if isinstance(x, jax.core.Tracer):
                self.traced.add(layer)
            elif isinstance(x, jax.Array | np.ndarray) and probes.checkable(x):
                allowed = context._expected.get()
                if allowed is not None:
                    self.expected[len(self.points)] = allowed
                self.points.append(ProbePoint(-1, layer, phase, name, count))
                self.arrays.append(x)


class Calls:
    """Read what leaves the layers when a model is called outside of every trace."""

    def __init__(self, owner: Named) -> None:
        self.owner = owner
        self._local = threading.local()
        self.seen: set[str] = set()

    @property
    def judged(self) -> Call | None:
        """Give the call that is judged at this moment."""
        return getattr(self._local, "judged", None)

    def running(self) -> bool:
        """Tell whether a call of the model is running in this thread."""
        return bool(self._local.__dict__.get("stack"))

    def layer(
        self, run: Callable[..., Any], layer: Any, path: str, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run a layer, and read what comes out of it."""
        stack: list[Any] = self._local.__dict__.setdefault("stack", [])
        if stack and stack[-1] is layer:  # a class that calls its base's
            return run(*args, **kwargs)
        stack.append(layer)
        try:
            if tracing():
                with jax.named_scope(LAYER + path):
                    return run(*args, **kwargs)
            if symbolic():
                return run(*args, **kwargs)
            call: Call | None = getattr(self._local, "call", None)
            if call is not None:
                out = run(*args, **kwargs)
                if self.owner.options.level != "step":
                    self._take(call, path, out)
                return out
            return self._root(run, layer, path, args, kwargs)
        finally:
            stack.pop()

    def _take(self, call: Call, path: str, out: Any) -> None:
        if path in self.owner.chosen:
            call.take(path, "forward", "output", out)

    def _root(
        self, run: Callable[..., Any], layer: Any, path: str, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        self.owner.grow()
        call = self._local.call = Call(layer, path, args, kwargs)
        for name, value in _arguments(layer, args, kwargs).items():
            call.take(None, "input", name, value)
        try:
            out = run(*args, **kwargs)
        finally:
            self._local.call = None
        self._take(call, path, out)
        whole = call.traced & {None, path}
        if whole and not symbolic():
            self.owner.tracker.judge.say(TRACED_ELSEWHERE())
        if call.arrays and not whole:
            for inner in call.traced:
                self.owner.tracker.judge.remark(INSIDE_LOOP(layer=inner))
            self._judge(call)
        return out

    def _judge(self, call: Call) -> None:
        """Bring the readings to the host in one read, and have them judged."""
        owner = self.owner
        if owner.options.level == "operation" or owner.options.parameters:
            owner.tracker.judge.say(PLAIN_CALLS())
        self.seen.update(point.layer for point in call.points if point.layer is not None)
        words = np.asarray(jnp.stack([_ends(x, owner.options.extra) for x in call.arrays]))
        rows = owner.tracker.judge.rows()
        for order, kinds in call.expected.items():
            rows.expect([order], kinds)
        for order, x in enumerate(call.arrays):
            rows.keep(order, functools.partial(_itself, x))
        fill(
            rows,
            sites_of(call.points, call.arrays, owner.tracker.judge.monitor),
            call.points,
            words,
        )
        owner.tracker.judge.close_step()
        self._local.judged = call
        try:
            owner.tracker.judge.settle(rows)
        finally:
            self._local.judged = None
        if rows.failed is None:
            owner.tracker.judge.known_clean(rows.number + 1)

    def replay(self, call: Call) -> Replay:
        """Run a call again as a traced program, operation by operation."""
        layer = call.layer
        flat, tree = jax.tree_util.tree_flatten((call.args, call.kwargs))
        data = {i: x for i, x in enumerate(flat) if signature.is_data(x)}
        sets = [layer.trainable_variables, layer.non_trainable_variables]
        held = [[call.before.get(id(v), v._value) for v in variables] for variables in sets]

        def pure(params: Any, buffers: Any, inputs: Any) -> Any:
            given = [inputs.get(str(i), x) for i, x in enumerate(flat)]
            args, kwargs = jax.tree_util.tree_unflatten(tree, given)
            with jax.named_scope(LAYER + call.path):
                return layer.stateless_call(params, buffers, *args, **kwargs)

        inputs = {str(i): x for i, x in data.items()}
        part = Part(self.owner, pure, ("params", "buffers", "inputs"), frozenset({-1}))
        one = signature.flatten((*held, inputs), {}, set())
        watches = part.watches(pure, None, one, None)
        watch = watches.get(part.verdicts.exact(watches))
        outs, words = watch(part.verdicts.table(watch), one.arrays)
        blank = [1.0] * len(watch.points)
        rows: Any = types.SimpleNamespace(lo=list(blank), hi=list(blank))
        step = Step(watch, one.arrays, outs, words, rows)
        step.read = watch.rows(probes.on_host(words))
        return replay(step, 0)


@functools.partial(jax.jit, static_argnums=1)
def _ends(x: Any, extra: tuple[str, ...]) -> Any:
    return probes.ends(jnp.asarray(x), extra)


def _itself(x: Any) -> Any:
    return x


def _arguments(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name the arguments of a layer's call."""
    return dict(bound(positional(layer.call), args, kwargs))
