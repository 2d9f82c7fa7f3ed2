"""Run the graph of a failing step again, on copies of its variables, with every operation read."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import takewhile
from typing import Any

import numpy as np
import tensorflow as tf

from anynan._base.context import but, replay_context
from anynan._calls.collector import collecting
from anynan._diagnosis.agreement import CheckedPoint, divergence
from anynan._diagnosis.evidence import ReplayError
from anynan._diagnosis.lineage import OpRecord, Replay
from anynan._diagnosis.rules.repair import Repair
from anynan._diagnosis.trials import Attempt
from anynan._reach.kept import contents_stay
from anynan._readings import step as core
from anynan._readings.readings import ProbePoint, Reading
from anynan.tensorflow.graphs import names
from anynan.tensorflow.graphs.operations import Op, forward_name
from anynan.tensorflow.messages import NESTED_FUNCTION, REPLICAS
from anynan.tensorflow.read import probes, readings
from anynan.tensorflow.read.buffers import Block
from anynan.tensorflow.read.places import Places
from anynan.tensorflow.replay import nested, saving
from anynan.tensorflow.replay.fix_runner import FixRunner
from anynan.tensorflow.replay.program import Program, Programs, first_line, types
from anynan.tensorflow.replay.records import Recorder
from anynan.tensorflow.replay.run import Run, as_written
from anynan.tensorflow.replay.steps import Held, Part, Step
from anynan.tensorflow.replay.taped import off


def is_same_code(fixed: Program, first: Program, *, unrolled: bool) -> bool:
    """Tell whether a compiled function's code, traced again, is what the function holds.

    It was traced once, with the numbers and the branches that its code had then.
    """
    if not first.traced:
        return True
    held = dict.fromkeys(_signs(first, unrolled=unrolled))
    return all(sign in held for sign in _signs(fixed, unrolled=unrolled))


def _signs(program: Program, *, unrolled: bool) -> Iterator[Any]:
    """Yield the types of a graph's nodes, and its constants, but for what repairs are made of."""
    definition = program.graph.as_graph_def()
    for node in (x for part in (definition, *definition.library.function) for x in _nodes(part)):
        name, backward = forward_name(node.name)
        if program.trace.repair(name) is not None:
            continue
        if node.op != "Const":
            # A gradient adds up and calls otherwise where functions are traced in place.
            if not (backward or unrolled or node.op in ("AddN", "Placeholder", "NoOp")):
                yield node.op
        elif tf.as_dtype(node.attr["dtype"].type).is_floating:
            value = tf.make_ndarray(node.attr["value"].tensor)
            plain = bool(((value == 0) | (value == 1)).all())  # a tape begins with such
            if not (backward or plain):
                yield value.dtype.name, value.tobytes()


def _nodes(part: Any) -> Any:
    return part.node if hasattr(part, "node") else part.node_def


def is_same_fault(
    run: Run, runner: FixRunner, rows: core.Step, passed: list[CheckedPoint], reading: Reading, *,
    ends: bool,
) -> bool:  # fmt: skip
    """Tell whether a second run comes to the first repair as the first run came there.

    Args:
        run: The second run.
        runner: What repaired it.
        rows: The first run's rows.
        passed: What the second run passed.
        reading: The first run's bad reading.
        ends: Whether only the ends of the first run were read.
    """
    found = [run.bad.get(x.name, False) for x in runner.unrepaired]
    if runner.repairs[0].phase != "backward" and not any(found):
        return False
    layers = {item.layer for item in runner.repairs}
    ahead = takewhile(lambda x: x.phase in ("input", "forward") and x.layer not in layers, passed)
    bad = {(x.layer, x.phase, x.site.tensor, x.call) for x in _bad(rows, reading)}
    before = list(takewhile(lambda x: x.key not in bad, ahead))
    return divergence(rows, reading, before, ends=ends) is None


def _bad(rows: core.Step, last: Reading) -> Iterator[Reading]:
    found = map(rows.reading, range(last.order + 1))
    return (reading for reading in found if reading.kind is not None)


def seen(step: Step, recorder: Recorder) -> Attempt | None:
    """Say what a run that went to its end has shown.

    Args:
        step: What ran.
        recorder: Of the run.
    """
    run, replay = recorder.run, recorder.result()
    if replay.notes or run.end is not None or (step.began is not None and step.began.notes()):
        return None
    backward = any(block.backward for block in recorder.program.trace.blocks)
    found = Attempt(replay, "step" if backward else "call")
    if step.layer or step.taped is not None:
        found.extent = "both" if backward else "forward"
    found.bad = any(_made_bad(op, recorder) for op in recorder.bad)
    if not replay.sinks:
        found.loss, found.gradient_norm = _loss(recorder), _norm(recorder)
    return found


