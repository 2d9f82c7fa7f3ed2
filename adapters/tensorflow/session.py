"""One tracked target: what runs, what it reads, where its steps end."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from anynan._arrays.summary import Summary
from anynan._diagnosis.evidence import BadParameter, ReplayError
from anynan._diagnosis.lineage import Replay
from anynan._readings.norms import Guard
from anynan._readings.patterns import choose
from anynan._readings.readings import Reading, Rows
from anynan._steps.adapter import BaseAdapter
from anynan.options import Options
from anynan.tensorflow import ending, patches, probes, readings, updates
from anynan.tensorflow.board import boards, read_all, replica
from anynan.tensorflow.frames import (
    Frame,
    State,
    Step,
    here,
    is_loop,
    named_arguments,
    tensors,
)
from anynan.tensorflow.looking import look_again
from anynan.tensorflow.places import Places
from anynan.tensorflow.reach import Reach
from anynan.tensorflow.traces import SCOPE, Block, Spot, Trace
from anynan.tensorflow.variables import Weights

STALE = (
    "a tf.function that was traced before track() runs the tracked layers, and holds no check: "
    "call track() before the function runs for the first time, or make the function anew"
)
NESTED_GRADIENT = (
    "the forward pass ran in a tf.function of its own inside the tape: the gradients of its "
    "weights are read, those of its layers' outputs are not"
)
FULL = (
    "the step was traced so often on several replicas that there is no room for more readings: "
    "the last traces of it are not read"
)
VECTORISED = "GradientTape.jacobian is vectorised: what goes on inside of it is not read"
INSIDE = "runs inside a loop or a branch of the graph: it is read where that ends"


class Session(BaseAdapter):
    """Watch layers for one tracker."""

    backend = "tensorflow"
    with_keras = False

    def __init__(self, layers: dict[str, Any], model: Any, options: Options) -> None:
        super().__init__(options)
        self.paused = False
        self.chosen = choose(layers, options.layers, options.exclude)
        self._known = {path: weakref.ref(layer) for path, layer in layers.items()}
        self._model = weakref.ref(model) if model is not None else None
        self.scaler: Any = None
        self.norms = Guard(options.policy).on
        # What an update did to a weight is judged by the gradient it got.
        self.sizes = self.norms or options.sizes or options.parameters
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.weights = Weights(layers)
        replicas = self.weights.replicas()
        # The gradients of outputs reach those of weights, and a replay finds the layer.
        self.gradients = self.sizes or not options.replay or replicas > 1
        self.traces: weakref.WeakKeyDictionary[Any, Trace] = weakref.WeakKeyDictionary()
        self._state = State()
        self._lock = threading.RLock()
        rows = 3 * len(layers) + 4 * len(self.weights.names) + 16
        self._boards = boards(rows, replicas)
        self.looped: set[str] = set()
        self._functions: weakref.WeakSet[Any] = weakref.WeakSet()
        self._asked: weakref.WeakSet[Any] = weakref.WeakSet()
        self.gated = options.action in ("raise", "skip") or options.patience > 0
        self._optimizers: list[str] = []

    # Life.

    def model(self) -> Any:
        """Give the tracked model, None if there is none or it is gone."""
        return None if self._model is None else self._model()

    def layers(self) -> dict[str, Any]:
        """Give every layer that is still there, by its path."""
        found = {path: ref() for path, ref in self._known.items()}
        return {path: layer for path, layer in found.items() if layer is not None}

    def attach(self) -> None:
        """Change the classes; look at the weights once."""
        if self.with_keras:
            import keras

            patches.install_keras(keras)
        patches.install(self, self.layers())
        self.renew()
        bad = self.bad_parameters()
        if not bad:
            self.tracker.judge.known_clean(self.tracker.step)
            return
        rows = self.tracker.judge.rows()
        worst = bad[0]
        value = self.weights.value(worst.name)
        spot = Spot(
            worst.layer, "parameter", worst.name.rpartition(".")[2], value.dtype.name,
            probes.dtype_max(value.dtype), parameter=worst.name,
        )  # fmt: skip
        try:
            values = readings.exact([value]).numpy()
            self.places([spot]).fill(rows, values, {}, [value], norms=False)
            self.tracker.judge.review(rows)
        finally:
            rows.failed = None

    def detach(self) -> None:
        """Put the classes back; safe to call twice."""
        patches.uninstall(self)
        self.renew()
        state = self.state()
        state.frame, state.step, state.outputs, state.gradients = None, None, [], None

    def batches(self, model: Any, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Leave a model's function as Keras made it."""
        return function

    def predictions(self, model: Any, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Leave a model's function as Keras made it."""
        return function

    def renew(self) -> None:
        """Have the functions of the model traced anew: with the checks, or without them."""

    def watched(self) -> list[str]:
        """List the layers that ought to be read when they run."""
        return [path for path in self.chosen if path and path not in self.looped]

    def set_paused(self, paused: bool) -> None:
        """Stop reading; what was traced goes on writing its rows, and nobody looks."""
        if paused:
            self.read()
        else:
            self.renew()  # what was traced meanwhile holds no checks
        self.paused = paused

    def state(self) -> State:
        """Return this thread's state."""
        return self._state

    # Layers.

    def layer_call(
        self, run: Callable[..., Any], layer: Any, path: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a layer, and read what comes out."""
        state, graph = self.state(), here()
        outer = state.frame
        if self._builds(graph, outer, args, kwargs):
            return run(*args, **kwargs)
        if outer is not None and outer.graph is not graph and is_loop(graph):
            self._inside(path)
            return run(*args, **kwargs)
        fresh = outer is None or outer.graph is not graph
        frame = state.collect(graph) if fresh or outer is None else outer
        if fresh:
            state.frame = frame
            if graph is None and outer is None:
                self._enter_root(state, layer, args, kwargs)
        try:
            if fresh and (path == "" or outer is None):
                self._inputs(frame, layer, args, kwargs)
            if graph is None:
                out = run(*args, **kwargs)
            else:
                with self.trace(graph).inside(graph, layer, path):
                    out = run(*args, **kwargs)
            if path in self.chosen:
                for label, x in tensors(out, "output"):
                    frame.take(x, path, "forward", label)
                    if state.tapes:
                        state.outputs.append((graph, x, path, label))
        finally:
            if fresh:
                state.frame = outer
        if fresh:
            self._flush(frame, backward=False)
        return out

    def _builds(self, graph: Any, outer: Frame | None, args: Any, kwargs: Any) -> bool:
        """Tell whether Keras only finds out shapes, here or in the call that begins."""
        while graph is not None and is_loop(graph):
            graph = graph.outer_graph
        if graph is not None:
            # A function that is traced meanwhile may be called on numbers later.
            return "scratch_graph" in str(getattr(graph, "name", ""))
        if not self.with_keras or outer is not None:
            return False
        from anynan.keras.layers import is_symbolic, symbolic

        return symbolic() or is_symbolic(args, kwargs)

    def _inside(self, path: str) -> None:
        if path not in self.looped:
            self.looped.add(path)
            if path in self.chosen:
                self.tracker.judge.remark(f"{path or 'the model'} {INSIDE}")

    def _inputs(
        self, frame: Frame, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        for name, value in named_arguments(layer, args, kwargs).items():
            for label, x in tensors(value, name):
                frame.take(x, None, "input", label)

    def _enter_root(
        self, state: State, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Open a step where a model is called outside of every graph."""
        if self._over(state):
            self.end_step()
        step = self.step(layer, args, kwargs, updates=False, layer=True)
        if not state.open:
            self.open_step(step)
        elif not state.held and not state.depth:
            state.step = step

    def _flush(self, frame: Frame, *, backward: bool) -> None:
        """Write what a frame collected: into the graph, or have it judged at once."""
        if not frame.spots:
            return
        state = self.state()
        if frame.graph is not None:
            trace = self.trace(frame.graph)
            if state.replaying:
                trace.blocks.append(Block(-1, frame.spots, frame.order, backward))
                return
            with self._lock:
                board = self._boards[replica()]
                block = board.open(frame.spots, frame.order, backward=backward)
            if block is None:
                self.tracker.judge.say(FULL)
                return
            if not replica():
                trace.blocks.append(block)
            with tf.name_scope(SCOPE):
                frame.rows = self.look(frame.tensors, xla=frame.xla)
                board.write(block, frame.rows)
            return
        if state.replaying:
            return
        places = self.places(frame.spots)
        self.judge(places, readings.exact(frame.tensors).numpy(), frame.tensors)
        if not backward and not state.tapes and not state.depth and not state.held:
            self.end_step()

    def look(self, tensors: list[Any], *, xla: bool) -> Any:
        """Read tensors in a graph; under XLA how large they are only where that is asked for."""
        if xla and not self.sizes:
            return readings.scaled(tensors, self._boards[0].scale())
        return readings.exact(tensors, xla=xla)

    def _over(self, state: State) -> bool:
        """Tell whether a call that begins now belongs to a step of its own."""
        ended = state.backward or not state.tapes
        return state.open and ended and not state.depth and not state.held

    def trace(self, graph: Any) -> Trace:
        """Give what is known of a graph."""
        found = self.traces.get(graph)
        if found is None:
            found = self.traces[graph] = Trace()
        return found

    # Gradients.

    def gradient(
        self, run: Callable[..., Any], target: Any, sources: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Ask for the gradients of the layers' outputs too, and read all of them."""
        state, graph = self.state(), here()
        flat = tf.nest.flatten(sources)
        mine = [(i, name) for i, x in enumerate(flat) if (name := self.weights.name(x))]
        if not mine or not self.options.backward:
            return run(target, sources, *args, **kwargs)
        if state.vectorised:
            self.tracker.judge.say(VECTORISED)
            return run(target, sources, *args, **kwargs)
        held = [item for item in state.outputs if item[0] is graph]
        if not held and state.outputs:
            self.tracker.judge.remark(NESTED_GRADIENT)
        found = run(target, [flat, [item[1] for item in held]], *args, **kwargs)
        grads, of_outputs = found
        frame = state.collect(graph)
        for label, x in tensors(target, "loss"):
            if x.dtype != tf.float16 or self.scaler is None:
                frame.take(x, None, "loss", label)
        for (_, _, path, label), grad in zip(reversed(held), reversed(of_outputs), strict=True):
            for _, x in tensors(grad, ""):
                name = f"grad of {label}" if label != "output" else "grad"
                frame.take(x, path, "backward", name, read=graph is None or self.gradients)
        for i, name in reversed(mine):  # in the order in which they are made
            for _, x in tensors(grads[i], ""):
                frame.take(
                    x, self.weights.layer(name), "backward",
                    f"grad of {name.rpartition('.')[2]}", name,
                )  # fmt: skip
        if graph is None:
            state.backward = True
            state.incoming = [
                grad for item, grad in zip(held, of_outputs, strict=True) if item[2] == ""
            ]
        self._flush(frame, backward=True)
        state.gradients = None if graph is None else frame
        return tf.nest.pack_sequence_as(sources, grads)

    # Compiled functions.

    def function_call(self, run: Callable[..., Any], fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a compiled function from outside, and read what it wrote."""
        state = self.state()
        if state.replaying:
            return run(*args, **kwargs)
        known = fn in self._functions
        kept = self.keep() if known or fn not in self._asked else []
        for board in self._boards:
            board.ready()
        count = fn.experimental_get_tracing_count()
        out = self.compiling(run, fn, *args, **kwargs)
        state.gradients = None
        if not state.tapes:
            state.outputs = []
        written = read_all(self._boards)
        if not written:
            self._ask(fn, count, args, kwargs)
            return out
        self._functions.add(fn)
        forward_only = not any(block.backward for block, _ in written)
        if self._over(state):
            self.end_step()
        if not state.open:
            self.open_step(Step(fn, args, kwargs, kept))
        elif not state.depth and not state.held:
            state.step = Step(fn, args, kwargs, kept)
        state.backward = state.backward or not forward_only
        state.updated = state.updated or any(updates.writes(self, block) for block, _ in written)
        self._judge_all(written)
        if not (forward_only and state.tapes) and not state.depth and not state.held:
            self.end_step()
        return out

    def compiling(self, run: Callable[..., Any], fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a compiled function, and know meanwhile whether XLA compiles what is traced."""
        state = self.state()
        before, state.xla = state.xla, state.xla or bool(getattr(fn, "_jit_compile", False))
        try:
            return run(*args, **kwargs)
        finally:
            state.xla = before

    def _ask(self, fn: Any, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find out, once, whether a function without checks ran the tracked weights."""
        if fn in self._asked or not count:
            return
        self._asked.add(fn)
        try:
            graph = fn.get_concrete_function(*args, **kwargs).graph
        except Exception:  # noqa: BLE001  what cannot be asked is not ours
            return
        if any(self.weights.name(v) for v in graph.variables):
            self.tracker.judge.say(STALE)

    # Steps.

    def open_step(self, step: Step | None) -> Rows:
        """Open this thread's step."""
        state = self.state()
        state.open, state.backward, state.step, state.incoming = True, False, step, None
        state.updated = False
        state.seen.clear()
        return self.tracker.judge.rows()

    def keep(self, *, updates: bool = True) -> list[tuple[Any, Any]]:
        """Hold what a replay needs of before the step: the buffers, or what an update changes."""
        every = self.options.level == "operation"
        dropped = self.gated and len(self._boards) == 1  # replicas update all the same
        return self.weights.keep(all_of_them=every or (updates and not dropped))

    def step(
        self, fn: Any, args: Any, kwargs: Any, *, updates: bool = True, layer: bool = False
    ) -> Step:
        """Hold what a replay needs of a step that begins."""
        kept, reach = self.keep(updates=updates), None
        if self.options.replay and not hasattr(fn, "get_concrete_function"):
            python = getattr(fn, "call", fn) if layer else fn
            given = (*args, *kwargs.values())
            reach = Reach(python, given, self.layers().values(), self.weights.name)
            kept += reach.variables
        return Step(fn, args, kwargs, kept, layer=layer, reach=reach)

    def end_step(self) -> None:
        """Close this thread's step."""
        ending.end_step(self)

    def places(self, spots: list[Spot]) -> Places:
        """Find what the core knows spots by."""
        return Places.of(spots, self.tracker.judge.monitor)

    def _judge_all(self, written: list[tuple[Block, Any]]) -> None:
        for block, values in written:
            if block.places is None:
                block.places = self.places(block.spots)
            if not block.backward and not self.sizes:
                look_again(self, block, values)
            self.judge(block.places, values, last=block is written[-1][0])

    def judge(
        self, places: Places, values: Any, arrays: list[Any] | None = None, *, last: bool = True
    ) -> None:
        """Append these readings to the open step; after the last of them have it judged."""
        rows = self.tracker.judge.rows()
        places.fill(rows, values, self.state().seen, arrays, norms=self.norms)
        if not last:
            return
        try:
            self.tracker.judge.review(rows)
        except BaseException:
            if not self.state().depth and not self.state().held:
                with self.tracker.judge.softly():
                    self.end_step()
            raise

    def read(self) -> None:
        """Read and judge what was written and not read."""
        written = read_all(self._boards)
        self._judge_all(written)

    def finish(self) -> None:
        """End the open step."""
        self.read()
        if self.tracker.judge.rows().lo:
            self.end_step()

    def apply(self, run: Callable[..., Any], optimizer: Any, grads: Any, known: Any = None) -> Any:
        """Update the weights, unless the gradients are bad and that is not wanted."""
        return updates.apply(self, run, optimizer, grads, known)

    # What the core asks for.

    def replay(self, reading: Reading) -> Replay:
        """Run the failing step again, operation by operation."""
        from anynan.tensorflow.replay import replay

        step = self.state().step
        if step is None:
            msg = "this step is over, so it cannot be run again: the report stays at layer level"
            raise ReplayError(msg)
        return replay(self, step)

    def measure(self, value: Any) -> Summary:
        """Summarise a tensor."""
        return probes.measure(value)

    def bad_parameters(self) -> list[BadParameter]:
        """List the weights and buffers that are bad now."""
        return ending.bad_parameters(self)

    def bad_rows(self, value: Any) -> tuple[int, ...]:
        """List the rows of a batch that hold bad values."""
        return probes.bad_rows(value)

    def loss_scale(self) -> float | None:
        """Give the loss scale in force."""
        scaler = None if self.scaler is None else self.scaler()
        if scaler is None or not scaler.built:
            return None
        return float(np.asarray(scaler.dynamic_scale))

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one step of a tracked function, read it and judge it."""
        state = self.state()
        if state.depth or tf.inside_function():
            return fn(*args, **kwargs)
        self.open_step(self.step(fn, args, kwargs))
        state.depth += 1
        try:
            out = fn(*args, **kwargs)
            frame = Frame(None)
            for label, x in tensors(out, "result"):
                frame.take(x, None, "loss", "loss" if label == "result" else label)
            self._flush(frame, backward=False)
        finally:
            state.depth -= 1
            with self.tracker.judge.softly(on=False):
                self.end_step()
        return out
