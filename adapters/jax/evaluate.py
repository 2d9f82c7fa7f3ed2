"""Evaluate a jaxpr again, and take readings of chosen values on the way.

The readings come out as more results: no callback, no host read, and no change to what is
computed. Higher-order primitives are rebuilt from JAX's public functions, with their readings
carried along; one that is not known is run as it is, and only its results can be read.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jc
from jax.extend import source_info_util

from anynan.jax import probes
from anynan.jax.nesting import JITS, REMAT, Body, bodies, dropped

Path = tuple[Any, ...]
What = Literal["code", "sum", "ends", "span", "value"]
# Their first column is a total, which is a word only after a loop.
TOTALS = ("sum", "span")
# Words of rounds that are kept for one reading, and of a loop whose length is not known.
ROUNDS, WHILE = 4096, 256
# They are a row of numbers, and not one.
WIDE = ("ends", "span")


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask for one reading of a value.

    Attributes:
        key: What the reading is known by.
        what: ``code`` (the word), ``ends`` (word, smallest, largest), ``value`` (all of it); for
            every step ``sum`` (the total) and ``span`` (total, smallest, largest).
        at: For ``value``: the iteration of each loop around it, outermost first.
        number: For ``sum`` and ``span``: its place among the readings.
    """

    key: Any
    what: What = "code"
    at: tuple[int, ...] = ()
    number: int = 0


@dataclass
class Plan:
    """Say what to read where.

    Attributes:
        probes: Path of a jaxpr in the program -> variable -> probes.
        inside: Paths that hold a probe somewhere inside; others are run untouched.
        replaying: Leave out effects whose results nobody uses.
        opaque: Primitives that are not to be opened.
        extra: Further statistics beside the ends.
        detached: Keep the readings out of the caller's differentiation.
        factors: What totals are scaled by, while the program is traced.
        rounds: Keep the word of every round of a loop.
    """

    probes: dict[Path, dict[Any, list[Probe]]] = field(default_factory=dict)
    inside: set[Path] = field(default_factory=set)
    replaying: bool = False
    opaque: frozenset[str] = frozenset()
    extra: tuple[str, ...] = ()
    detached: bool = False
    factors: Any = None
    rounds: bool = False

    def add(self, path: Path, var: Any, probe: Probe) -> None:
        """Ask for a reading."""
        self.probes.setdefault(path, {}).setdefault(var, []).append(probe)
        for length in range(len(path) + 1):
            self.inside.add(path[:length])


@dataclass(slots=True)
class Emission:
    """Hold one reading inside the program.

    Attributes:
        probe: What was asked for.
        data: The word, total, ends or array; with a leading axis of devices inside shard_map.
        its: Iteration of each loop around it in which the worst word was seen, outermost first.
        shards: True if there is a leading axis of devices.
        rounds: The word of every round, one axis for each loop, outermost first; None where
            they are not kept.
    """

    probe: Probe
    data: Any
    its: tuple[Any, ...] = ()
    shards: bool = False
    rounds: Any = None

    @property
    def word(self) -> Any:
        """Give the word out of the data."""
        found = self.data[..., 0] if self.wide else self.data
        return found if self.its or self.probe.what not in TOTALS else probes.words(found)

    @property
    def wide(self) -> bool:
        """Tell whether there is a row of numbers, and not one."""
        return self.probe.what in WIDE


Rule = Callable[["Evaluator", Any, list[Any], Path], tuple[list[Any], list[Emission]]]


def rebind(eqn: Any, ins: list[Any], **changed: Any) -> list[Any]:
    """Run an equation's primitive again, with some parameters changed."""
    bound = eqn.primitive.get_bind_params({**eqn.params, **changed})
    if isinstance(bound, dict):
        outs = eqn.primitive.bind(*ins, **bound)
    else:  # before JAX 0.10: the functions apart
        functions, rest = bound
        outs = eqn.primitive.bind(*functions, *ins, **rest)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def jit_once(fn: Callable[..., Any]) -> Any:
    """Compile what runs once or twice: there the compiler's time counts, not the program's."""
    if jax.default_backend() != "cpu":
        return jax.jit(fn)
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})