def _made_bad(op: Op, recorder: Recorder) -> bool:
    """Tell whether a repaired operation's gradient is bad where what comes into it is not."""
    scope = None if op.forward is None else recorder.program.trace.repair(op.forward.nodes[0].name)
    return scope is not None and not any(recorder.run.bad.get(x.name) for x in op.ins)


def _loss(recorder: Recorder) -> float | None:
    """Give what was differentiated, None where that is several numbers."""
    blocks = [block for block in recorder.program.trace.blocks if block.backward]
    names = {point.value for block in blocks for point in block.order if point.phase == "loss"}
    if len(names) != 1:
        return None
    (value,) = recorder.run.values([recorder.program.graph.get_tensor_by_name(*names)]).values()
    loss = float(value.reshape(-1)[0]) if value.size == 1 else math.nan
    return loss if math.isfinite(loss) else None


def _norm(recorder: Recorder) -> float | None:
    """Give the L2 norm over the gradients of all weights, None where that is not known."""
    trace = recorder.program.trace
    points = [
        point
        for block in trace.blocks
        for point in block.order
        if point.phase == "backward" and point.parameter
    ]
    known = {point.parameter for point in points}
    if not points or len(known) < len(points) or known & trace.sparse:
        return None
    rows = recorder.run.rows([point.value for point in points])
    total = math.hypot(*map(readings.norm, rows))
    return total if math.isfinite(total) else None


PYTHON = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})
FUNCTIONS = ("PartitionedCall", "StatefulPartitionedCall")


