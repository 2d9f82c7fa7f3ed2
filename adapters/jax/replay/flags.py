"""What one second run sees of chosen values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from anynan.jax.program.evaluator import jit_once
from anynan.jax.program.program import Program
from anynan.jax.read import probes
from anynan.jax.read.readings import TOTALS, WIDE, Emission, Plan
from anynan.jax.replay.zoom import look, nested

# So many bytes of values are brought out whole: each that is reduced costs the compiler as much as
# an operation, and what is told of needs no run of its own then.
WHOLE = 1 << 26


@dataclass(slots=True)
class Flag:
    """Hold what a second run saw of one value.

    Attributes:
        word: The worst kind in it.
        its: Iterations in which that was first seen, outermost loop first.
        shard: The device it was seen on, inside shard_map.
        row: The word and both ends, if they were asked for.
        rounds: The kind in every round, one axis for each loop; None where they were not kept.
        array: The value itself, where it was brought out whole.
        unread: Whether it is in a loop of which no round was read.
    """

    word: int
    its: tuple[int, ...] = ()
    shard: int | None = None
    row: Any = None
    rounds: Any = None
    array: Any = None
    unread: bool = False


def flags(
    program: Program, arrays: list[Any], wanted: dict[int, Any], extra: tuple[str, ...] = (), *,
    inside: Mapping[int, int] | None = None,
) -> dict[int, Flag]:  # fmt: skip
    """Run the program once with these values read, and what more there is beside their ends.

    In nested loops it is their first bad round that is read, and stands for those after it;
    with ``inside`` a round is bad, too, where one of these values has its word, or a worse one.
    """
    if nested(program, wanted):
        return _zoomed(program, arrays, wanted, extra, inside or {})
    key = (*wanted.items(), *extra)
    compiled = program.replays.get(key)
    if compiled is None:
        compiled = program.replays[key] = _compiled(program, wanted, extra)
    found = compiled(probes.scales(len(wanted)), *arrays)
    return {
        item.probe.key: _of_whole(item, array.data, wide=wanted[item.probe.key] in WIDE)
        if item.probe.what == "value"
        else _flag(item)
        for item, array in zip(jax.device_get(found), found, strict=True)
    }


def _zoomed(
    program: Program, arrays: list[Any], wanted: dict[int, Any], extra: tuple[str, ...],
    inside: Mapping[int, int],
) -> dict[int, Flag]:  # fmt: skip
    values = program.graph.values
    found = {i: Flag(0, (0,) * values[i].loops, unread=True) for i in wanted}
    program.look = seen = look(program, arrays, wanted, inside)
    for item in seen.read(wanted, extra):
        flag = found[item.probe.key] = _flag(item)
        flag.its = seen.of(item.probe.key) or ()
    return found


def _compiled(program: Program, wanted: dict[int, Any], extra: tuple[str, ...]) -> Any:
    plan = Plan(replaying=True, rounds=True, extra=extra)
    left = 0 if extra or jax.process_count() > 1 else WHOLE
    for number, (index, what) in enumerate(wanted.items()):
        value = program.graph.values[index]
        size = value.aval.size * value.aval.dtype.itemsize
        whole = size <= left and not value.loops and probes.checkable(value.aval)
        left -= size * whole
        program.want(plan, index, "value" if whole else what, number=number)

    def run(factors: Any, *inner: Any) -> list[Emission]:
        plan.factors = factors
        return program.evaluate(plan, inner)[1]

    return jit_once(run)


def _of_whole(item: Emission, array: Any, *, wide: bool) -> Flag:
    rows = [probes.row(x) for x in (item.data if item.shards else [item.data])]
    shard = int(np.argmax([row[0] for row in rows])) if item.shards else None
    row = rows[shard or 0]
    return Flag(row[0], shard=shard, row=row if wide else None, array=array)


def _flag(item: Emission) -> Flag:
    data, its = np.array(item.data), list(item.its)
    rounds = None if item.rounds is None else np.asarray(item.rounds).astype(int)
    words = data[..., 0] if item.wide else data
    if item.probe.what in TOTALS and not its:
        words[...] = probes.words(words, np)
    shard = None
    if item.shards:
        shard = int(np.argmax(words))
        data, its = data[shard], [it[shard] for it in its]
        rounds = None if rounds is None else rounds[shard]
    word = int(data[0] if item.wide else data)
    row = data if item.wide else None
    return Flag(word, tuple(int(it) for it in its), shard, row, rounds)