def silent(eqn: Any) -> bool:
    """Tell whether an equation is run only for its effect, such as a print."""
    return bool(eqn.effects) and all(dropped(var) for var in eqn.outvars)


def _take(probe: Probe, x: Any, plan: Plan) -> Any:
    match probe.what:
        case "sum":
            return probes.total([x], plan.factors, probe.number)
        case "span":
            return probes.span(x, plan.extra, plan.factors, probe.number)
        case "ends":
            return probes.ends(x, plan.extra)
        case "code":
            return probes.code(x)
    return x


class Evaluator:
    """Evaluate jaxprs under a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.axes: tuple[str, ...] = ()
        self.depth = 0

    def run(
        self, jaxpr: Any, consts: Any, args: Any, path: Path = ()
    ) -> tuple[list[Any], list[Emission]]:
        """Evaluate one jaxpr.

        Returns:
            Its results, and the readings in order.
        """
        plan = self.plan
        wanted = plan.probes.get(path, {})
        env: dict[Any, Any] = {}
        found: list[Emission] = []

        def read(var: Any) -> Any:
            return var.val if isinstance(var, jc.Literal) else env[var]

        def write(var: Any, value: Any) -> None:
            env[var] = value
            for probe in wanted.get(var, ()):
                seen = lax.stop_gradient(value) if plan.detached else value
                found.append(Emission(probe, self.vary(_take(probe, seen, plan))))

        for var, value in [
            *zip(jaxpr.constvars, consts, strict=True),
            *zip(jaxpr.invars, args, strict=True),
        ]:
            write(var, value)
        for i, eqn in enumerate(jaxpr.eqns):
            if plan.replaying and silent(eqn):
                continue
            ins = [read(var) for var in eqn.invars]
            info = eqn.source_info
            stack = source_info_util.current_name_stack() + info.name_stack
            with source_info_util.user_context(info.traceback, name_stack=stack), eqn.ctx.manager:
                outs, more = self._equation(eqn, ins, (*path, i))
            found += more
            for var, value in zip(eqn.outvars, outs, strict=True):
                if not dropped(var):
                    write(var, value)
        return [read(var) for var in jaxpr.outvars], found

    def _equation(self, eqn: Any, ins: list[Any], path: Path) -> tuple[list[Any], list[Emission]]:
        plan = self.plan
        if path in plan.inside and eqn.primitive.name not in plan.opaque:
            inner = bodies(eqn)
            if inner:
                return _RULES[inner[0].kind](self, eqn, ins, path)
        return rebind(eqn, ins), []

    def vary(self, x: Any) -> Any:
        """Make a value differ from device to device, as JAX's types have it in shard_map."""
        for axis in self.axes:
            if jnp.issubdtype(x.dtype, jnp.number):
                x = x + (lax.axis_index(axis) * 0).astype(x.dtype)
        return x

    # What the readings of a body will be, known before it is evaluated.

    def expected(self, body: Body, path: Path) -> list["Shape"]:
        """List the readings of a body, in order."""
        wanted = self.plan.probes.get(path, {})
        found: list[Shape] = []

        def defined(var: Any) -> None:
            width = 3 + len(self.plan.extra)
            dims = () if self.plan.rounds else None
            found.extend(
                Shape(probe, _shape(probe, var.aval, width), dims=dims)
                for probe in wanted.get(var, ())
            )

        for var in (*body.jaxpr.constvars, *body.jaxpr.invars):
            defined(var)
        for i, eqn in enumerate(body.jaxpr.eqns):
            if self.plan.replaying and silent(eqn):
                continue
            inner = (*path, i)
            if inner in self.plan.inside and eqn.primitive.name not in self.plan.opaque:
                for item in bodies(eqn):
                    more = self.expected(item, item.path(inner))
                    if item.kind in ("scan", "while"):
                        more = [shape.looped(_length(eqn)) for shape in more]
                    elif item.kind == "shard_map":
                        size = math.prod(eqn.params["mesh"].shape[a] for a in manual_axes(eqn))
                        more = [shape.spread(size) for shape in more]
                    found += more
            for var in eqn.outvars:
                if not dropped(var):
                    defined(var)
        return found

    def blank(self, shape: "Shape") -> Emission:
        """Make a reading of nothing, to start a loop with."""
        data = jnp.zeros(*shape.data)
        if shape.probe.what in WIDE:  # of no value at all
            data = data.at[..., 1].set(jnp.inf).at[..., 2].set(-jnp.inf)
        data = self.vary(data)
        lead = shape.data[0][:1] if shape.shards else ()
        its = tuple(self.vary(jnp.zeros(lead, jnp.int32)) for _ in range(shape.loops))
        rounds = None
        if shape.kept:
            rounds = self.vary(jnp.zeros((*lead, *(shape.dims or ())), jnp.float32))
        return Emission(shape.probe, data, its, shape.shards, rounds)