class Replays(Part):
    """Run steps again."""

    def __init__(self, held: Held) -> None:
        super().__init__(held)
        self._monitor, self._rows = held.tracker.judge.monitor, held.tracker.judge.rows
        self._ends = self._options.level == "step"  # nothing is read between a step's ends
        self._programs = Programs(held, lambda part, x: Run(part).value(x))

    def replay(self, step: Step, *, failed: bool = True) -> Replay:
        """Run a step again, and record its operations with bad results.

        Args:
            step: What ran.
            failed: A reading was bad, so it has to be found again, under XLA if need be.
        """
        spread = _is_spread(step)
        if spread and not hasattr(step.fn, "get_concrete_function"):
            raise ReplayError(REPLICAS())
        with self._again():
            program = self._programs.prepare(step)
            into = collecting.get()
            if into is not None:
                saving.inputs(into, program)
            run = Run(program)
            run.flag(failed=failed)
            step.opened, step.compiled = {"unrolled": False}, run.compiled
            if failed:
                self._trail(run)
            result = Recorder(self._layers, program, run).result()
            if step.began is not None:
                result.notes += step.began.notes()
            # Otherwise the arithmetic itself is another, or several replicas were read as one.
            if not (run.optimized or result.uncompiled or spread):
                result.passed = self._passed(run)
            nested_end = run.end is not None and run.end.type in FUNCTIONS
            opaque = _opaque(result.records, run)
            calls = any(node.type in FUNCTIONS for node in program.graph.get_operations())
            if failed and not spread and (opaque or nested_end or (calls and not result.records)):
                deeper = self._deeper(step, types(program.graph))
                if deeper is not None:
                    deeper.passed, result = result.passed, deeper
        return result

    def attempt(self, step: Step, reading: Reading, repairs: Sequence[Repair]) -> Attempt | None:
        """Trace a step's code once more with operations repaired, and run what comes of it.

        Args:
            step: What ran.
            reading: The bad reading.
            repairs: What to repair.

        Returns:
            What was seen; None where that is not what the first run would have come to.
        """
        if _is_spread(step) or step.opened is None:  # a long loop that is repaired may never end
            return None
        runner = FixRunner(repairs, self._traces)
        try:
            with self._again():
                first = self._programs.prepare(step)
                # Nested functions keep what they are traced to, so they are traced in place.
                with self._in_place(**step.opened), runner.at_work():
                    program = self._programs.prepare(step, fresh=True, entering=runner.enter)
                same = is_same_code(program, first, unrolled=any(step.opened.values()))
                if not runner.whole or not same:
                    return None
                run = Run(program)
                run.compiled = step.compiled
                run.flag(failed=False)
                passed = self._passed(run)
                if not is_same_fault(run, runner, self._rows(), passed, reading, ends=self._ends):
                    return None
                return seen(step, Recorder(self._layers, program, run))
        except ReplayError:
            return None

    def up_to(self, step: Step, error: BaseException) -> Replay | None:
        """Run a step again up to the exception that ended it; None if it does not end so again.

        Args:
            step: What ran.
            error: The exception.
        """
        compiled = hasattr(step.fn, "get_concrete_function")
        if _is_spread(step) or (compiled and not isinstance(error, tf.errors.OpError)):
            return None  # several replicas, or an exception of the tracing
        with self._again():
            return self._up_to(step, error, self._programs.prepare(step)) or self._inside(
                step, error
            )

    def _up_to(self, step: Step, error: BaseException, program: Program) -> Replay | None:
        run = Run(program)
        run.flag(failed=False)
        same = program.taken is not None or type(run.error) is type(error)
        recorder = Recorder(self._layers, program, run)
        taken = recorder.taken() if same else None
        if taken is None:
            return None
        result = recorder.result()
        result.passed = self._passed(run)
        result.sinks.append(taken)
        result.raised = error
        return result

    def _inside(self, step: Step, error: BaseException) -> Replay | None:
        """Run it with what is nested in place, as the exception may come from there."""
        with nested.in_place(self._state, (), unrolled=False):
            program = self._programs.prepare(step, fresh=True)
        return self._up_to(step, error, program)

    def look_again(self, block: Block, values: Any) -> None:
        """Read exactly what a block says is NaN, and put it in if it is Infs of both signs.

        A sum does not tell the two apart. Where those are only placed, as limits that nothing
        reaches, they are no failure. What was seen to be a NaN is believed from then on.
        """
        nan = np.flatnonzero(np.isnan(values[:, 2])).tolist()
        doubted = [i for i in nan if i not in block.confirmed]
        step = self._state.step
        if not doubted or step is None:
            return
        try:
            found = self._look(step, block, doubted)
        except ReplayError:
            block.confirmed.update(doubted)
            return
        for i, row in zip(doubted, found, strict=True):
            # What only XLA makes does not show here, and stays what it is.
            if np.isinf(row[:2]).any() and not np.isnan(row).any():
                values[i] = row
            else:
                block.confirmed.add(i)

    def _look(self, step: Step, block: Block, places: list[int]) -> Any:
        """Read exactly some tensors that a block of a step's readings is of.

        Raises:
            ReplayError: If the step cannot be run again, or the block is of a nested function.
        """
        if _is_spread(step):
            raise ReplayError(REPLICAS())
        with self._again():
            program = self._programs.prepare(step)
            if not any(known is block for known in program.trace.blocks):
                raise ReplayError(NESTED_FUNCTION())
            return Run(program).rows([block.points[i].value for i in places])

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Have nothing that runs count as a step of the user's."""
        # What layers added to the loss of a call that is under way.
        losses = [getattr(x, "_losses", None) for x in self._layers.alive().values()]
        afresh = but(self._state, replaying=True, tapes=0, frame=None, outputs=[])
        try:
            with afresh, replay_context(), as_written(), contents_stay(losses), off():
                yield
        except tf.errors.OpError as error:
            msg = f"the step failed when it was run again: {type(error).__name__}: {_last(error)}"
            raise ReplayError(msg) from error

    def _trail(self, run: Run) -> None:
        """Fill in how large the values of each layer were."""
        blocks = run.program.trace.blocks
        points = [s for block in blocks for s in block.points if s.phase == "forward" and s.value]
        places, rows = Places.of(points, self._monitor), self._rows()
        keys = zip((site.index for site in places.sites), places.calls, strict=True)
        found = dict(zip(keys, points, strict=True))
        unknown = {
            order: found[site.index, call].value
            for order, (site, call) in enumerate(zip(rows.sites, rows.calls, strict=True))
            if rows.lo[order] > rows.hi[order]
            and (site.index, call) in found
            and run.ran(run.program.graph.get_tensor_by_name(found[site.index, call].value))
        }
        if not unknown:
            return
        low, high, _ = readings.read(run.rows(list(unknown.values())))
        for order, lo, hi in zip(unknown, low.tolist(), high.tolist(), strict=True):
            rows.correct(order, lo, hi)

    def _passed(self, run: Run) -> list[CheckedPoint]:
        """Read again what the first run read, to be compared with it, or all it did not read."""
        # Each iteration was read if it ran eagerly, and none is in a graph.
        if self._layers.looped:
            return []
        blocks = run.program.trace.blocks
        read = [s for b in blocks for s in (b.order if self._ends else b.points)]
        points = [s for s in read if s.value and s.parameter is None]
        for label, x in run.program.results:
            tensor = "loss" if label == "result" else label
            points.append(ProbePoint(x.name, None, "loss", tensor, dtype=probes.dtype(x)))
        tensor = run.program.graph.get_tensor_by_name
        points = [point for point in points if run.ran(tensor(point.value))]
        if not points:
            return []
        low, high, there = readings.read(run.rows([point.value for point in points]))
        if run.program.compiled and not self._held.sizes:  # a sum took Infs of both signs for a NaN
            both = np.isinf(low) & np.isinf(high) & (low < high)
            low, high = np.where(both, np.nan, low), np.where(both, np.nan, high)
        places, rows = Places.of(points, self._monitor), self._rows()
        keys = list(zip((site.index for site in places.sites), places.calls, strict=True))
        hidden = _hidden(run) if run.program.traced and not run.program.compiled else set()
        first = {
            (site.index, call): (lo, hi)
            for site, call, lo, hi in zip(rows.sites, rows.calls, rows.lo, rows.hi, strict=True)
        }
        for i, point in enumerate(points):
            if math.isnan(low[i]) and tensor(point.value).op.name in hidden and keys[i] in first:
                low[i], high[i] = first[keys[i]]
        return [
            CheckedPoint(point.layer, point.phase, point.tensor, call, float(lo), float(hi))
            for point, call, lo, hi, ok in zip(points, places.calls, low, high, there, strict=True)
            if ok
        ]

    def _deeper(self, step: Step, kinds: Iterable[str]) -> Replay | None:
        """Run a step again with what is nested in place; None if that shows nothing."""
        found = None
        rolled = any(getattr(x, "unroll", None) is False for x in self._layers.alive().values())
        plain = [(False, "")] if rolled else []
        for unrolled, way in ((True, ""), *plain, (True, "asked"), (True, "parted")):
            opened, parted = {"unrolled": unrolled, "asked": way == "asked"}, way == "parted"
            # Each value that is asked for would call the program's own functions.
            if way and (step.taped or step.made or not PYTHON.isdisjoint(kinds)):
                continue
            parts = self._programs.parted(step) if parted else nullcontext()
            try:
                with self._in_place(**opened), parts:
                    program = self._programs.prepare(step, fresh=True)
                run = Run(program)
                run.flag(failed=True)
                result = Recorder(self._layers, program, run).result()
            except (ReplayError, tf.errors.OpError):
                continue
            # What follows the turn that a loop was parted at is a loop, too.
            whole = not _opaque(result.records[:1] if parted else result.records, run)
            # A loop that is too long ends before anything comes out of it.
            reached = bool(result.records) and (way != "asked" or bool(result.sinks))
            if reached and (found is None or whole):
                step.opened = None if parted else opened
                step.compiled, found = run.compiled, result
                if whole:
                    break
        return found

    def _in_place(self, *, unrolled: bool, asked: bool = False) -> AbstractContextManager[None]:
        layers = self._layers.alive().values()
        return nested.in_place(self._state, layers, unrolled=unrolled, asked=asked)


