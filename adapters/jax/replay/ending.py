"""A step that an exception of a callback's ended: run again up to it, with callbacks caught."""

import copy
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from anynan._base.context import replay_context
from anynan._base.walks import walk
from anynan._calls.calls import UnwritableError
from anynan._diagnosis.lineage import Replay
from anynan._readings.readings import ProbePoint
from anynan.jax.graphs.graph import Graph
from anynan.jax.graphs.versions import rebind
from anynan.jax.program.evaluator import CALLBACKS, jit_once
from anynan.jax.program.program import Program
from anynan.jax.read import probes
from anynan.jax.read.readings import Path, Plan
from anynan.jax.replay.flags import Flag, flags
from anynan.jax.replay.replay import behind, record
from anynan.jax.replay.saving import known_as
from anynan.jax.replay.steps import Step

# So many primitives are looked at: each look is compiled.
FOREIGN = 8


class Catcher:
    """Call a program's callbacks, and catch the first exception: nothing is called after it.

    Attributes:
        ended: The equation that it came from, where that is, and the exception.
    """

    def __init__(self) -> None:
        self.ended: tuple[Any, Path, Exception] | None = None

    def __call__(self, eqn: Any, ins: list[Any], path: Path) -> list[Any]:
        """Bind a callback's equation, so that what it raises ends nothing."""
        real = eqn.params["callback"]
        blank = [np.zeros(x.shape, x.dtype) for x in eqn.params.get("result_avals", ())]

        def call(*args: Any) -> Any:
            if self.ended is None:
                try:
                    return real(*args)
                except Exception as error:  # noqa: BLE001  it is what is looked for
                    self.ended = eqn, path, error
            return tuple(blank)

        return rebind(eqn, ins, callback=call)


def up_to(step: Step, error: BaseException) -> Replay | None:
    """Run a step again up to what ended it: a callback, or a primitive that is none of JAX's.

    Args:
        step: What ran.
        error: The exception.

    Returns:
        What was seen; None if no callback ends it so again, and nothing bad went into such a
        primitive.

    Raises:
        ReplayError: If it cannot be run again.
    """
    graph = step.program.graph
    calls = any(node.name in CALLBACKS for node in graph.nodes)
    program = copy.copy(step.program)
    program.replays = {}
    arrays = step.inputs()

    def see(wanted: Iterable[int], inside: int = 0) -> dict[int, Flag]:
        program.catcher = Catcher() if calls else None
        values = dict.fromkeys(wanted, "sum")
        least = dict.fromkeys(values, inside) if inside else {}
        return flags(program, arrays, values, inside=least)

    with replay_context():
        end = _end(program, arrays) if calls else None
        same = end is not None and _same(error, end[2])
        takers: Iterable[Iterable[int]] = (
            [_taken(graph, *end[:2])] if end and same else _foreign(graph)
        )
        seen = (see(_floats(graph, todo)) for todo in takers)
        bad = next((i for flags in seen for i, flag in flags.items() if flag.word), None)
        if bad is None and not same:
            return None
        if bad is not None:
            points, read = [ProbePoint(bad, None, "value", "")], see([bad, *behind(program, bad)])
        else:  # what it was raised over may have been chosen by a NaN that went nowhere
            made = (i for op in program.operations().ops for i in op.outs)
            points, read = [], see(made, inside=probes.NAN)
        program.catcher = Catcher() if calls else None
        result, _ = record(program, arrays, read, points)
        jax.effects_barrier()
        result.raised = error
        result.end()
    return result


def _end(program: Program, arrays: list[Any]) -> tuple[Any, Path, Exception] | None:
    """Run a program for its end alone."""
    catcher = program.catcher = Catcher()
    run = jit_once(lambda *inner: program.evaluate(Plan(replaying=True), inner)[0])
    jax.block_until_ready(run(*arrays))
    jax.effects_barrier()  # nobody waits for a callback whose result nobody uses
    return catcher.ended


def _same(first: BaseException, second: Exception) -> bool:
    """Tell whether an exception is told of in another: JAX hands on only its text.

    The module of its class may not be told.
    """
    last = traceback.format_exception_only(second)[-1].strip()
    return first is second or last.removeprefix(f"{type(second).__module__}.") in str(first)


def _taken(graph: Graph, eqn: Any, path: Path) -> list[int]:
    """List what a callback takes, and what it is chosen by."""
    nodes = (n for n in graph.nodes if n.eqn is eqn and n.path == path[:-1])
    node = next(nodes, None)
    todo = [] if node is None else list(node.ins)
    if node is not None and node.chain and node.chain[-1].primitive.name == "cond":
        chosen = node.chain[-1].invars[0]  # an exception under a condition
        todo += [value.index for value in graph.values if value.var is chosen]

    return todo


def _foreign(graph: Graph) -> Iterator[tuple[int, ...]]:
    """Walk what the first primitives take that are none of JAX's: one of them raises."""
    left = FOREIGN
    for node in graph.nodes:
        try:
            known_as(node.eqn.primitive)
        except UnwritableError:
            left -= 1
            yield node.ins
        if not left:
            return


def _floats(graph: Graph, todo: Iterable[int]) -> list[int]:
    """List the floats among values, or of which a truth or a whole number among them is made."""

    def number(i: int) -> bool:
        return probes.checkable(graph.values[i].aval)

    found = walk(todo, lambda i: () if number(i) else graph.made_of(i), near=True)
    return [i for i in found if number(i) and not graph.values[i].known]