@dataclass(frozen=True, slots=True)
class Shape:
    """Say what a reading of a body will look like."""

    probe: Probe
    data: tuple[tuple[int, ...], Any]
    loops: int = 0
    shards: bool = False
    dims: tuple[int, ...] | None = None

    @property
    def kept(self) -> bool:
        """Tell whether there is a word for every round."""
        return bool(self.loops) and self.dims is not None

    def looped(self, length: int) -> "Shape":
        """Give the shape outside of a loop."""
        if self.probe.what == "value":
            return self
        dims = None if self.dims is None else (length, *self.dims)
        if dims is not None and math.prod(dims) > ROUNDS:
            dims = None
        return replace(self, loops=self.loops + 1, dims=dims)

    def spread(self, size: int) -> "Shape":
        """Give the shape outside of shard_map."""
        return replace(self, data=((size, *self.data[0]), self.data[1]), shards=True)


def _shape(probe: Probe, aval: Any, width: int) -> tuple[tuple[int, ...], Any]:
    if probe.what == "value":
        return tuple(aval.shape), aval.dtype
    if probe.what == "code":
        return (), jnp.float32
    return () if probe.what == "sum" else (width,), probes.wide()


def flat(items: list[Emission]) -> list[list[Any]]:
    """Give the arrays of readings."""
    return [
        [item.data, *item.its, *(() if item.rounds is None else (item.rounds,))] for item in items
    ]


def _back(like: list[Emission], arrays: Any) -> list[Emission]:
    found = []
    for item, (data, *rest) in zip(like, arrays, strict=True):
        rounds = None if item.rounds is None else rest.pop()
        found.append(Emission(item.probe, data, tuple(rest), item.shards, rounds))
    return found


def _length(eqn: Any) -> int:
    """Give how many rounds of a loop have a word of their own."""
    return int(eqn.params["length"]) if eqn.primitive.name == "scan" else WHILE


def _round(item: Emission) -> Any:
    """Give the words of the rounds inside of one round, or its own."""
    return item.word.astype(jnp.float32) if item.rounds is None else item.rounds


def _with_rounds(items: list[Emission], shapes: list["Shape"], rounds: Any) -> list[Emission]:
    """Put the words of all rounds, the newest loop first, to readings that keep them."""
    left = iter(rounds)
    found = []
    for item, shape in zip(items, shapes, strict=True):
        kept = next(left) if shape.kept else None
        if kept is not None and shape.shards:
            kept = jnp.moveaxis(kept, 0, 1)
        found.append(replace(item, rounds=kept))
    return found


# The rules. Each gives the results and the readings.


def _call(ev: Evaluator, eqn: Any, ins: list[Any], path: Path) -> tuple[list[Any], list[Emission]]:
    (body,) = bodies(eqn)
    name = eqn.primitive.name
    if name not in JITS and name not in REMAT:
        return ev.run(body.jaxpr, body.consts, ins, path)
    made: list[Emission] = []

    def staged(*args: Any) -> tuple[list[Any], list[list[Any]]]:
        nonlocal made
        outs, made = ev.run(body.jaxpr, body.consts, args, path)
        return outs, flat(made)

    if name in JITS:
        options = placed(eqn)
        if not options:
            return ev.run(body.jaxpr, body.consts, ins, path)
        outs, arrays = jax.jit(staged, **options)(*ins)
        return outs, _back(made, arrays)
    # The barriers against merging the two forward passes come from the primitive's own form.
    closed = jax.make_jaxpr(staged)(*ins)
    inner = closed.jaxpr
    inner = inner.replace(constvars=[], invars=[*inner.constvars, *inner.invars])
    found = rebind(eqn, [*closed.consts, *ins], jaxpr=inner)
    count = len(eqn.outvars)
    rest = found[count:]
    again = []
    for arrays in flat(made):
        again.append(rest[: len(arrays)])
        rest = rest[len(arrays) :]
    return found[:count], _back(made, again)