def _opaque(records: list[OpRecord], run: Run) -> bool:
    """Tell whether something bad comes out of what was not looked into: also by a list."""
    kinds = {kind for record in records for kind in record.raw.split(", ")}
    loops = any(node.type.endswith("While") for node in run.program.graph.get_operations())
    lists = loops and any(kind.startswith("TensorList") for kind in kinds)
    return lists or not kinds.isdisjoint(names.OPAQUE)


def _hidden(run: Run) -> set[str]:
    """Name the nodes with a NaN that came through a relu, which may have hidden it.

    On a CPU, TensorFlow's optimizer fuses a relu with the product before it, and the fused one
    gives 0 for NaN. The second run uses the graph as it was written.
    """
    found: set[str] = set()
    for node in run.program.graph.get_operations():
        relu = node.type in ("Relu", "Relu6") and run.bad.get(node.outputs[0].name)
        if relu or any(x.op.name in found for x in node.inputs):
            found.add(node.name)
    return found


def _is_spread(step: Step) -> bool:
    return tf.distribute.get_strategy().num_replicas_in_sync > 1 or any(
        hasattr(x, "values") and not isinstance(x, tf.SparseTensor | tf.RaggedTensor | dict)
        for x in tf.nest.flatten(step.args)
    )


def _last(error: Exception) -> str:
    """Give what went wrong, without the stack that TensorFlow puts before it."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "node" not in line), first_line(error))[:200]
