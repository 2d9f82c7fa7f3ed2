"""What runs while it is watched: layers, gradients, compiled functions."""

from collections.abc import Callable
from itertools import compress
from typing import Any

import numpy as np
import tensorflow as tf

from anynan._base.context import but
from anynan._base.identity import SetByIdentity
from anynan._steps import producers
from anynan._steps.messages import INSIDE_LOOP
from anynan.tensorflow.messages import JACOBIAN, NESTED_GRADIENT, STALE_GRAPH
from anynan.tensorflow.read import readings
from anynan.tensorflow.read.buffers import Block
from anynan.tensorflow.read.frames import Frame, graph_of, here, is_loop, named_arguments, tensors
from anynan.tensorflow.read.probes import checkable, is_float
from anynan.tensorflow.replay import taped
from anynan.tensorflow.replay.steps import Held, Part, Step
from anynan.tensorflow.replay.taped import Differentiated
from anynan.tensorflow.session.steps import Steps
from anynan.tensorflow.session.targets import is_keras
from anynan.tensorflow.session.updates import Updates


class Calls(Part):
    """Read what leaves layers, gradients and compiled functions.

    Args:
        held: What all parts of a session work on.
        steps: Begins and ends steps.
        updates: Knows the loss scaler.
        grow: Takes up layers and weights that came since.
        takes: Tells whether a variable may be a weight.
    """

    def __init__(
        self, held: Held, steps: Steps, updates: Updates, grow: Callable[..., None],
        takes: Callable[[Any], bool],
    ) -> None:  # fmt: skip
        super().__init__(held)
        self._steps, self._updates = steps, updates
        self._grow, self._takes = grow, takes
        self._ends = self._options.level == "step"
        # Functions that hold checks, and those that were asked for tracked weights.
        self._known: SetByIdentity[Any] = SetByIdentity()
        self._asked: SetByIdentity[Any] = SetByIdentity()
        # What nobody had called when it was tracked.
        self.fresh: SetByIdentity[Any] = SetByIdentity()

    # Layers.

    def layer(
        self, run: Callable[..., Any], layer: Any, path: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a layer, and read what comes out."""
        state, graph = self._state, here()
        outer = state.frame
        state.building = state.building or not getattr(layer, "built", True)
        if self._builds(layer, graph, outer, args, kwargs):
            return run(*args, **kwargs)
        if outer is not None and outer.graph is not graph and is_loop(graph):
            self._inside(path)
            return run(*args, **kwargs)
        fresh = outer is None or outer.graph is not graph
        frame = state.collect(graph) if fresh or outer is None else outer
        if fresh:
            state.frame = frame
            if graph is None and outer is None:
                self._enter_root(layer, path, args, kwargs)
        try:
            if fresh and (path == "" or outer is None):
                self.inputs(frame, layer, args, kwargs)
            if graph is None:
                out = run(*args, **kwargs)
            else:
                with self._traces.of(graph).inside(graph, layer, path):
                    out = run(*args, **kwargs)
            if path in self._layers.chosen:
                self._take_outputs(frame, out, path, read=outer is None or not self._ends)
        except BaseException as error:
            if fresh and graph is None and not state.replaying:
                state.broken = frame
                if outer is None and not state.depth and not state.held:
                    self.broken(error, raising=False)
            raise
        finally:
            if fresh:
                state.frame = outer
        if fresh:
            self._is_through(frame, trails=outer is None and graph is None)
        return out

    def _take_outputs(self, frame: Frame, out: Any, path: str, *, read: bool) -> None:
        """Have a layer's outputs read, and their gradients where a tape runs."""
        for label, x in tensors(out, "output"):
            frame.take(x, path, "forward", label, read=read)
            if self._state.tapes and read:
                self._state.outputs.append((frame.graph, x, path, label))

    def _is_through(self, frame: Frame, *, trails: bool) -> None:
        """Read what the outermost layer of a frame has left in it."""
        state = self._state
        if state.building:
            state.building = False
            self._grow()
        self.flush(frame, backward=False)
        if trails:
            self.trail(afresh=False)

    def trail(self, *, afresh: bool = True) -> None:
        """Note what follows, where that is no step's."""
        if self._trails():
            taped.trail(afresh=afresh)

    def _trails(self) -> bool:
        """Tell whether what runs now belongs to no step: what follows a call is noted."""
        state = self._state
        within = state.tapes or state.depth or state.held or state.replaying
        return self._layers.model() is None and not within and not tf.inside_function()

    def _builds(self, layer: Any, graph: Any, outer: Frame | None, args: Any, kwargs: Any) -> bool:
        """Tell whether Keras only finds out shapes, here or in the call that begins."""
        while graph is not None and is_loop(graph):
            graph = graph.outer_graph
        if graph is not None:
            # A function that is traced meanwhile may be called on numbers later.
            return "scratch_graph" in str(getattr(graph, "name", ""))
        if outer is not None or not is_keras(layer):
            return False
        from anynan.keras.layers import is_symbolic, symbolic

        return symbolic() or is_symbolic(args, kwargs)

    def _inside(self, path: str) -> None:
        if path not in self._layers.looped:
            self._layers.looped.add(path)
            if path in self._layers.chosen:
                self._tracker.judge.remark(INSIDE_LOOP(layer=path or "the model"))

    def inputs(
        self, frame: Frame, called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Read what a model or a function is called with; variables are no data."""
        for name, value in named_arguments(called, args, kwargs).items():
            for label, x in tensors(value, name):
                if not isinstance(x, tf.Variable):
                    frame.take(x, None, "input", label)

    def _enter_root(
        self, layer: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Open a step where a model is called outside of every graph."""
        state = self._state
        if state.open and (state.depth or state.held):  # a part of a step that is more
            state.roots.append((layer, path, args, kwargs))
            return
        if self._steps.over():
            self._steps.end()
        self._steps.follow(self._steps.of(layer, args, kwargs, updates=False, layer=True))

    @taped.off()
    def flush(self, frame: Frame, *, backward: bool) -> None:
        """Write what a frame collected: into the graph, or have it judged at once."""
        if not frame.points:
            return
        state = self._state
        if frame.graph is not None:
            self._steps.write(frame, backward=backward)
            return
        if state.replaying:
            return
        if state.arguments is not None:  # one read for both
            waiting, state.arguments = state.arguments, None
            frame.points[:0], frame.tensors[:0] = waiting.points, waiting.tensors
        places = self._steps.places(frame.points)
        self._steps.judge(places, readings.exact(frame.tensors).numpy(), frame.tensors)
        if not backward and not state.tapes and not state.depth and not state.held:
            self._steps.end()

    # What Keras evaluates: no gradient is asked of its loss.

    def compute_loss(self, run: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """Read the loss that Keras computes of a batch."""
        out = run(*args, **kwargs)
        self._state.has_loss = True
        self._read_loss(model, out)
        return out

    def test_step(self, run: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """Read the loss that a step of the program's own gives, if Keras computed none."""
        self._state.has_loss = False
        out = run(*args, **kwargs)
        if not self._state.has_loss and isinstance(out, dict):
            self._read_loss(model, out.get("loss"))
        return out

    def _read_loss(self, model: Any, loss: Any) -> None:
        if model is self._layers.model() and not self._state.tapes:
            self._take_loss(here(), loss)

    def _take_loss(self, graph: Any, loss: Any) -> None:
        frame = self._state.collect(graph)
        for label, x in tensors(loss, "loss"):
            frame.take(x, None, "loss", label)
        self.flush(frame, backward=False)

    def metric(
        self, run: Callable[..., Any], metric: Any, values: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Read what a metric adds up where no gradient is asked for: the loss of a test."""
        out = self.eager_metric(run, metric, values, *args, **kwargs)
        if self._unasked(here()):
            self._take_loss(here(), values)
        return out

    def _unasked(self, graph: Any) -> bool:
        """Tell whether a graph is no model's, and nobody asked for a gradient in it."""
        state = self._state
        asked = state.tapes or (state.gradients is not None and state.gradients.graph is graph)
        if graph is None or asked or self._layers.model() is not None:
            return False
        return not self._builds(None, graph, None, (), {})

    def sample(self, run: Callable[..., Any], logits: Any, *args: Any, **kwargs: Any) -> Any:
        """Read what is drawn by after a model: what is drawn hides it. A -Inf may be meant."""
        out, graph = run(*args, **kwargs), here()  # first: a seed may count operations
        if checkable(logits) and self._unasked(graph) and self._traces.of(graph).blocks:
            self._take_loss(graph, tf.where(logits == -np.inf, tf.zeros_like(logits), logits))
        return out

    def eager_metric(self, run: Callable[..., Any], _: Any, *args: Any, **kwargs: Any) -> Any:
        """Read what a metric takes outside of graphs, where it was made after a model ran."""
        if here() is None and self._trails():
            self._trailed((args, kwargs))
        with taped.off():
            return run(*args, **kwargs)

    def taken_out(self, run: Callable[[], Any], x: Any) -> Any:
        """Judge what the program takes out of what followed: many may be bad in part on purpose."""
        out, record = run(), taped.running()
        if record is None or not record.on or not is_float(x) or here() is not None:
            return out
        if not np.isfinite(out).any() and self._trails() and not _is_shown():
            self._trailed(x)
        return out

    def _trailed(self, values: Any) -> None:
        """Judge what followed a call of a model, where a metric takes something bad."""
        record = taped.running()
        notes = () if record is None else record.all()
        made = {id(x) for note in notes for x in note.outputs}
        frame = Frame(None)
        for _, x in tensors(values, "loss"):
            if id(x) in made and not any(x is loss for loss in self._state.losses):
                frame.take(x, None, "loss", "loss")
        with taped.off():
            self._steps.judge_trail(*_told(frame))

    # Gradients.

    def jacobian(self, run: Callable[..., Any], _: Any, *args: Any, **kwargs: Any) -> Any:
        """Ask for a jacobian, inside of which gradients are vectorised."""
        with but(self._state, vectorised=True):
            return run(*args, **kwargs)

    def gradient(
        self, run: Callable[..., Any], _: Any, target: Any, sources: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Ask for the gradients of the layers' outputs too, and read all of them."""
        state = self._state
        flat = tf.nest.flatten(sources)
        new = [x for x in flat if self._layers.weights.misses(x) and self._takes(x)]
        if new:
            self._grow(sources=new)
        mine = [(i, name) for i, x in enumerate(flat) if (name := self._layers.weights.name(x))]
        # What is optimized may be data: an image, an attack's perturbation.
        alone = here() is None and not (state.tapes or state.depth or state.held or state.replaying)
        if not (mine or (alone and not state.vectorised)) or not self._options.backward:
            return run(target, sources, *args, **kwargs)
        if state.vectorised:
            self._tracker.judge.say(JACOBIAN())
            return run(target, sources, *args, **kwargs)
        with taped.off():  # what makes it is nothing that ran under the tape
            grads = self._gradients(run, target, flat, mine, *args, **kwargs)
        return tf.nest.pack_sequence_as(sources, grads)

    def _gradients(
        self, run: Callable[..., Any], target: Any, flat: list[Any], mine: list[tuple[int, str]],
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Ask for the gradients of a list, among which are those of weights of these names."""
        state, graph = self._state, here()
        held = [item for item in state.outputs if item[0] is graph]
        if not held and state.outputs:
            self._tracker.judge.remark(NESTED_GRADIENT())
        found = run(target, [flat, [item[1] for item in held]], *args, **kwargs)
        grads, of_outputs = found
        frame = state.collect(graph)
        self._take_gradients(frame, target, list(zip(held, of_outputs, strict=True)),
                             [(name, grads[i]) for i, name in mine])  # fmt: skip
        data = [] if mine else [(x, g) for x, g in zip(flat, grads, strict=True) if g is not None]
        for _, x in tensors([g for _, g in data], ""):
            frame.take(x, None, "backward", "gradient")
        if graph is None:
            self._under_tape(target, *args, sources=[x for x, _ in data], **kwargs)
            state.backward = True
            pairs = zip(held, of_outputs, strict=True)
            state.incoming = [grad for item, grad in pairs if item[2] == ""]
        self.flush(frame, backward=True)
        if data and (step := self._tracker.judge.rows()).failed is not None:
            for _, x in data:  # what it is made into is no bad batch
                producers.note(self._tracker, step.number, None, own=True, value=x)
        if state.gradients is not None and state.gradients.graph is graph:
            frame.before = state.gradients
        state.gradients = None if graph is None else frame
        if graph is None:
            state.slopes = [x for _, x in tensors(grads, "")]
            state.losses = [x for _, x in tensors(target, "")]
            if not (state.depth or state.held or state.replaying):
                taped.trail(afresh=True)
        return grads

    def _take_gradients(
        self, frame: Frame, target: Any, outputs: list[Any], weights: list[tuple[str, Any]]
    ) -> None:
        """Have a loss and the gradients read, in the order in which they are made.

        Args:
            frame: Where they are computed.
            target: The loss.
            outputs: Of the layers, with their gradients.
            weights: The weights' names, with their gradients.
        """
        eager = frame.graph is None
        for label, x in tensors(target, "loss"):
            if x.dtype != tf.float16 or self._updates.scaler is None:
                frame.take(x, None, "loss", label)
        for (_, _, path, label), grad in reversed(outputs):
            for _, x in tensors(grad, ""):
                name = f"grad of {label}" if label != "output" else "grad"
                frame.take(x, path, "backward", name, read=eager or self._held.inner)
        for name, grad in reversed(weights):
            if not eager and isinstance(grad, tf.IndexedSlices):
                self._traces.of(frame.graph).sparse.add(name)
            layer, label = self._layers.weights.layer(name), name.rpartition(".")[2]
            for _, x in tensors(grad, ""):
                frame.take(x, layer, "backward", f"grad of {label}", name)

    def _under_tape(
        self,
        target: Any,
        output_gradients: Any = None,
        *args: Any,
        sources: Any = (),
        **kwargs: Any,
    ) -> None:
        """Have what ran under the tape be what is run again, where no step's own code is."""
        state, record = self._state, taped.newest()
        if state.depth or state.held or state.replaying or record is None:
            return
        self._steps.follow_tape()
        if state.step is not None:
            tensor = lambda x: None if x is None else tf.convert_to_tensor(x)  # noqa: E731
            begins = tf.nest.map_structure(tensor, output_gradients)
            state.step.taped = Differentiated(record.all(), target, begins, tuple(sources))

    # Compiled functions.

    def function(self, run: Callable[..., Any], fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a compiled function from outside, and read what it wrote."""
        state = self._state
        if state.replaying:
            return run(*args, **kwargs)
        self._steps.wrote()
        if not (fn.experimental_get_tracing_count() or self._layers.whole()):
            # Tracing makes the weights: what they hold before the first update is wanted.
            self.compiling(lambda *args, **kwargs: graph_of(fn, args, kwargs), fn, *args, **kwargs)
        known = fn in self._known
        kept = self._steps.keep() if known or fn not in self._asked else []
        self._steps.look()
        count = fn.experimental_get_tracing_count()
        try:
            out = self.compiling(run, fn, *args, **kwargs)
        except tf.errors.OpError as error:  # another is of the tracing: nothing ran
            if not state.depth and self._holds(fn, args, kwargs):
                self._follow(Step(fn, args, kwargs, kept + state.grown))
                if not state.held and state.frame is None:
                    self.broken(error)
            raise
        state.gradients = None
        if not state.tapes:
            state.outputs = []
        written = self._buffers.read()
        if not written:
            self._ask(fn, count, args, kwargs)
            return out
        self._known.add(fn)
        # It may only update weights: of the step before it, or between two steps.
        updates = _updates(written)
        goes_on = updates is not None and state.open
        if updates and not goes_on:
            return out
        forward_only = not any(block.backward for block, _ in written)
        follow = self._steps.follow if goes_on else self._follow
        follow(Step(fn, args, kwargs, kept + state.grown))
        state.backward = state.backward or not forward_only
        weights = self._layers.weights.trainable
        state.updated = state.updated or any(
            self._traces.writes(block, weights) for block, _ in written
        )
        self._steps.judge_all(written)
        inside = state.depth or state.held or state.frame is not None
        if not (forward_only and state.tapes) and not inside and not goes_on:
            self.given(out, forward_only=forward_only)
            self._steps.end()
            self.trail()
        return out

    def given(self, out: Any, *, forward_only: bool) -> None:
        """Read what a function of the program's gives: numbers, and the arrays of a test."""
        step, keras_own = self._state.step, self._state.fits or self._state.held
        if self._layers.model() is not None and (keras_own or not forward_only):
            return
        if step is None or self._tracker.judge.rows().failed is not None:
            return
        step.gives = True
        frame = Frame(None)
        for label, x in tensors(out, "result"):
            if forward_only or x.shape.rank == 0:
                frame.take(x, None, "loss", "loss" if label == "result" else label)
        with taped.off():
            frame, rows = _told(frame, every=True)
        if frame.points:
            self._steps.judge(self._steps.places(frame.points), rows, frame.tensors)

    def _follow(self, step: Step) -> None:
        """Open the step of a compiled function, or go on with the one that it is in."""
        # A layer that is called may be a compiled function itself.
        if self._state.frame is None and self._steps.over():
            self._steps.end()
        self._steps.follow(step)

    def _holds(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether a compiled function that failed runs what is watched."""
        if fn in self._known:
            return True
        graph = graph_of(fn, args, kwargs)
        if graph is None:  # it was not traced to its end
            return False
        trace = self._traces.of(graph)
        named = any(self._layers.weights.name(v) for v in graph.variables)
        return bool(named or trace.blocks or trace.scopes)

    def broken(self, error: BaseException, *, raising: bool = True) -> None:
        """End a step that an exception ended: judge what it read, and what it took last.

        Args:
            error: The exception.
            raising: Whether an error may be raised from it, as the action says.

        Raises:
            AnomalyError: Of what was found, if so.
        """
        state, judge = self._state, self._tracker.judge
        frame, state.broken = state.broken, None
        step = state.step
        with judge.carried_by(error, judge.rows(), raising=raising):
            try:
                if step is not None:
                    step.ended = error
                if frame is not None:
                    self.flush(frame, backward=True)
                self._steps.judge_all(self._buffers.read())
                if step is not None:
                    judge.raised(judge.rows(), error, lambda: self._steps.up_to(step, error))
            finally:
                self._steps.end()

    def compiling(self, run: Callable[..., Any], fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a compiled function, and know meanwhile whether XLA compiles what is traced."""
        with but(self._state, xla=self._state.xla or bool(getattr(fn, "_jit_compile", False))):
            return run(*args, **kwargs)

    def reads(self, fn: Any) -> None:
        """Know that what a compiled function takes and gives is read around it."""
        if not fn.experimental_get_tracing_count():
            self._asked.add(fn)

    def _ask(self, fn: Any, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find out, once, whether a function without checks ran the tracked weights.

        Nobody called ``track`` for what was found: its weights are known from their gradients on.
        """
        known = fn in self._asked or fn in self.fresh
        if known or not count or self._tracker.judge.subject.found:
            return
        self._asked.add(fn)
        graph = graph_of(fn, args, kwargs)
        if graph is not None and any(map(self._layers.weights.name, graph.variables)):
            self._tracker.judge.say(STALE_GRAPH())


def _is_shown() -> bool:
    """Tell whether Keras itself takes a value, to show it or to write it down."""
    files = (code.co_filename for code, _ in taped.frames())
    return any(file.endswith(("trainer.py", "training.py")) for file in files)


def _updates(written: list[tuple[Block, Any]]) -> bool | None:
    """Tell whether all is well of what weights were updated with, None if more was read."""
    if any(point.phase != "optimizer" for block, _ in written for point in block.points):
        return None
    return all(np.isfinite(rows).all() for _, rows in written)


def _told(frame: Frame, *, every: bool = False) -> tuple[Frame, Any]:
    """Read what a test gives, and keep the numbers, and the arrays that hold a NaN.

    An Inf in an array may be meant, as that of a mask, unless nothing in it is finite.

    Args:
        frame: What is read.
        every: Whether to keep the numbers that are finite, too.

    Returns:
        What is kept, and a row for each.
    """
    left = Frame(None)
    if not frame.points:
        return left, None
    rows = readings.exact(frame.tensors).numpy()
    numbers = [x.shape.rank == 0 for x in frame.tensors]
    lost = [not np.isfinite(row).all() for row in rows]
    whole = [bad and not np.isfinite(x).any() for bad, x in zip(lost, frame.tensors, strict=True)]
    asked = np.array(numbers) & (every | np.array(lost))
    kept = np.isnan(rows[:, 2]) | asked | np.array(whole)
    left.points += compress(frame.points, kept)
    left.tensors += compress(frame.tensors, kept)
    return left, rows[kept]
