"""Keras on JAX: a batch of ``fit`` is a traced step, a plain call is read as it runs."""

import functools
import weakref
from collections.abc import Sequence
from typing import Any, Unpack

import jax
import keras
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from anynan._base.patches import owner_of
from anynan._diagnosis.evidence import BadParameter, ReplayError
from anynan._diagnosis.lineage import Replay
from anynan._diagnosis.rules.repair import Repair
from anynan._diagnosis.trials import Attempt
from anynan._readings.readings import ProbePoint, Reading
from anynan._readings.step import Step
from anynan._steps.adapter import Rise
from anynan._steps.tracked import Tracked, make_way
from anynan.jax.graphs.stacks import LAYER
from anynan.jax.program.trace import tracing
from anynan.jax.read import probes
from anynan.jax.read.places import fill, sites_of
from anynan.jax.tracking import checked
from anynan.keras import seams
from anynan.keras.jax_calls import Calls
from anynan.keras.jax_steps import Named, Part, Steps
from anynan.options import FOR_TRAINING, TrackOptions
from anynan.tracker import Tracker, begin

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
    return next((found for found in seams.sessions() if found.model() is model), None)


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
        self._foreign: weakref.WeakSet[Any] = weakref.WeakSet()
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

    def watching(self) -> bool:
        """Tell whether it is to look at what runs now."""
        return self.tracker.judge.adapter is self and not self.tracker.paused

    def attach(self) -> None:
        """Change the classes; look at the weights once."""
        model = self.model()
        seams.watch(self)
        _watching.add(self)
        owners = {owner_of(type(x), "__call__"): None for x in self._paths}
        for owner in (keras.layers.Layer, *owners):
            seams.change(owner, "__call__", _layer_call)
        seams.change(keras.layers.Layer, "stateless_call", _stateless_call)
        if isinstance(model, keras.Model):
            seams.change(owner_of(type(model), "compute_loss"), "compute_loss", _compute_loss)
            for kind in seams.KINDS:
                self.made(model, kind)
        self.attached(self._write_weight)

    def _write_weight(self, worst: BadParameter, rows: Step) -> None:
        (value,) = (w.variable._value for w in self.weights if w.name == worst.name)
        point = ProbePoint(
            -1, worst.layer, "parameter", worst.name.rpartition(".")[2], 0, worst.name
        )
        words = np.asarray(probes.ends(value, self.options.extra))[None]
        fill(rows, sites_of([point], [value], self.tracker.judge.monitor), [point], words)

    def detach(self) -> None:
        """Put the classes and the model's functions back; safe to call twice."""
        seams.unwatch(self)
        _watching.discard(self)
        model = self.model()
        for kind in seams.KINDS:
            function = getattr(model, f"{kind}_function", None)
            if isinstance(function, Batches) and function.session() is self:
                setattr(model, f"{kind}_function", function.function)
        for part in self._parts():
            part.detach()

    def made(self, model: Any, kind: str) -> None:
        """Make each batch that a function of the model runs on a step."""
        function = getattr(model, f"{kind}_function", None)
        if function is not None and not isinstance(function, Batches):
            setattr(model, f"{kind}_function", Batches(self, model, function, kind))

    def _parts(self) -> list[Part]:
        model = self.model()
        functions = [getattr(model, f"{kind}_function", None) for kind in seams.KINDS]
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

    def rise(self) -> Rise | None:
        """Keep what the next steps donate, if this one could not be run again without it."""
        part = self._judged()
        return None if part is None else part.rise()

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


class Batches:
    """Stand for a function that ``fit`` and the like run on batches."""

    def __init__(self, session: KerasSession, model: Any, function: Any, kind: str) -> None:
        self.session = weakref.ref(session)
        self.function = function
        self.steps = Steps(session, model, kind)

    def __call__(self, state: Any, iterator: Any) -> Any:
        """Run batches."""
        session = self.session()
        if session is None or not session.watching():
            return self.function(state, iterator)
        return self.steps.run(session.model(), state, iterator)


_code = jax.jit(probes.code)


# What stands in for the methods.


def _layer_call(original: Any) -> Any:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        run = functools.partial(original, self)
        for session in seams.sessions():
            path = session.path(self)
            if path is not None and not session.tracker.paused:
                return session.calls.layer(run, self, path, args, kwargs)
        return run(*args, **kwargs)

    return __call__


def _stateless_call(original: Any) -> Any:
    def stateless_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        for session in seams.sessions():
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
