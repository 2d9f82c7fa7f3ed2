"""What a step's second run with operations repaired says of the fix."""

import math
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import tensorflow as tf

from anynan._diagnosis.agreement import CheckedPoint, divergence
from anynan._diagnosis.trials import Attempt
from anynan._readings import step as core
from anynan._readings.readings import Reading
from anynan.tensorflow.graphs.operations import Op, forward_name
from anynan.tensorflow.read import readings
from anynan.tensorflow.replay.fix_runner import FixRunner
from anynan.tensorflow.replay.program import Program
from anynan.tensorflow.replay.records import Recorder
from anynan.tensorflow.replay.run import Run
from anynan.tensorflow.replay.steps import Step


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
    run: Run,
    runner: FixRunner,
    rows: core.Step,
    passed: list[CheckedPoint],
    reading: Reading,
    *,
    ends: bool,
) -> bool:
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
    points = [point for block in trace.blocks for point in block.order if point.parameter]
    known = {point.parameter for point in points}
    if not points or len(known) < len(points) or known & trace.sparse:
        return None
    rows = recorder.run.rows([point.value for point in points])
    total = math.hypot(*map(readings.norm, rows))
    return total if math.isfinite(total) else None
