"""One tracked target: its parts, its life, what the core asks of it."""

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import tensorflow as tf

from anynan._base.context import but
from anynan._base.imports import when_imported
from anynan._base.summary import Summary
from anynan._diagnosis.evidence import BadParameter, ReplayError
from anynan._diagnosis.lineage import Replay
from anynan._diagnosis.rules.repair import Repair
from anynan._diagnosis.trials import Attempt
from anynan._readings.norms import Guard
from anynan._readings.readings import Reading
from anynan._steps.adapter import BaseAdapter
from anynan._steps.messages import LAYER_UNWATCHED
from anynan._steps.tracked import Tracked
from anynan.errors import reason
from anynan.events import Event
from anynan.tensorflow.graphs.traces import Traces
from anynan.tensorflow.read import probes
from anynan.tensorflow.read.buffers import DeviceBuffers
from anynan.tensorflow.read.frames import Frame, graph_of, tensors
from anynan.tensorflow.read.layers import Layers
from anynan.tensorflow.replay import taped
from anynan.tensorflow.replay.replay import Replays
from anynan.tensorflow.replay.steps import Held, State, Step
from anynan.tensorflow.session.calls import Calls
from anynan.tensorflow.session.seams import SEAMS
from anynan.tensorflow.session.steps import Steps
from anynan.tensorflow.session.targets import parts_of
from anynan.tensorflow.session.updates import Updates
from anynan.tracker import Tracker, begin


