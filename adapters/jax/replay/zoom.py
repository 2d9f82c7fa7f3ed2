"""Look into nested loops round by round: only the first bad round of each is read.

A compiler takes minutes over hundreds of readings of every round of loops in loops. So each loop
runs as it is and keeps what its first bad round was given. The body is evaluated then with that,
as a program of its own, and so on inward: what is compiled grows with the depth alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from anynan.jax.graphs.bodies import REMAT, Body, bodies
from anynan.jax.graphs.versions import scanned
from anynan.jax.program.evaluator import CALLBACKS, Evaluator, jit_once
from anynan.jax.program.program import Program
from anynan.jax.read import probes
from anynan.jax.read.readings import Emission, Path, Plan, Probe

_LOOPS = frozenset({"scan", "while"})


@dataclass
class Level:
    """Hold one round of a loop, or the program itself, with what it was given.

    Attributes:
        path: Of its jaxpr in the program.
        its: The round of each loop around it, outermost first.
        jaxpr: What runs.
        consts: Values of its constants.
        args: What it was given.
        outs: What it gave.
    """

    path: Path
    its: tuple[int, ...]
    jaxpr: Any
    consts: Any
    args: list[Any]
    outs: Any = None


@dataclass
class _Seen:
    """Hold what is known of a loop that ran.

    Attributes:
        path: Of its body.
        body: Its body.
        consts: What every round is given.
        at: The first bad round, -1 for none.
        given: What that round was given beside it.
        worst: The worst word in what the loop gave.
        before: The worst word in what that round was given.
    """

    path: Path
    body: Body
    consts: list[Any]
    at: Any
    given: list[Any]
    worst: Any
    before: Any


def nested(program: Program, wanted: Any) -> bool:
    """Tell whether values are inside loops in loops, and nothing else is in the way."""
    graph = program.graph
    deep = any(graph.values[i].loops > 1 for i in wanted)
    return deep and not any(
        eqn.primitive.name == "shard_map" for node in graph.nodes for eqn in node.chain
    )


class _Loops(Evaluator):
    """Evaluate one level; its loops run as they are, and keep what their first bad round gets."""

    def __init__(self, plan: Plan, least: Any, quiet: Plan) -> None:
        super().__init__(plan)
        self.least, self.quiet = least, quiet
        self.seen: list[_Seen] = []
        self.closed = False

    def _equation(self, eqn: Any, ins: list[Any], path: Path) -> tuple[list[Any], list[Emission]]:
        name = eqn.primitive.name
        if path not in self.plan.inside:
            return super()._equation(eqn, ins, path)
        if name in _LOOPS:
            (body,) = bodies(eqn)
            if self.closed or not (found := self._loop(eqn, body, ins, body.path(path))):
                return Evaluator(self.quiet)._equation(eqn, ins, path)
            return found, []
        closed = self.closed
        # What is made in a branch does not leave it.
        self.closed = closed or name == "cond"
        try:
            if name in REMAT and not closed:
                (body,) = bodies(eqn)
                return self.run(body.jaxpr, body.consts, ins, body.path(path))
            return super()._equation(eqn, ins, path)
        finally:
            self.closed = closed

    def _loop(self, eqn: Any, body: Body, ins: list[Any], path: Path) -> list[Any] | None:
        p = eqn.params
        scan = eqn.primitive.name == "scan"
        first, count = scanned(p) if scan else (p["cond_nconsts"], p["body_nconsts"])
        second = first + count
        consts = ins[:first] if scan else ins[first:second]
        carry, xs = (ins[first:second], ins[second:]) if scan else (ins[second:], [])
        if scan and not p["length"]:
            return None
        start = [_code(x) for x in carry]

        def round_(values: Any, x: Any, at: Any, kept: Any, it: Any) -> Any:
            given = [*consts, *values, *x]
            outs, _ = Evaluator(self.quiet).run(body.jaxpr, body.consts, given, path)
            words = [_code(out) for out in outs]
            came = [*start, *(jnp.float32(0) for _ in outs[len(start) :])]
            bad = [(a >= self.least) & (a > b) for a, b in zip(words, came, strict=True)]
            now = jnp.any(jnp.stack(bad)) & (at < 0) if bad else jnp.asarray(False)
            kept = lax.cond(now, lambda a, _: a, lambda _, b: b, [*values, *x], kept)
            return outs, jnp.where(now, it, at), kept

        none = jnp.int32(-1)
        if scan:

            def step(state: Any, x: Any) -> Any:
                values, at, kept, count = state
                it = p["length"] - 1 - count if p["reverse"] else count
                outs, at, kept = round_(values, x, at, kept, it)
                return (outs[: len(carry)], at, kept, count + 1), outs[len(carry) :]

            kept = [*carry, *(x[0] for x in xs)]
            (values, at, kept, _), ys = lax.scan(
                step, (list(carry), none, kept, jnp.int32(0)), list(xs), length=p["length"],
                reverse=p["reverse"],
            )  # fmt: skip
            outs = [*values, *ys]
        else:
            cond = p["cond_jaxpr"]

            def going(state: Any) -> Any:
                return jax.core.eval_jaxpr(cond.jaxpr, cond.consts, *ins[:first], *state[0])[0]

            if cond.out_avals[0].shape:  # under vmap, where lanes end apart
                return None

            def turn(state: Any) -> Any:
                values, at, kept, count = state
                outs, at, kept = round_(values, [], at, kept, count)
                return outs, at, kept, count + 1

            outs, at, kept, _ = lax.while_loop(
                going, turn, (list(carry), none, list(carry), jnp.int32(0))
            )
        worst, before = _worst(outs), _worst(kept)
        self.seen.append(_Seen(path, body, list(consts), at, kept, worst, before))
        return list(outs)


def look(program: Program, arrays: list[Any], wanted: dict[int, Any], extra: Any) -> Iterator[Any]:
    """Run a program with values read: outside of loops, and in the first bad round of each.

    Yields:
        A level, the readings taken there, and the bodies of its loops where nothing was bad.
    """
    quiet = Plan(replaying=True)
    for node in program.graph.nodes:
        if node.name in CALLBACKS:
            quiet.open(node.path)
    closed = program.closed
    todo = [Level((), (), closed.jaxpr, closed.consts, list(arrays))]
    while todo:
        level = todo.pop(0)
        plan = Plan(replaying=True, extra=extra)
        for number, (index, what) in enumerate(wanted.items()):
            value = program.graph.values[index]
            if value.path[: len(level.path)] != level.path:
                continue
            if value.loops == len(level.its):
                plan.add(value.path, value.var, Probe(index, what, (), number))
            else:
                plan.open(value.path)
        found, seen = _run(level, plan, quiet, len(wanted))
        for loop in seen:
            if int(loop.at) >= 0 and loop.path in plan.inside:
                its, body = (*level.its, int(loop.at)), loop.body
                given = [*loop.consts, *loop.given]
                todo.append(Level(loop.path, its, body.jaxpr, body.consts, given))
        yield level, found


def _run(level: Level, plan: Plan, quiet: Plan, count: int) -> tuple[list[Emission], list[_Seen]]:
    made: list[Emission] = []
    seen: list[_Seen] = []

    def run(factors: Any, least: Any, *inner: Any) -> Any:
        plan.factors = factors
        evaluator = _Loops(plan, least, quiet)
        outs, found = evaluator.run(level.jaxpr, level.consts, inner, level.path)
        made[:], seen[:] = found, evaluator.seen
        loops = [[s.consts, s.at, s.given, s.worst, s.before] for s in evaluator.seen]
        return outs, [item.data for item in found], loops

    compiled = jit_once(run)
    factors = probes.scales(count)

    def read(least: int) -> tuple[Any, list[_Seen]]:
        level.outs, data, loops = compiled(factors, np.float32(least), *level.args)
        return data, [_Seen(s.path, s.body, *parts) for s, parts in zip(seen, loops, strict=True)]

    data, ran = read(probes.NAN)
    # An Inf that came before is what the NaN was made of.
    first = [int(s.worst if int(s.at) < 0 else s.before) for s in ran]
    lower = min((word for word in first if word), default=0)
    if lower:
        _, again = read(min(lower, probes.POSINF))
        ran = [b if word else a for a, b, word in zip(ran, again, first, strict=True)]
    data = jax.device_get(data)
    return [Emission(item.probe, x) for item, x in zip(made, data, strict=True)], ran


def capture(levels: list[Level], program: Program, wanted: Any) -> dict[Any, Any]:
    """Give the arrays of values in the rounds that were looked at.

    Args:
        levels: The program, and the rounds.
        program: The program.
        wanted: Numbers of the values, with the round of each loop around them.
    """
    held: dict[Any, Any] = {}
    values = program.graph.values
    for level in levels:
        mine = [
            (index, its)
            for index, its in wanted
            if its == level.its and values[index].path[: len(level.path)] == level.path
        ]
        if not level.path:
            results = dict(zip(program.graph.results, level.outs, strict=True))
            held.update((key, results[key[0]]) for key in mine if key[0] in results)
            mine = [key for key in mine if key not in held]
        if not mine:
            continue
        plan = Plan(replaying=True)
        for index, _ in mine:
            plan.add(values[index].path, values[index].var, Probe(index, "value"))
        order: list[int] = []

        def run(*inner: Any, level: Level = level, plan: Plan = plan, order: Any = order) -> Any:
            _, found = Evaluator(plan).run(level.jaxpr, level.consts, inner, level.path)
            order[:] = [item.probe.key for item in found]
            return [item.data for item in found]

        arrays = jit_once(run)(*level.args)
        held.update(((index, level.its), x) for index, x in zip(order, arrays, strict=True))
    return held


def _code(x: Any) -> Any:
    return probes.code(x) if probes.checkable(jax.typeof(x)) else jnp.float32(0)


def _worst(arrays: Any) -> Any:
    return jnp.max(jnp.stack([jnp.float32(0), *map(_code, arrays)]))
