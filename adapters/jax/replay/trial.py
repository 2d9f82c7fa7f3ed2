"""One more run of a step, with operations repaired, to see whether a fix helps."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from anynan._diagnosis.lineage import Replay
from anynan._diagnosis.rules.repair import Repair
from anynan._diagnosis.trials import Attempt
from anynan._recorder.reached import untouched
from anynan._runtime.context import replay_context
from anynan.jax.graphs.operations import Op
from anynan.jax.graphs.stacks import MARK, MENDED
from anynan.jax.program.program import Program
from anynan.jax.read.spots import Spot
from anynan.jax.replay.flags import Flag, flags
from anynan.jax.replay.mender import Mender
from anynan.jax.replay.replay import MOST, record
from anynan.jax.replay.steps import Step

_NUMBER = int(MENDED.removeprefix(MARK))


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
    fn, trace = step.traced
    arrays, mender = step.inputs(), Mender(repairs)
    drawn = str(np.random.get_state())  # noqa: NPY002  what the function may draw from
    with untouched(fn, say), mender.at_work():
        program = trace(arrays)
        as_before = drawn == str(np.random.get_state())  # noqa: NPY002
    if not as_before or not mender.whole or not _alike(program, step.program):
        return None
    program.chosen = step.program.chosen
    with replay_context():
        return _run(step, program, arrays)


def _alike(mended: Program, program: Program) -> bool:
    """Tell whether a trace gives what the first one did."""
    forms = [
        [(x.shape, x.dtype) for x in (*p.closed.in_avals, *p.closed.out_avals)]
        for p in (mended, program)
    ]
    return forms[0] == forms[1]


def _run(step: Step, program: Program, arrays: list[Any]) -> Attempt | None:
    spots = _spots(step, program)
    found = flags(program, arrays, {s.value: "ends" for s in spots}, extra=("norm",))
    seen = Attempt(Replay(), "step" if program.differentiated else "call")
    if not any(flag.word for flag in found.values()):
        if program.differentiated:
            seen.loss, seen.gradient_norm = _loss(program, spots, found), _norm(program, found)
        return seen
    operations = program.operations().ops
    wanted = {i: "sum" for op in operations for i in op.outs}
    if len(wanted) > 4 * MOST:  # that would take longer than the first look at the step did
        return None
    wanted.update((spot.value, "sum") for spot in spots)
    found = flags(program, arrays, wanted)
    seen.bad = any(_made_bad(op, found) for op in operations)
    seen.replay = record(program, arrays, found, spots)[0]
    return None if seen.replay.notes else seen


def _spots(step: Step, program: Program) -> list[Spot]:
    """List where bad values would be harm: not where the step's own were meant."""
    watch, graph = step.watch, step.program.graph
    meant = {
        program.graph.results[i]
        for i, index in enumerate(graph.results)
        if watch.at.get(index) in step.meant
    }
    return [spot for spot in program.spots(backward=True) if spot.value not in meant]


def _made_bad(op: Op, found: dict[int, Flag]) -> bool:
    """Tell whether a repaired operation's gradient is bad where what came into it is not."""
    if op.forward is None or _NUMBER not in op.forward.nodes[0].place.marks:
        return False
    bad = any(i in found and found[i].word for i in op.outs)
    return bad and not any(i in found and found[i].word for i in op.ins)


def _loss(program: Program, spots: list[Spot], found: dict[int, Flag]) -> float | None:
    """Give the loss, None where several results may be it."""
    mine = {spot.value for spot in spots if spot.phase == "loss"} & set(program.graph.results)
    rows = [found[index].row for index in mine]
    return float(rows[0][1]) if len(rows) == 1 else None


def _norm(program: Program, found: dict[int, Flag]) -> float | None:
    """Give the L2 norm over the gradients of all weights, None where one was not seen whole."""
    graph = program.graph
    returned = {
        graph.results[i]
        for i, result in enumerate(program.results)
        if result.source is not None and not result.state
    }
    mine = [found.get(i) for i in returned | {spot.value for spot in program.gradients()}]
    seen = [f.row[-1] for f in mine if f is not None and f.shard is None and not f.its]
    if not seen or len(seen) < len(mine):
        return None
    total = math.hypot(*map(float, seen))
    return total if math.isfinite(total) else None
