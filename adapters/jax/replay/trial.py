"""One more run of a step, with operations repaired, to see whether a fix helps."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from anynan._base.context import replay_context
from anynan._diagnosis.lineage import Replay
from anynan._diagnosis.rules.repair import Repair
from anynan._diagnosis.trials import Attempt
from anynan._readings.readings import ProbePoint
from anynan.arrays.reachable import untouched
from anynan.jax.graphs.operations import Op
from anynan.jax.graphs.stacks import FIXED, MARK
from anynan.jax.program.program import Program
from anynan.jax.program.trace import ShutError
from anynan.jax.replay.fix_runner import FixRunner
from anynan.jax.replay.flags import Flag, flags
from anynan.jax.replay.replay import MOST, ahead, masks_last, record, slice_behind
from anynan.jax.replay.steps import Step
from anynan.jax.replay.zoom import nested

_NUMBER = int(FIXED.removeprefix(MARK))


def attempt(step: Step, repairs: Sequence[Repair], say: Callable[[str], object]) -> Attempt | None:
    """Trace a step's function once more with operations repaired, and run what comes of it.

    Args:
        step: What failed.
        repairs: What to repair.
        say: Is told of what could not be put back after the function's code ran again.

    Returns:
        What was seen; None where the function's code is not the same when it runs again.
    """
    if step.traced is None:
        return None
    fn, form = step.traced
    arrays, runner = step.inputs(), FixRunner(repairs)
    drawn = str(np.random.get_state())  # noqa: NPY002  what the function may draw from
    with untouched(fn, say), runner.at_work():
        program = form.program(step.program.settings, arrays)
        as_before = drawn == str(np.random.get_state())  # noqa: NPY002
    if not as_before or not runner.whole or not _alike(program, step.program):
        return None
    program.chosen = step.program.chosen
    with replay_context():
        try:
            return _run(step, program, arrays)
        except ShutError as error:
            return _run(step, program.without(error.paths), arrays)


def _alike(fixed: Program, program: Program) -> bool:
    """Tell whether a trace gives what the first one did."""
    forms = [
        [(x.shape, x.dtype) for x in (*p.closed.in_avals, *p.closed.out_avals)]
        for p in (fixed, program)
    ]
    return forms[0] == forms[1]


def _run(step: Step, program: Program, arrays: list[Any]) -> Attempt | None:
    points = _points(step, program)
    measured = _losses(program, points) | _gradients(program)
    wanted = {s.value: "ends" if s.value in measured else "sum" for s in points}
    found = flags(program, arrays, wanted, extra=("norm",))
    seen = Attempt(Replay(), "step" if program.differentiated else "call")
    if not any(flag.word for flag in found.values()):
        if program.differentiated:
            seen.loss, seen.gradient_norm = _loss(program, points, found), _norm(program, found)
        return seen
    words = {point.value: found[point.value].word for point in points}
    bad = masks_last([point for point in points if words[point.value]], words)
    operations = program.operations().ops
    # The backward passes of repaired ones.
    slopes = [x for x in operations if x.forward and _NUMBER in x.forward.nodes[0].place.marks]
    chosen = slice_behind(program, bad, words, set())
    if bad[0].phase == "backward":
        chosen |= ahead(program, chosen)
    everything = {i for op in operations for i in op.outs}.union(words)
    chosen |= everything.intersection(i for op in slopes for i in (*op.outs, *op.ins))
    for values in (chosen, everything):  # what was bad first may be expected to be
        # That would take longer than the first look at the step did.
        if len(values) > 4 * MOST or nested(program, values):
            return None
        found = flags(program, arrays, dict.fromkeys(values, "sum"))
        seen.bad = any(_made_bad(op, found) for op in slopes)
        seen.replay = record(program, arrays, found, points)[0]
        if not all(record.expected for record in seen.replay.records):
            break
    return None if seen.replay.notes else seen


def _points(step: Step, program: Program) -> list[ProbePoint]:
    """List where bad values would be harm: not where the step's own were meant."""
    watch, graph = step.watch, step.program.graph
    meant = {
        program.graph.results[i]
        for i, index in enumerate(graph.results)
        if watch.at.get(index) in step.meant
    }
    return [point for point in program.points(backward=True) if point.value not in meant]


def _made_bad(op: Op, found: dict[int, Flag]) -> bool:
    """Tell whether an operation's gradient is bad where what came into it is not."""
    bad = any(i in found and found[i].word for i in op.outs)
    return bad and not any(i in found and found[i].word for i in op.ins)


def _losses(program: Program, points: list[ProbePoint]) -> set[int]:
    """List what may be the loss: the results that are read as one."""
    return {point.value for point in points if point.phase == "loss"} & set(program.graph.results)


def _gradients(program: Program) -> set[int]:
    """List the gradients of weights, and what is returned in the place of weights."""
    returned = {
        program.graph.results[i]
        for i, result in enumerate(program.results)
        if result.source is not None and not result.state
    }
    return returned | {point.value for point in program.gradients()}


def _loss(program: Program, points: list[ProbePoint], found: dict[int, Flag]) -> float | None:
    """Give the loss, None where several results may be it."""
    rows = [found[index].row for index in _losses(program, points)]
    return float(rows[0][1]) if len(rows) == 1 else None


def _norm(program: Program, found: dict[int, Flag]) -> float | None:
    """Give the L2 norm over the gradients of all weights, None where one was not seen whole."""
    mine = [found.get(i) for i in _gradients(program)]
    whole = [f for f in mine if f is not None and f.shard is None and not f.its]
    # Of what did not run, as in the other branch, the smallest value is above the largest.
    seen = [f.row[-1] for f in whole if not f.row[1] > f.row[2]]
    if not seen or len(seen) < len(mine):
        return None
    total = math.hypot(*map(float, seen))
    return total if math.isfinite(total) else None
