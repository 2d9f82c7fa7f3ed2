"""Where steps begin and end, and what is judged in them."""

import threading
from typing import Any

import numpy as np
import tensorflow as tf

from anynan._base.context import but
from anynan._diagnosis.agreement import divergence
from anynan._diagnosis.evidence import ReplayError
from anynan._diagnosis.lineage import Replay
from anynan._readings import step as core
from anynan._readings.moves import due, moved, stride
from anynan._readings.readings import ProbePoint
from anynan.errors import AnomalyError
from anynan.tensorflow.messages import REPLICAS_FULL
from anynan.tensorflow.read import readings
from anynan.tensorflow.read.buffers import Block
from anynan.tensorflow.read.frames import Frame
from anynan.tensorflow.read.places import Places
from anynan.tensorflow.read.weights import Weights, read
from anynan.tensorflow.replay import taped
from anynan.tensorflow.replay.reached import Reached
from anynan.tensorflow.replay.replay import Replays
from anynan.tensorflow.replay.steps import Held, Part, Step
from anynan.tensorflow.replay.taped import Differentiated


class Moves(threading.local):
    """Keep samples of the weights from the beginning of a step to its end.

    Args:
        every: One step in so many is looked at; None for none.
        weights: The weights.
    """

    def __init__(self, every: int | None, weights: Weights) -> None:
        self._every, self._weights = every, weights
        self._step = -1
        self._kept: list[tuple[str, Any, Any]] = []

    def before(self, step: int) -> None:
        """Keep the weights as they are, if it is this step's turn."""
        if not due(self._every, step) or step == self._step:
            return
        self._step = step
        self._kept = [(layer, one, _sample(one)) for layer, one in self._weights.floats()]

    def after(self, rows: core.Step, *, trained: bool) -> None:
        """Write how far they have moved into the step's rows."""
        kept, self._kept = self._kept, []
        if not kept or not trained or rows.number != self._step or rows.failed is not None:
            return
        pairs = []
        for _, one, old in kept:
            start, end = _wide(old), _wide(_sample(one))
            pairs.append(tf.cast(tf.stack([tf.norm(end - start), tf.norm(start)]), tf.float64))
        moved(
            rows, [(layer, one.shape) for layer, one, _ in kept], tf.stack(pairs).numpy().tolist()
        )


def _sample(variable: Any) -> Any:
    return tf.reshape(read(variable), [-1])[:: stride(variable.shape)]


def _wide(x: Any) -> Any:
    return x if x.dtype == tf.float64 else tf.cast(x, tf.float32)


