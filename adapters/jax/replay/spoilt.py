"""What an update spoilt: a weight, or the optimizer's state for it."""

from typing import Any

from anynan._base.walks import walk
from anynan._diagnosis.evidence import BadParameter
from anynan._diagnosis.lineage import OpRecord
from anynan.jax.graphs.operations import Op
from anynan.jax.program.program import Program
from anynan.jax.read import probes
from anynan.jax.replay.rounds import LoopIndex


def blame(program: Program, record: OpRecord, op: Op) -> None:
    """Put an update's operation where the weight is that it spoils."""
    goal = {program.graph.results[i]: r for i, r in enumerate(program.results) if r.state}
    for index in walk(op.outs, program.graph.makes, near=True):
        result = goal.get(index)
        if result is not None and result.source is not None:
            leaf = program.leaves[result.source]
            if leaf.role == "parameter":
                record.parameter, record.layer = leaf.name, program.owner(leaf)
                return


def spoilt(program: Program, arrays: dict[tuple[int, LoopIndex], Any]) -> list[BadParameter]:
    """Describe the first weight that an update spoilt, with its gradient and state."""
    found = []
    for i, result in enumerate(program.results):
        array = arrays.get((program.graph.results[i], ()))
        if array is None or not result.state or result.source is None:
            continue
        leaf = program.leaves[result.source]
        if leaf.role != "parameter":
            continue
        grad = program.gradient_of(program.graph.results[i])
        gradient = None if grad is None else arrays.get((grad, ()))
        moments = {
            name: (j, probes.measure(arrays[program.graph.results[j], ()]))
            for j, name in program.moments(leaf)
            if (program.graph.results[j], ()) in arrays
        }
        summary, name, state = probes.measure(array), leaf.name, False
        bad = [j for j, held in moments.values() if held.bad]
        if not summary.bad and bad:
            name = program.leaves[program.results[bad[0]].source or 0].name
            summary, state = next(held for j, held in moments.values() if j == bad[0]), True
        found.append(
            BadParameter(
                name, program.owner(leaf), summary,
                gradient=None if gradient is None else probes.measure(gradient),
                state={name: held for name, (_, held) in moments.items()}, optimizer=state,
                after=True,
            )
        )  # fmt: skip
    return found