def placed(eqn: Any) -> dict[str, Any]:
    """Give the shardings that an inner jit was made with, to make it again."""
    found: dict[str, Any] = {}
    ins, outs = (
        [None if "Unspecified" in type(s).__name__ else s for s in eqn.params.get(name) or ()]
        for name in ("in_shardings", "out_shardings")
    )
    if any(s is not None for s in ins):
        found["in_shardings"] = tuple(ins)
    if any(s is not None for s in outs):
        found["out_shardings"] = (outs, None)
    return found


def _fold(new: Emission, old: Emission, it: Any, depth: int) -> Emission:
    """Join what an iteration saw with what those before it saw."""
    if new.probe.what == "value":
        now = it == new.probe.at[depth]
        now = now if not jnp.ndim(now) else now.reshape(now.shape + (1,) * (new.data.ndim - 1))
        return replace_data(new, jnp.where(now, new.data, old.data))
    worse = new.word > old.word
    data = new.data
    if new.wide:
        low = jnp.minimum(new.data[..., 1], old.data[..., 1])
        high = jnp.maximum(new.data[..., 2], old.data[..., 2])
        word = jnp.maximum(new.word, old.word).astype(data.dtype)
        data = jnp.concatenate([jnp.stack([word, low, high], axis=-1), new.data[..., 3:]], axis=-1)
    else:
        data = jnp.maximum(new.word, old.word).astype(data.dtype)
    its = (jnp.broadcast_to(it, new.word.shape), *new.its)
    kept = tuple(jnp.where(worse, a, b) for a, b in zip(its, old.its, strict=True))
    return Emission(new.probe, data, kept, new.shards)


def replace_data(item: Emission, data: Any) -> Emission:
    """Give a reading with other data."""
    return Emission(item.probe, data, item.its, item.shards)


def _scan(ev: Evaluator, eqn: Any, ins: list[Any], path: Path) -> tuple[list[Any], list[Emission]]:
    (body,) = bodies(eqn)
    p = eqn.params
    consts, rest = ins[: p["num_consts"]], ins[p["num_consts"] :]
    carry, xs = rest[: p["num_carry"]], rest[p["num_carry"] :]
    shapes = [shape.looped(p["length"]) for shape in ev.expected(body, path)]
    start = [replace(ev.blank(shape), rounds=None) for shape in shapes]
    depth = ev.depth

    def step(state: Any, x: Any) -> Any:
        values, seen, count = state
        ev.depth = depth + 1
        try:
            outs, new = ev.run(body.jaxpr, body.consts, [*consts, *values, *x], path)
        finally:
            ev.depth = depth
        it = p["length"] - 1 - count if p["reverse"] else count
        old = _back(start, seen)
        seen = flat([_fold(a, b, it, depth) for a, b in zip(new, old, strict=True)])
        rounds = [_round(item) for item, shape in zip(new, shapes, strict=True) if shape.kept]
        return (outs[: len(values)], seen, count + 1), (outs[len(values) :], rounds)

    (values, seen, _), (ys, rounds) = lax.scan(
        step, (list(carry), flat(start), ev.vary(jnp.int32(0))), list(xs),
        length=p["length"], reverse=p["reverse"], unroll=p["unroll"],
    )  # fmt: skip
    return [*values, *ys], _with_rounds(_back(start, seen), shapes, rounds)


