"""Keras on JAX: a batch of ``fit`` is a traced step, a plain call is read as it runs."""

import functools
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from anynan._arrays.arguments import bound, positional
from anynan._arrays.containers import leaves
from anynan._base import context
from anynan._base.identity import SetByIdentity
from anynan._base.patches import owner_of
from anynan._diagnosis.evidence import BadParameter, ReplayError
from anynan._diagnosis.lineage import Replay
from anynan._diagnosis.rules.repair import Repair
from anynan._diagnosis.trials import Attempt
from anynan._readings.readings import ProbePoint, Reading
from anynan._steps.framework import Escalation
from anynan._steps.messages import INSIDE_LOOP
from anynan._steps.tracked import Tracked, make_way
from anynan.jax.graphs.stacks import LAYER
from anynan.jax.program import signature
from anynan.jax.program.program import Form
from anynan.jax.program.trace import tracing
from anynan.jax.read import probes
from anynan.jax.read.places import fill, sites_of
from anynan.jax.replay.replay import replay
from anynan.jax.replay.steps import Step
from anynan.jax.tracking import checked
from anynan.keras.jax_steps import Named, Part, Steps
from anynan.keras.layers import layers_of, symbolic, weights_of
from anynan.keras.messages import PLAIN_CALLS, TRACED_ELSEWHERE
from anynan.keras.seams import KINDS, Batches, change, sessions, unwatch, watch
from anynan.options import FOR_TRAINING, TrackOptions
from anynan.tracker import Tracker, begin


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
        for name, value in bound(positional(layer.call), args, kwargs):
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
            rows.keep(order, functools.partial(lambda x: x, x))
        sites = sites_of(call.points, call.arrays, owner.tracker.judge.monitor)
        fill(rows, sites, call.points, words)
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
        watches = part.watches(Form(pure, None, one, None, one.key()))
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


# What keeps sessions alive where nobody keeps their tracker; the models themselves do not.
_watching: "set[KerasSession]" = set()


def track(model: Any, **options: Unpack[TrackOptions]) -> Tracker:
    """Watch a Keras model on the JAX backend; ``anynan.keras.track`` calls this."""
    chosen = checked(options, (*FOR_TRAINING, "keep_inputs"))
    name = type(model).__name__
    first = session_of(model)
    if first is not None:
        make_way(first.tracker, name)
    tracker = Tracked(weakref.ref(model), chosen, name)
    session = KerasSession(model, tracker)
    weakref.finalize(model, _gone, weakref.ref(session)).atexit = False
    return begin(tracker, session)


def session_of(model: Any) -> "KerasSession | None":
    """Return the session of a tracked model, None if it is not tracked."""
    return next((found for found in sessions() if found.model() is model), None)


def _gone(ref: "weakref.ref[KerasSession]") -> None:
    """Put the classes back when the model is gone."""
    session = ref()
    if session is not None:
        session.tracker.remove()