class Steps(Part):
    """Open and end this thread's steps, and have their readings judged.

    Args:
        held: What all parts of a session work on.
        replays: Runs steps again.
    """

    def __init__(self, held: Held, replays: Replays) -> None:
        super().__init__(held)
        self._replays, self._reached = replays, Reached(held.layers)
        self._moves = Moves(self._options.updates, held.layers.weights)

    # Beginnings.

    def open(self, step: Step) -> None:
        """Open this thread's step."""
        self.wrote()
        state = self._state
        state.open, state.backward, state.step, state.incoming = True, False, step, None
        state.updated, state.broken, state.roots = False, None, []
        state.seen.clear()
        self._moves.before(self._tracker.judge.rows().number)

    def follow(self, step: Step) -> None:
        """Open a step, or go on with the one that is open."""
        state = self._state
        if not state.open:
            self.open(step)
        elif not state.depth and not state.held:
            state.step = step

    def follow_tape(self) -> None:
        """Open a step for a gradient, if none is open: no layer was called."""
        if not self._state.open:
            self.open(Step(None, (), {}, self.keep()))

    def end_trained(self) -> None:
        """End a step that took gradients: a tape that opens begins another."""
        self.wrote()
        if self._state.backward and self.over():
            self.end()

    def look(self) -> None:
        """Keep what an update moves, for a step that is opened once it has run."""
        if not self._state.open or self.over():
            self._moves.before(self._tracker.judge.rows().number + self.over())

    def over(self) -> bool:
        """Tell whether a call that begins now belongs to a step of its own."""
        state = self._state
        ended = state.backward or not state.tapes
        return state.open and ended and not state.depth and not state.held

    def keep(self, *, updates: bool = True) -> list[tuple[Any, Any]]:
        """Hold what a replay needs of before the step: the buffers, or what an update changes."""
        every = self._options.level == "operation"
        return self._layers.weights.keep(all_of_them=every or (updates and not self._held.dropped))

    def keep_new(self, variables: list[Any]) -> None:
        """Hold what variables that came in this step began with, unless only buffers are held."""
        state = self._state
        if self._held.dropped or state.replaying:
            return
        for variable in variables:
            try:
                with tf.init_scope():
                    held = variable, read(variable)
            except (ValueError, tf.errors.OpError):  # it holds nothing yet
                continue
            if not held[1].shape.is_compatible_with(variable.shape):  # nor does it yet
                continue
            state.grown.append(held)
            if state.step is not None:
                state.step.kept.append(held)

    def of(
        self, fn: Any, args: Any, kwargs: Any, *, updates: bool = True, layer: bool = False
    ) -> Step:
        """Hold what a replay needs of a step that begins."""
        kept, began = self.keep(updates=updates), None
        if self._options.replay and not hasattr(fn, "get_concrete_function"):
            began = self._reached.begin(fn, args, kwargs)
            kept += began.variables
        return Step(fn, args, kwargs, kept, layer=layer, began=began)

    def inner(self, layer: str | None) -> Step | None:
        """Hold what a second run needs of the one call of the model that a layer ran in."""
        state = self._state
        mine = [
            root for root in state.roots if layer is not None and f"{layer}.".startswith(_of(root))
        ]
        if state.step is None or len(mine) != 1:
            return None
        ((model, _, args, kwargs),) = mine
        began = self._reached.begin(model, args, kwargs)
        return Step(model, args, kwargs, state.step.kept, layer=True, began=began)

    # Readings.

    def write(self, frame: Frame, *, backward: bool) -> None:
        """Write what a frame collected into its graph."""
        if not frame.points:
            return
        trace = self._traces.of(frame.graph)
        if self._state.replaying:
            trace.blocks.append(Block(-1, frame.points, frame.order, backward))
            return
        block = self._buffers.write(frame, backward=backward)
        if block is None:
            self._tracker.judge.say(REPLICAS_FULL())
        else:
            trace.blocks.append(block)

    def rows(self) -> core.Step:
        """Give this thread's open step."""
        return self._tracker.judge.rows()

    def places(self, points: list[ProbePoint]) -> Places:
        """Find what the core knows points by."""
        return Places.of(points, self._tracker.judge.monitor)

    def judge_all(self, written: list[tuple[Block, Any]]) -> None:
        """Append what graphs wrote to the open step, and have it judged."""
        for block, values in written:
            if block.places is None:
                block.places = self.places(block.points)
            if not block.backward and not self._held.sizes and self._options.replay:
                self._replays.look_again(block, values)
            self.judge(block.places, values, last=block is written[-1][0])

    def judge(
        self, places: Places, values: Any, arrays: list[Any] | None = None, *, last: bool = True
    ) -> None:
        """Append these readings to the open step; after the last of them have it judged."""
        rows, state = self._tracker.judge.rows(), self._state
        places.fill(rows, values, state.seen, arrays, norms=self._held.norms)
        if not last:
            return
        try:
            self._tracker.judge.review(rows)
        except BaseException:
            if not state.depth and not state.held:
                with self._tracker.judge.softly():
                    self.end()
            raise

    @taped.off()
    def taken(self) -> None:
        """Judge what weights were updated with since the gradients, where that is another."""
        state, frame = self._state, self._state.taken
        state.taken, state.slopes = Frame(None), []
        record = taped.running()
        if not frame.points or self._tracker.judge.rows().failed is not None:
            return
        alone = state.step is not None and not (state.depth or state.held)
        if alone and state.step is not None and record is not None:
            state.step.taped = _trail_of(record, frame)
        values = readings.exact(frame.tensors).numpy()
        self.judge(self.places(frame.points), values, frame.tensors)

    @taped.off()
    def wrote(self) -> None:
        """Judge what weights were written with by hand, between two steps."""
        state, frame = self._state, self._state.taken
        if state.open or not frame.points:
            return
        state.taken = Frame(None)
        values = readings.exact(frame.tensors).numpy()
        if not np.isfinite(values).all():
            self.judge_trail(frame, values)

    def judge_trail(self, frame: Frame, values: Any) -> None:
        """Judge what followed the last step, if that is anything, as a step of its own."""
        record = taped.running()
        if not frame.points:
            return
        if self._state.open:  # what a gradient began, and an update by hand went on with
            self.end()
        if isinstance(record, taped.Trail):
            taped.end()
        again = None if record is None else _trail_of(record, frame)
        self.follow(Step(None, (), {}, taped=again))
        self.judge(self.places(frame.points), values, frame.tensors)
        self.end()

    # Ends.

    def up_to(self, step: Step, error: BaseException) -> Replay | None:
        """Run a step again up to the exception that ended it."""
        return self._replays.up_to(step, error)

    @taped.off()
    def end(self) -> None:
        """Close this thread's step, and have what is left of it judged."""
        state, tracker = self._state, self._tracker
        self.taken()
        updated, backward = state.updated, state.backward
        state.open = state.held = state.backward = False
        state.outputs = []
        error = None
        try:
            if self._options.parameters and backward:
                self._read_weights(updated=updated)
        except AnomalyError as found:
            error = found
        self._moves.after(tracker.judge.rows(), trained=updated or backward)
        rows = tracker.judge.close_step()
        try:
            if rows is not None:
                if self._options.level == "operation" and rows.failed is None:
                    step = state.step
                    tracker.judge.operations(rows, lambda: self._every_operation(rows, step))
                tracker.judge.settle(rows)
                if rows.failed is not None and updated:
                    tracker.judge.applied_bad_update(rows)
                if rows.failed is None and rows.lo:
                    tracker.judge.known_clean(rows.number)
                    if updated and not self._options.parameters:
                        tracker.judge.updated(rows.number)
        finally:
            state.step, state.roots, state.grown = None, [], []
            state.by_hand.clear()
            state.written.clear()
        if error is not None:
            raise error

    def _read_weights(self, *, updated: bool) -> None:
        """Read every weight and buffer after a step that took gradients: one read more."""
        state, rows = self._state, self._tracker.judge.rows()
        if rows.failed is not None:
            return
        if updated:
            self._tracker.judge.updated(rows.number)
        points, values = self._layers.weights.ends()
        with but(state, after=True):
            self.judge(self.places(points), values, last=False)
            self._tracker.judge.review(rows)

    def _every_operation(self, rows: core.Step, step: Step | None) -> Replay | None:
        """Run a step again that went well, and look at every operation of it."""
        if step is None:
            return None
        seen = self._replays.replay(step, failed=False)
        parted = divergence(rows, rows.reading(len(rows.lo) - 1), seen.passed) if rows.lo else None
        if parted is not None:
            why = f"a second run saw other values than the first, and is not believed: {parted}"
            raise ReplayError(why)
        return seen


def _trail_of(record: taped.Record, frame: Frame) -> Differentiated:
    """Hold what is to be run again of a record, for what was read of it."""
    return Differentiated(record.all(), frame.tensors, frame=frame)


def _of(root: tuple[Any, str, Any, Any]) -> str:
    """Give what the paths of a model's layers begin with."""
    return f"{root[1]}." if root[1] else ""