def _while(ev: Evaluator, eqn: Any, ins: list[Any], path: Path) -> tuple[list[Any], list[Emission]]:
    (body,) = bodies(eqn)
    p = eqn.params
    of_cond, of_body = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    cond = p["cond_jaxpr"]
    shapes = [shape.looped(WHILE) for shape in ev.expected(body, path)]
    start = [replace(ev.blank(shape), rounds=None) for shape in shapes]
    empty = [
        jnp.moveaxis(rounds, 1, 0) if shape.shards else rounds
        for shape in shapes
        if (rounds := ev.blank(shape).rounds) is not None
    ]
    depth = ev.depth

    def going(values: Any) -> Any:
        return jax.core.eval_jaxpr(cond.jaxpr, cond.consts, *ins[:of_cond], *values)[0]

    def step(state: Any) -> Any:
        values, seen, kept, count = state
        ev.depth = depth + 1
        try:
            args = [*ins[of_cond:of_body], *values]
            outs, new = ev.run(body.jaxpr, body.consts, args, path)
        finally:
            ev.depth = depth
        lanes = going(values)
        if jnp.ndim(lanes):  # under vmap: the lanes that are done stand still
            outs = [
                jnp.where(lanes.reshape(lanes.shape + (1,) * (jnp.ndim(a) - lanes.ndim)), a, b)
                for a, b in zip(outs, values, strict=True)
            ]
        old = _back(start, seen)
        seen = flat([_fold(a, b, count, depth) for a, b in zip(new, old, strict=True)])
        rounds = [_round(item) for item, shape in zip(new, shapes, strict=True) if shape.kept]
        kept = [a.at[count].set(b, mode="drop") for a, b in zip(kept, rounds, strict=True)]
        return outs, seen, kept, count + 1

    values, seen, kept, _ = lax.while_loop(
        lambda state: jnp.any(going(state[0])),
        step,
        (list(ins[of_body:]), flat(start), empty, ev.vary(jnp.int32(0))),
    )
    return list(values), _with_rounds(_back(start, seen), shapes, kept)


def _cond(ev: Evaluator, eqn: Any, ins: list[Any], path: Path) -> tuple[list[Any], list[Emission]]:
    branches = bodies(eqn)
    shapes = [ev.expected(branch, branch.path(path)) for branch in branches]
    blanks = [[ev.blank(shape) for shape in found] for found in shapes]

    def taken(i: int) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            branch = branches[i]
            outs, new = ev.run(branch.jaxpr, branch.consts, args, branch.path(path))
            return outs, [flat(new if i == j else blank) for j, blank in enumerate(blanks)]

        return run

    index, *args = ins
    outs, made = lax.switch(index, [taken(i) for i in range(len(branches))], *args)
    found = [
        item for blank, arrays in zip(blanks, made, strict=True) for item in _back(blank, arrays)
    ]
    return outs, found


def manual_axes(eqn: Any) -> tuple[str, ...]:
    """Give the mesh axes that a shard_map makes manual, in the mesh's order."""
    p = eqn.params
    axes = p.get("newly_manual_axes", p.get("manual_axes"))
    if axes is None:
        axes = set(p["mesh"].axis_names) - set(p.get("auto", ()))
    return tuple(a for a in p["mesh"].axis_names if a in axes)


def _specs(given: Any) -> Any:
    return tuple(given)


def _shard_map(
    ev: Evaluator, eqn: Any, ins: list[Any], path: Path
) -> tuple[list[Any], list[Emission]]:
    (body,) = bodies(eqn)
    p = eqn.params
    axes = manual_axes(eqn)
    made: list[Emission] = []

    def local(*args: Any) -> Any:
        nonlocal made
        outer, ev.axes = ev.axes, (*ev.axes, *axes)
        try:
            outs, made = ev.run(body.jaxpr, body.consts, args, path)
            spread = [[ev.vary(array)[None] for array in arrays] for arrays in flat(made)]
        finally:
            ev.axes = outer
        return outs, spread

    devices = jax.sharding.PartitionSpec(axes)
    names = [p.get("check_vma", p.get("check_rep", True)), set(axes)]
    outs, arrays = jax.shard_map(
        local, mesh=p["mesh"], in_specs=_specs(p["in_specs"]),
        out_specs=(list(p["out_specs"]), devices), check_vma=names[0], axis_names=names[1],
    )(*ins)  # fmt: skip
    return outs, [replace(item, shards=True) for item in _back(made, arrays)]


_RULES: dict[str, Rule] = {
    "call": _call,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}