class Session(BaseAdapter):
    """Watch layers for one tracker.

    Args:
        find: Gives the layers that there are now, by path.
        model: What was tracked, None for a function.
        tracker: Judges.
    """

    backend = "tensorflow"
    probes = probes
    runs_alone = False  # what a step gives back is read only where it took gradients

    def __init__(self, find: Callable[[], dict[str, Any]], model: Any, tracker: Tracked) -> None:
        super().__init__(tracker)
        options = self.options
        self.paused = False
        self._waiting: list[Callable[[], None]] = []
        self.layers = Layers(find, model, options)
        weights = self.layers.weights
        norms = Guard(options.policy).on
        # What an update did to a weight is judged by the gradient it got.
        sizes = norms or options.sizes or options.parameters
        layers = self.layers.alive()
        replicas = max([weights.replicas(), *map(_replicas, layers.values())])
        rows = 3 * len(layers) + 4 * len(weights.names) + 16
        self._gated = gated = options.action in ("raise", "skip") or options.patience > 0
        self.state = State()
        self._buffers = DeviceBuffers(rows, replicas, sizes=sizes)
        held = Held(
            tracker, self.layers, Traces(), self._buffers, self.state, norms, sizes, gated,
            dropped=gated and replicas == 1,  # replicas update all the same
            # The gradients of outputs reach those of weights, and a replay finds the layer.
            inner=sizes or not options.replay or replicas > 1,
        )  # fmt: skip
        self._replays = Replays(held)
        self.steps = Steps(held, self._replays)
        self.updates = Updates(held, self.steps)
        self.calls = Calls(held, self.steps, self.updates, self.grow, self.takes)

    # Life.

    def start(self) -> Tracker:
        """Begin to watch, until the tracker is removed or the model is gone."""
        if not getattr(self.tracker.fn, "experimental_get_tracing_count", lambda: 1)():
            self.calls.fresh.add(self.tracker.fn)
        model = self.layers.model()
        if model is not None:
            weakref.finalize(model, _gone, weakref.ref(self)).atexit = False
        return begin(self.tracker, self)

    def attach(self) -> None:
        """Change the classes; look at the weights once."""
        self._waiting = [
            when_imported("keras", _install_keras),
            when_imported("tf_keras", lambda: SEAMS.install_tf_keras(sys.modules["tf_keras"])),
        ]
        SEAMS.install(self, self.layers.alive())
        self.renew()
        self.attached()

    def grow(self, layer: Any = None, sources: Sequence[Any] = ()) -> None:
        """Watch the layers and weights that came since, too.

        Args:
            layer: One that runs, and was not known.
            sources: Variables of which a gradient is asked for, and that were not known.
        """
        parts = {} if layer is None else parts_of(layer)
        fresh, made = self.layers.grow(layer, parts, sources)
        if fresh:
            SEAMS.install(self, fresh)
        SEAMS.install_weights(made)
        # They hold what they were made with, whatever the step makes of them: no update wrote it.
        self.steps.keep_new(made)
        self.state.by_hand.update(map(self.layers.weights.name, made))

    def variables(self) -> list[Any]:
        """List the variables that the graphs of what is watched refer to, beside their own."""
        return self._buffers.variables()

    def others(self) -> bool:
        """Tell whether what runs now is another session's alone."""
        return False

    def is_part_of(self, outer: "Session") -> bool:
        """Tell whether a step of another session runs that reads all that this one would read."""
        model, runs = self.layers.model(), outer.state.held or outer.state.fits
        if model is None or not runs or (outer.tracker.found and not self.tracker.found):
            return False  # what the user tracked stays
        return any(model is layer for path, layer in outer.layers.alive().items() if path)

    def takes(self, variable: Any) -> bool:
        """Tell whether a variable that is differentiated by is a weight of what is watched.

        One that another session watches is that one's, but for a step that is running.
        """
        running = self.state.depth or self.state.held or self.state.frame is not None
        return bool(running) or not any(
            session.layers.weights.name(variable)
            for session in SEAMS.sessions
            if session is not self
        )

    def runs(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether a call of a compiled function, which nobody tracked, is a step."""
        return False

    def adopt(self, layer: Any, *, known: bool) -> None:
        """Watch a layer that runs in a step and was not known, if it belongs to what is watched.

        Args:
            layer: The layer.
            known: Whether another session watches it. What runs under a tape alone is that one's.
        """
        state = self.state
        free = self.layers.model() is None and not known
        inside = state.frame is not None or (free and (state.depth or state.tapes))
        if not inside or state.replaying or not self.layers.lacks(layer):
            return
        try:
            self.grow(layer)
        except Exception as error:  # noqa: BLE001  the user's program is not to fail by ours
            self.layers.pass_over(layer)
            what = f"a {type(layer).__name__}"
            self.tracker.judge.say(LAYER_UNWATCHED(what=what, error=reason(error)))

    def detach(self) -> None:
        """Put the classes back; safe to call twice."""
        for leave in self._waiting:
            leave()
        SEAMS.uninstall(self)
        self.renew()
        state = self.state
        state.frame, state.step, state.outputs, state.gradients = None, None, [], None

    def renew(self) -> None:
        """Have the functions of the model traced anew: with the checks, or without them."""

    def watched(self) -> list[str]:
        """List the layers that ought to be read when they run."""
        return self.layers.expected()

    def set_paused(self, paused: bool) -> None:
        """Stop reading; what was traced goes on writing its rows, and nobody looks."""
        if paused:
            self.read()
        else:
            self.renew()  # what was traced meanwhile holds no checks
        self.paused = paused

    def read(self) -> None:
        """Read and judge what was written and not read."""
        self.steps.judge_all(self._buffers.read())

    def finish(self) -> None:
        """End the open step."""
        self.read()
        self.steps.wrote()
        if self.tracker.judge.rows().lo:
            self.steps.end()

    # What the core asks for.

    def replay(self, reading: Reading) -> Replay:
        """Run the failing step again, operation by operation."""
        step = self.state.step
        if step is None:
            msg = "this step is over, so it cannot be run again: the report names no operation"
            raise ReplayError(msg)
        return self._replays.replay(step)

    def replay_call(self, reading: Reading) -> Replay | None:
        """Run the model's own call inside the failing step again, with what it was given."""
        inside = reading.phase in ("forward", "backward")
        step = self.steps.inner(reading.layer) if inside else None
        if step is None:
            return None
        found = self._replays.replay(step)
        found.inner = True
        # It was given what it was given, which may go by the name of an argument of the step's.
        found.passed = [place for place in found.passed if place.phase != "input"]
        return found

    def attempt(self, reading: Reading, repairs: Sequence[Repair]) -> Attempt | None:
        """Run the failing step again, with operations repaired."""
        step = self.state.step
        found = None if step is None else self._replays.attempt(step, reading, repairs)
        if found is None or not self.updates.scales():
            return found
        if any(sink.phase == "backward" for sink in found.replay.sinks):
            return None  # a loss scaler may mean it
        found.loss = found.gradient_norm = None  # they are not the program's own numbers
        return found

    def made_before(self, event: Event, taken: Sequence[Summary]) -> Replay | None:
        """Run again what ran before the step outside of graphs, up to the one fault in it."""
        made = taped.suspect(event.kind, taken)
        return made and self._replays.replay(Step(None, (), {}, taped=made))

    def bad_parameters(self) -> list[BadParameter]:
        """List the weights and buffers that are bad now."""
        return self.updates.bad_parameters()

    def is_bad(self, item: BadParameter) -> bool:
        """Look at one weight or buffer."""
        return self.updates.is_bad(item.name)

    def loss_scale(self) -> float | None:
        """Give the loss scale in force."""
        return self.updates.loss_scale()

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one step of a tracked function, read it and judge it."""
        state, steps = self.state, self.steps
        if state.depth or tf.inside_function():
            return fn(*args, **kwargs)
        if not self._gated:
            self.trace_first(fn, args, kwargs)
        step = steps.of(fn, args, kwargs)
        steps.open(step)
        with step.lending():
            with but(state, depth=state.depth + 1, arguments=(taken := Frame(None))):
                try:
                    self.calls.inputs(taken, fn, args, kwargs)
                    out = fn(*step.args, **step.kwargs)
                    frame = Frame(None)
                    gives = state.backward or not self.runs_alone
                    for label, x in tensors(out if gives else (), "result"):
                        frame.take(x, None, "loss", "loss" if label == "result" else label)
                    self.calls.flush(frame, backward=False)
                    if not gives:
                        self.calls.given(out, forward_only=True)
                except BaseException as error:
                    if state.broken is None:
                        state.broken, state.arguments = state.arguments, None
                    self.calls.broken(error)
                    raise
            steps.end()
        self.calls.trail()
        return out

    def trace_first(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have a compiled function make its variables before its first step, not in it.

        What they hold then is wanted where an update from bad gradients goes through.
        """
        if getattr(fn, "experimental_get_tracing_count", lambda: 1)():
            return
        with but(self.state, depth=self.state.depth + 1):
            graph_of(fn, args, kwargs)


# What Keras keeps its functions as.
FUNCTIONS = ("train_function", "test_function", "predict_function")


class ModelSession(Session):
    """Watch a Keras model."""

    def __init__(self, find: Callable[[], dict[str, Any]], model: Any, tracker: Tracked) -> None:
        super().__init__(find, model, tracker)
        self._built = self.layers.whole()

    def renew(self) -> None:
        """Drop the functions that Keras traced: it makes them anew when it needs them."""
        model = self.layers.model()
        for name in FUNCTIONS:
            if getattr(model, name, None) is not None:
                setattr(model, name, None)

    def batches(self, model: Any, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Make a step's function take its batches outside of the graph: a replay needs them."""
        step = "train_step" if function is model.train_function else "test_step"

        def one_by_one(iterator: Any) -> Any:
            if self.tracker.judge.adapter is not self or self.paused:
                return function(iterator)
            out = None
            taken = 0
            for data in itertools.islice(iterator, int(model.steps_per_execution)):
                taken += 1
                fn = getattr(model, step) if model.run_eagerly else None
                out = self.held(fn, (data,), functools.partial(function, iter((data,))))
            if not taken:
                raise StopIteration
            return out

        return one_by_one

    def predictions(self, model: Any, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Remember the batch that is predicted."""

        def predict(batches: Any) -> Any:
            if self.tracker.judge.adapter is not self or self.paused:
                return function(batches)
            fn = model.predict_step
            return self.held(fn, (batches[-1],), functools.partial(function, batches))

        return predict

    @taped.off()  # what is in a batch is no step's before
    def held(self, fn: Any, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Run one batch as one step; without a function, what is compiled says how."""
        state, steps = self.state, self.steps
        if not self._built:  # Keras built it after it was tracked
            self.grow()
            self._built = self.layers.whole()
        if fn is None or state.depth:
            with but(state, fits=True):
                return run()
        if state.open:
            steps.end()
        steps.open(steps.of(fn, args, {}))
        state.held = True
        try:
            return run()
        except BaseException as error:
            self.calls.broken(error)
            raise
        finally:
            if state.open:
                steps.end()


def _install_keras() -> None:
    keras: Any = sys.modules["keras"]
    if keras.backend.backend() == "tensorflow":
        SEAMS.install_keras(keras)


def _replicas(layer: Any) -> int:
    """Tell over how many replicas a model that is built later will be spread."""
    return int(getattr(getattr(layer, "distribute_strategy", None), "num_replicas_in_sync", 1))


def _gone(ref: "weakref.ref[Session]") -> None:
    """Put the classes back when the model is gone."""
    session = ref()
    if session is not None and session.tracker.judge.adapter is session:
        # It may be collected at any moment, also while a graph is made.
        with suppress(Exception), tf.init_scope():
            session.tracker.remove()