class KerasSession(Named):
    """Watch a Keras model: each of its ways to run is a part with programs of its own."""

    backend = "jax"
    probes = probes

    def __init__(self, model: Any, tracker: Tracked) -> None:
        super().__init__(model, tracker)
        self._foreign: SetByIdentity[Any] = SetByIdentity()
        self.calls = Calls(self)

    def path(self, layer: Any) -> str | None:
        """Give a layer's path; one that runs in a call of the model may have come since."""
        path = self._paths.get(layer)
        if path is None and layer not in self._foreign and self.calls.running():
            self._take_up(whole=False)
            path = self._paths.get(layer)
            if path is None:
                self._foreign.add(layer)
        return path

    # Life.

    def attach(self) -> None:
        """Change the classes; look at the weights once."""
        watch(self, _compute_loss)
        _watching.add(self)
        owners = {owner_of(type(x), "__call__"): None for x in self._paths}
        for owner in (keras.layers.Layer, *owners):
            change(owner, "__call__", _layer_call)
        change(keras.layers.Layer, "stateless_call", _stateless_call)
        self.attached()

    def detach(self) -> None:
        """Put the classes and the model's functions back; safe to call twice."""
        for part in self._parts():
            part.detach()
        unwatch(self)
        _watching.discard(self)

    def made(self, model: Any, function: Any, kind: str) -> Batches:
        """Make each batch that a function of the model runs on a step."""
        steps = Steps(self, model, kind)
        return Batches(self, function, lambda x, *args: steps.run(x.model(), *args), steps)

    def _parts(self) -> list[Part]:
        model = self.model()
        functions = [getattr(model, f"{kind}_function", None) for kind in KINDS]
        found = [x.steps.part for x in functions if isinstance(x, Batches)]
        return [part for part in found if part is not None]

    def watched(self) -> list[str]:
        """List the layers that something was read of."""
        found = {path for part in self._parts() for path in part.watched()} | self.calls.seen
        return [path for path in self.chosen if path in found]

    def read(self) -> None:
        """Read and judge the steps not read yet."""
        for part in self._parts():
            part.read()

    # What the core asks for.

    def _judged(self) -> Part | None:
        return next((part for part in self._parts() if part.step is not None), None)

    def replay(self, reading: Reading) -> Replay:
        """Run the failing step again, operation by operation."""
        call, part = self.calls.judged, self._judged()
        if call is not None:
            return self.calls.replay(call)
        if part is None:
            msg = "this step is over, so it cannot be run again: the report names no operation"
            raise ReplayError(msg)
        return part.replay(reading)

    def attempt(self, reading: Reading, repairs: Sequence[Repair]) -> Attempt | None:
        """Run the failing step again, with operations repaired."""
        part = self._judged()
        if self.calls.judged is not None or part is None:
            return None
        return part.attempt(reading, repairs)

    def escalation(self) -> Escalation | None:
        """Keep what the next steps donate, if this one could not be run again without it."""
        part = self._judged()
        return None if part is None else part.escalation()

    def bad_parameters(self) -> list[BadParameter]:
        """List the weights that are bad now, or that the step that is judged made bad."""
        part = self._judged()
        if part is not None:
            return part.bad_parameters()
        found = []
        for name, layer, variable, buffer in self.weights:
            value = variable._value
            if value is None or not probes.checkable(value) or not int(_code(value)):
                continue
            summary = probes.measure(value)
            found.append(BadParameter(name, layer, summary, buffer))
        return found

    def is_bad(self, item: BadParameter) -> bool:
        """Look at one weight or buffer."""
        part = self._judged()
        if part is not None:
            return part.is_bad(item)
        found = (x._value for name, _, x, _ in self.weights if name == item.name)
        return any(x is not None and probes.checkable(x) and int(_code(x)) for x in found)

    def loss_scale(self) -> float | None:
        """Give the loss scale in force."""
        part = self._judged()
        function = getattr(self.model(), "train_function", None)
        if part is None or part.step is None or not isinstance(function, Batches):
            return None
        return function.steps.scale(part.step) if function.steps.part is part else None

    def rank(self) -> int | None:
        """Give the process in a run over several."""
        return int(jax.process_index()) if jax.process_count() > 1 else None


_code = jax.jit(probes.code)


# What stands in for the methods.


def _layer_call(original: Any) -> Any:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        run = functools.partial(original, self)
        for session in sessions():
            path = session.path(self)
            if path is not None and not session.tracker.paused:
                return session.calls.layer(run, self, path, args, kwargs)
        return run(*args, **kwargs)

    return __call__


def _stateless_call(original: Any) -> Any:
    def stateless_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        for session in sessions():
            path = session.path(self)
            if path is not None and tracing() and not session.tracker.paused:
                with jax.named_scope(LAYER + path):
                    return original(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return stateless_call


def _compute_loss(original: Any) -> Any:
    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        if tracing() and isinstance(out, jax.core.Tracer):
            checkpoint_name(out, probes.LOSS)
        return out

    return compute_loss
