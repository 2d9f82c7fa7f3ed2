"""Look into nested loops round by round: only the first bad round of each is read.

A compiler takes minutes over hundreds of readings of every round of loops in loops. So the program
runs once as it is, and keeps of each loop what its first bad round was given. It runs a second time
with that one round in the place of each loop, and nothing is left in it but operations in a row.
What is compiled is the same for any depth of loops.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from anynan.jax.graphs.bodies import JITS, Body, bodies, lanes
from anynan.jax.program.evaluator import CALLBACKS, Evaluator, jit_once, placed, silent
from anynan.jax.program.program import Program
from anynan.jax.program.watch import SMALL
from anynan.jax.read import probes
from anynan.jax.read.readings import Emission, Path, Plan, Probe

_LOOPS = frozenset({"scan", "while"})


@dataclass
class Round:
    """Hold the first bad round of a loop, in the first bad round of each loop around it.

    Attributes:
        at: Which it is, -1 for none.
        given: What it was given beside what every round is.
        outs: What the loop gave.
        worst: The worst word in what the loop gave.
        before: The worst word in what that round was given.
        inner: The loops inside of it, in order.
    """

    at: Any
    given: Any
    outs: Any
    worst: Any
    before: Any
    inner: Any


jax.tree_util.register_dataclass(
    Round, ["at", "given", "outs", "worst", "before", "inner"], meta_fields=[]
)


def nested(program: Program, wanted: Any) -> bool:
    """Tell whether values are inside loops in loops, and nothing else is in the way."""
    graph = program.graph
    deep = any(graph.values[i].loops > 1 for i in wanted)
    return deep and not any(
        eqn.primitive.name == "shard_map" for node in graph.nodes for eqn in node.chain
    )


@dataclass
class Nest:
    """Say which loops of a program are looked into.

    Attributes:
        inside: Paths that hold what is looked for.
        quiet: Has the rest run as it is, but for what calls back to the host.
        within: Reads what makes a round bad also where it does not leave it.
        bad: Each of these values, and the least word of it that does.
    """

    inside: set[Path]
    quiet: Plan
    within: Plan
    bad: Mapping[int, int]

    def opens(self, eqn: Any, path: Path) -> Body | None:
        """Give the body of an equation that is run through: of a loop, or of a call."""
        name = eqn.primitive.name
        # What is made in a branch does not leave it.
        if path not in self.inside or name == "cond" or (name in JITS and placed(eqn)):
            return None
        found = bodies(eqn)
        if not found or silent(eqn) or (name == "scan" and not eqn.params["length"]):
            return None
        if lanes(eqn):
            return None
        return found[0]

    def loops(self, jaxpr: Any, path: Path = ()) -> Iterator[tuple[Path, Any, Body]]:
        """Walk the loops of a jaxpr in order, and not those inside of them."""
        for i, eqn in enumerate(jaxpr.eqns):
            inner = (*path, i)
            body = self.opens(eqn, inner)
            if body is not None and body.kind in _LOOPS:
                yield inner, eqn, body
            elif body is not None:
                yield from self.loops(body.jaxpr, inner)

    def paths(self, jaxpr: Any, path: Path = ()) -> Iterator[Path]:
        """Walk the paths of all loops."""
        for inner, _, body in self.loops(jaxpr, path):
            yield inner
            yield from self.paths(body.jaxpr, inner)

    def blank(self, jaxpr: Any, path: Path) -> list[Round]:
        """Give what is known of the loops of a jaxpr before it runs."""
        found = []
        for inner, eqn, body in self.loops(jaxpr, path):
            avals = [var.aval for var in body.jaxpr.invars[body.fixed :]]
            given, outs = (
                [jnp.zeros(x.shape, x.dtype) for x in mine]
                for mine in (avals, [var.aval for var in eqn.outvars])
            )
            fine, inside = jnp.float32(0), self.blank(body.jaxpr, inner)
            found.append(Round(jnp.int32(-1), given, outs, fine, fine, inside))
        return found


class _Search(Evaluator):
    """Run a program as it is; its loops keep what their first bad round gets."""

    def __init__(self, nest: Nest, least: dict[Path, Any]) -> None:
        super().__init__(nest.within)
        self.nest, self.least = nest, least
        self.seen: list[Round] = []

    def _equation(self, eqn: Any, ins: list[Any], path: Path) -> tuple[list[Any], list[Emission]]:
        body = self.nest.opens(eqn, path)
        if body is None:
            return Evaluator(self.nest.quiet)._equation(eqn, ins, path)
        if body.kind not in _LOOPS:
            return self.run(body.jaxpr, body.consts, ins, path)
        found = self._loop(eqn, body, ins, path)
        self.seen.append(found)
        return list(found.outs), []

    def _loop(self, eqn: Any, body: Body, ins: list[Any], path: Path) -> Round:
        p, first = eqn.params, body.skip + body.fixed
        last = first + body.carried
        consts, carry, xs = ins[body.skip : first], ins[first:last], ins[last:]
        start, least = _words(carry), self.least[path]

        def turn(state: Any, x: Any) -> Any:
            values, at, kept, count = state
            inside = _Search(self.nest, self.least)
            outs, found = inside.run(body.jaxpr, body.consts, [*consts, *values, *x], path)
            words = _words(outs)
            came = jnp.pad(start, (0, len(outs) - len(carry)))
            now = jnp.any((words >= least) & (words > came))
            if self.nest.within.probes:
                bounds = jnp.array([self.nest.bad[item.probe.key] for item in found], float)
                held = jnp.any(_words([item.data for item in found]) >= bounds)
                now |= held | jnp.any(jnp.array([mine.at for mine in inside.seen]) >= 0)
            now &= at < 0
            mine = [*values, *x], inside.seen
            kept = lax.cond(now, lambda a, _: a, lambda _, b: b, mine, kept)
            it = p["length"] - 1 - count if p.get("reverse") else count
            state = outs[: len(carry)], jnp.where(now, it, at), kept, count + 1
            return state, outs[len(carry) :]

        kept = [*carry, *(x[0] for x in xs)], self.nest.blank(body.jaxpr, path)
        begin = list(carry), jnp.int32(-1), kept, jnp.int32(0)
        if body.kind == "scan":
            (values, at, (given, inner), _), ys = lax.scan(
                turn, begin, list(xs), length=p["length"], reverse=p["reverse"]
            )
            outs = [*values, *ys]
        else:
            cond = p["cond_jaxpr"]

            def going(state: Any) -> Any:
                args = *ins[: body.skip], *state[0]
                return jax.core.eval_jaxpr(cond.jaxpr, cond.consts, *args)[0]

            outs, at, (given, inner), _ = lax.while_loop(going, lambda s: turn(s, [])[0], begin)
        worst, before = (jnp.max(_words(x), initial=0) for x in (outs, given))
        return Round(at, given, list(outs), worst, before, inner)


class _OneRound(Evaluator):
    """Evaluate a program with one round in the place of each loop that was looked into."""

    def __init__(self, plan: Plan, nest: Nest, rounds: dict[Path, Round]) -> None:
        super().__init__(plan)
        self.nest, self.rounds = nest, rounds

    def _equation(self, eqn: Any, ins: list[Any], path: Path) -> tuple[list[Any], list[Emission]]:
        body, found = self.nest.opens(eqn, path), self.rounds.get(path)
        if body is not None and found is not None:
            made: list[Emission] = []
            if path in self.plan.inside:
                given = [*ins[body.skip : body.skip + body.fixed], *found.given]
                _, made = self.run(body.jaxpr, body.consts, given, path)
            return list(found.outs), made
        if path not in self.plan.inside or eqn.primitive.name in _LOOPS:
            return Evaluator(self.nest.quiet)._equation(eqn, ins, path)
        if body is None:
            return super()._equation(eqn, ins, path)
        return self.run(body.jaxpr, body.consts, ins, path)


@dataclass
class Look:
    """Hold one round of each loop of a program that ran.

    Attributes:
        program: What ran.
        nest: Its loops.
        arrays: What it was given.
        outs: What it gave.
        rounds: The first bad round of each loop, by the path of its body.
        its: The number of that round, and of those around it.
    """

    program: Program
    nest: Nest
    arrays: list[Any]
    outs: list[Any]
    rounds: dict[Path, Round] = field(default_factory=dict)
    its: dict[Path, tuple[int, ...]] = field(default_factory=dict)

    def take(self, jaxpr: Any, seen: list[Round], path: Path = ()) -> dict[Path, int]:
        """Take the rounds of the loops of a jaxpr, and of those inside of these rounds.

        Returns:
            The worst word in what each round was given, or in what the loop gave if none was bad.
        """
        words: dict[Path, int] = {}
        for (inner, _, body), mine in zip(self.nest.loops(jaxpr, path), seen, strict=True):
            at = int(mine.at)
            self.rounds[inner] = mine
            words[inner] = int(mine.worst if at < 0 else mine.before)
            if at >= 0:
                self.its[inner] = (*self.its.get(path, ()), at)
                words |= self.take(body.jaxpr, mine.inner, inner)
        return words

    def of(self, index: int) -> tuple[int, ...] | None:
        """Give the round in which a value is read, None if it is in no round that was kept."""
        value = self.program.graph.values[index]
        mine = [its for path, its in self.its.items() if value.path[: len(path)] == path]
        found = max(mine, key=len, default=())
        return found if len(found) == value.loops else None

    def read(self, wanted: dict[int, Any], extra: tuple[str, ...] = ()) -> list[Emission]:
        """Run the program with one round in the place of each loop, and values read.

        Args:
            wanted: What to read of which value.
            extra: Further statistics beside the ends.
        """
        plan = replace(self.nest.quiet, probes={}, inside=set(), extra=extra)
        beside: set[int] = set()
        for number, (index, what) in enumerate(wanted.items()):
            value = self.program.graph.values[index]
            if self.of(index) is None:
                continue
            if what == "sum" and value.aval.size <= SMALL:
                beside.add(index)
            mine: Any = "value" if index in beside else what
            plan.add(value.path, value.var, Probe(index, mine, (), number))

        def run(factors: Any, rounds: list[Round], *inner: Any) -> list[Emission]:
            plan.factors = factors
            ev = _OneRound(plan, self.nest, dict(zip(self.rounds, rounds, strict=True)))
            closed = self.program.closed
            _, found = ev.run(closed.jaxpr, closed.consts, inner)
            small = [item for item in found if item.probe.key in beside]
            rest = [item for item in found if item.probe.key not in beside]
            return [*rest, *_beside(small, factors)]

        found: list[Emission] = jit_once(run)(
            probes.scales(len(wanted)), list(self.rounds.values()), *self.arrays
        )
        return found

    def capture(self, wanted: Any) -> dict[Any, Any]:
        """Give the arrays of values in the rounds that were looked at.

        Args:
            wanted: Numbers of the values, with the round of each loop around them.
        """
        mine = [key for key in wanted if self.of(key[0]) == key[1]]
        results = dict(zip(self.program.graph.results, self.outs, strict=True))
        held = {key: results[key[0]] for key in mine if key[0] in results}
        rest = {index: "value" for index, its in mine if (index, its) not in held}
        found = self.read(rest) if rest else []
        return held | {(x.probe.key, self.of(x.probe.key)): x.data for x in found}


def look(program: Program, arrays: list[Any], wanted: Any, inside: Mapping[int, int]) -> Look:
    """Run a program, and keep the first bad round of each loop that a value is in.

    Args:
        program: What to run.
        arrays: Its arguments.
        wanted: Numbers of the values.
        inside: Values by which a round is bad, too, that do not leave it: the least word of each.
    """
    graph, opened = program.graph, Plan()
    quiet = Plan(replaying=True, callback=program.catcher)
    for node in graph.nodes:
        if node.name in CALLBACKS or silent(node.eqn):
            quiet.open(node.path)
    for index in wanted:
        opened.open(graph.values[index].path)
    within = replace(quiet, probes={}) if inside else quiet
    for index in inside:
        value = graph.values[index]
        if probes.checkable(value.aval):
            within.probes.setdefault(value.path, {})[value.var] = [Probe(index, "value", ())]
    nest = Nest(opened.inside, quiet, within, inside)
    closed = program.closed
    least = dict.fromkeys(nest.paths(closed.jaxpr), probes.NAN)

    def run(words: Any, *inner: Any) -> Any:
        ev = _Search(nest, dict(zip(least, words, strict=True)))
        return ev.run(closed.jaxpr, closed.consts, inner)[0], ev.seen

    compiled, lowered = jit_once(run), set[Path]()
    while True:
        outs, seen = compiled(np.array([*least.values()], np.float32), *arrays)
        found = Look(program, nest, arrays, outs)
        words = found.take(closed.jaxpr, seen)
        # An Inf that came before is what the NaN was made of.
        more = {path: word for path, word in words.items() if word and path not in lowered}
        # Another round may be the first bad one then, and the loops inside are found anew.
        outer = [p for p in more if not any(p[:n] in more for n in range(len(p)))]
        more = {path: more[path] for path in outer}
        lowered |= more.keys()
        least |= {path: min(word, probes.POSINF) for path, word in more.items()}
        if not more:
            return found


def _alike(arrays: list[Any]) -> list[list[int]]:
    """Put small arrays of one shape and dtype together, and leave out what cannot be bad.

    Each reading is a kernel of its own, and kernels are what takes long to compile.
    """
    groups: dict[Any, list[int]] = {}
    for i, aval in enumerate(map(jax.typeof, arrays)):
        if probes.checkable(aval):
            key = (aval.shape, aval.dtype) if aval.size <= SMALL else i
            groups.setdefault(key, []).append(i)
    return list(groups.values())


def _words(arrays: list[Any]) -> Any:
    """Give the worst kind in each array."""
    words = jnp.zeros(len(arrays), jnp.float32)
    for many in _alike(arrays):
        if len(many) == 1:  # without a copy
            found = probes.code(arrays[many[0]])
        else:
            found = jax.vmap(probes.code)(jnp.stack([arrays[i] for i in many]))
        words = words.at[np.array(many)].set(found)
    return words


def _beside(items: list[Emission], factors: Any) -> Iterator[Emission]:
    """Turn values into their totals."""
    for many in _alike([item.data for item in items]):
        rows = jnp.stack([jnp.ravel(items[i].data) for i in many])
        totals = probes.totals(rows, factors, items[many[0]].probe.number)
        for i, total in zip(many, totals, strict=True):
            yield Emission(replace(items[i].probe, what="sum"), total)
