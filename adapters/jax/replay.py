"""Run a failing step again, and read every operation that may have made its bad values."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from anynan.context import replay_context
from anynan.jax import probes
from anynan.jax.evaluate import Emission, Plan, silent
from anynan.jax.layers import Spot
from anynan.jax.operations import Op
from anynan.jax.program import Program
from anynan.jax.records import Recorder
from anynan.jax.session import Session
from anynan.jax.steps import Step
from anynan.lineage import Replay

# Readings in one second run: more of them take long to compile, and layers are read first.
MOST = 400


@dataclass(slots=True)
class Flag:
    """Hold what a second run saw of one value.

    Attributes:
        word: The worst kind in it.
        its: Iterations in which that was first seen, outermost loop first.
        shard: The device it was seen on, inside shard_map.
        row: The word and both ends, if they were asked for.
    """

    word: int
    its: tuple[int, ...] = ()
    shard: int | None = None
    row: Any = None


def replay(session: Session, step: Step) -> Replay:
    """Run a step again and record its operations with bad results."""
    program = step.program
    arrays = step.inputs()
    watch = step.watch
    words = {index: int(step.read[at, 0]) for index, at in watch.at.items()}
    spots = program.spots(backward=True)
    bad = [spot for spot in watch.spots if words[spot.value] and spot.phase != "input"]
    # A mask is no failure of its own: what came after it is looked for first.
    bad.sort(key=lambda spot: words[spot.value] == probes.NEGINF and spot.phase == "forward")
    with replay_context():
        chosen = _slice(program, bad, words)
        if len(chosen) > MOST:
            between = [spot.value for spot in spots if spot.value in chosen]
            found = flags(program, arrays, dict.fromkeys(between, "code"))
            words.update({index: flag.word for index, flag in found.items()})
            more = [spot for spot in spots if words.get(spot.value)]
            chosen = _slice(program, more or bad, words)
        wanted: dict[int, Any] = dict.fromkeys(chosen, "code")
        for spot in spots:
            if spot.phase == "forward" or spot.value in chosen:
                wanted[spot.value] = "ends"
        found = flags(program, arrays, wanted)
        _trail(step, found)
        result, recorder = record(program, arrays, found, spots)
    step.spoilt = recorder.spoilt()
    result.end()
    return result


def everything(step: Step) -> Replay | None:
    """Run a step again with every operation read; None if all of it is finite."""
    program = step.program
    arrays = step.inputs()
    spots = program.spots(backward=True)
    wanted: dict[int, Any] = {i: "code" for op in program.operations().ops for i in op.outs}
    wanted.update(dict.fromkeys((spot.value for spot in spots), "code"))
    with replay_context():
        found = flags(program, arrays, wanted)
        if not any(flag.word for flag in found.values()):
            return None
        return record(program, arrays, found, spots)[0]


def record(
    program: Program, arrays: list[Any], found: dict[int, Flag], spots: list[Spot]
) -> tuple[Replay, Recorder]:
    """Turn the values that were found bad into records and sinks."""
    operations = program.operations()
    bad = [op for op in operations.ops if any(i in found and found[i].word for i in op.outs)]
    recorder = Recorder(program, found, bad)
    recorder.capture(arrays)
    result = Replay(recorder.records(), recorder.sinks(spots))
    if any(eqn.effects and not silent(eqn) for eqn in program.closed.jaxpr.eqns):
        result.notes.append(
            "a callback of the step whose result is used was called again in the replay"
        )
    return result, recorder


def _slice(program: Program, bad: list[Spot], words: dict[int, int]) -> set[int]:
    """Give the results of every operation that may have made the first bad values.

    The way back from a bad value ends where a value was read and is finite.
    """
    operations = program.operations()
    chosen: set[int] = set()
    for spot in bad:
        chosen |= _behind(program, spot.value, words)
        if len(chosen) > MOST:
            break
    chosen |= {spot.value for spot in bad}
    return chosen | {
        i for op in operations.ops if any(o in chosen for o in op.outs) for i in op.outs
    }


def _behind(program: Program, start: int, words: dict[int, int]) -> set[int]:
    graph, operations = program.graph, program.operations()
    chosen: set[int] = set()
    seen = {start}
    todo = [start]
    while todo:
        value = graph.values[todo.pop()]
        more = list(value.feeds)
        if value.writer is not None:
            node = graph.nodes[value.writer]
            op: Op | None = operations.of.get(node.index)
            if op is None:
                more += node.ins
            else:
                chosen.update(op.outs)
                more += op.ins
                if op.forward is not None:  # what it hid may be what the gradient runs into
                    more += op.forward.outs
        for i in more:
            if i not in seen and words.get(i, 1):
                seen.add(i)
                todo.append(i)
    return chosen


def flags(program: Program, arrays: list[Any], wanted: dict[int, Any]) -> dict[int, Flag]:
    """Run the program once with these values read."""
    key = tuple(wanted.items())
    compiled = program.replays.get(key)
    if compiled is None:
        compiled = program.replays[key] = _compiled(program, wanted)
    run, made = compiled
    out = jax.device_get(run(*arrays))
    return {
        item.probe.key: _flag(item, data[0], data[1:]) for item, data in zip(made, out, strict=True)
    }


def _compiled(program: Program, wanted: dict[int, Any]) -> tuple[Any, list[Emission]]:
    plan = Plan(replaying=True)
    for index, what in wanted.items():
        program.want(plan, index, what)
    made: list[Emission] = []

    def run(*inner: Any) -> list[list[Any]]:
        _, found = program.evaluate(plan, inner)
        made[:] = found
        return [[item.data, *item.its] for item in found]

    return jax.jit(run), made


def _flag(item: Emission, data: Any, its: list[Any]) -> Flag:
    data = np.asarray(data)
    shard = None
    if item.shards:
        words = data[:, 0] if item.probe.what == "ends" else data
        shard = int(np.argmax(words))
        data, its = data[shard], [it[shard] for it in its]
    row = data if item.probe.what == "ends" else None
    word = int(data[0] if row is not None else data)
    return Flag(word, tuple(int(it) for it in its), shard, row)


def _trail(step: Step, found: dict[int, Flag]) -> None:
    """Fill in how large the values of each layer were."""
    rows = step.rows
    for order, spot in enumerate(step.watch.spots):
        flag = found.get(spot.value)
        if flag is not None and flag.row is not None and spot.phase == "forward":
            low, high = probes.read(flag.row)
            if rows.lo[order] > rows.hi[order]:
                rows.lo[order], rows.hi[order] = low, high
