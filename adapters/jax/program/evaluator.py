"""Evaluate a jaxpr again, and take readings of chosen values on the way.

The readings come out as more results: no callback, no host read, and no change to what is
computed. Higher-order primitives are rebuilt from JAX's public functions, with their readings
carried along; one that is not known, or cannot be rebuilt, is run as it is, and only its results
can be read.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jc
from jax.extend import source_info_util

from anynan.errors import reason
from anynan.jax.graphs.bodies import JITS, REMAT, Body, backwards, bodies, rounds_of
from anynan.jax.graphs.versions import checked, dropped, manual_axes, rebind
from anynan.jax.read import probes
from anynan.jax.read.readings import (
    WIDE,
    Emission,
    Path,
    Plan,
    Probe,
    Shape,
    folded,
    kept_as,
    of_round,
    with_rounds,
)  # fmt: skip

# What calls back to the host.
CALLBACKS = frozenset({"pure_callback", "io_callback", "debug_callback"})
Rule = Callable[["Evaluator", Any, list[Any], Path], tuple[list[Any], list[Emission]]]


def jit_once(fn: Callable[..., Any]) -> Any:
    """Compile what runs once or twice: there the compiler's time counts, not the program's."""
    return jax.jit(fn, compiler_options=_quick()) if jax.default_backend() == "cpu" else jax.jit(fn)


@functools.cache
def _quick() -> dict[str, Any]:
    """Choose the options of XLA that its compiler for the CPU knows, and is fastest with."""
    options: dict[str, Any] = {"xla_backend_optimization_level": 0}
    faster = options | {"xla_cpu_use_fusion_emitters": False}  # half the time
    try:
        jax.jit(lambda: 0, compiler_options=faster).lower().compile()
    except Exception:  # noqa: BLE001  another version of XLA may have no such option
        return options
    return faster


def going_on(lanes: Any, new: list[Any], old: list[Any]) -> list[Any]:
    """Give what a round of a loop left under vmap: the lanes that are done stand still."""
    return [
        jnp.where(lanes.reshape(lanes.shape + (1,) * (jnp.ndim(a) - lanes.ndim)), a, b)
        for a, b in zip(new, old, strict=True)
    ]


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
        case "nan":
            return jnp.where(jnp.isnan(x).any(), jnp.nan, 0).astype(probes.wide())
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
            if self._leaves_out(eqn):
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

    def _leaves_out(self, eqn: Any) -> bool:
        caught = self.plan.callback is not None and eqn.primitive.name in CALLBACKS
        return self.plan.replaying and silent(eqn) and not caught

    def _equation(self, eqn: Any, ins: list[Any], path: Path) -> tuple[list[Any], list[Emission]]:
        plan = self.plan
        if plan.callback is not None and eqn.primitive.name in CALLBACKS:
            return plan.callback(eqn, ins, path), []
        if path in plan.inside and eqn.primitive.name not in plan.opaque:
            inner = bodies(eqn)
            if inner:
                try:
                    return _RULES[inner[0].kind](self, eqn, ins, path)
                except FloatingPointError:  # JAX looks for a NaN, and has found it
                    raise
                except Exception as error:  # noqa: BLE001  it costs its own readings, and no more
                    plan.shut[path] = reason(error)
                    return rebind(eqn, ins), [self.blank(x) for x in self._inside(eqn, path)]
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
                Shape(probe, kept_as(probe, var.aval, width), dims=dims)
                for probe in wanted.get(var, ())
            )

        for var in (*body.jaxpr.constvars, *body.jaxpr.invars):
            defined(var)
        for i, eqn in enumerate(body.jaxpr.eqns):
            if self._leaves_out(eqn):
                continue
            inner = (*path, i)
            if inner in self.plan.inside and eqn.primitive.name not in self.plan.opaque:
                found += self._inside(eqn, inner)
            for var in eqn.outvars:
                if not dropped(var):
                    defined(var)
        return found

    def _inside(self, eqn: Any, path: Path) -> Iterator["Shape"]:
        """Walk the readings inside an equation, in order."""
        for item in bodies(eqn):
            for shape in self.expected(item, item.path(path)):
                if item.kind in ("scan", "while"):
                    yield shape.looped(rounds_of(eqn))
                else:
                    yield shape.spread(item.devices) if item.devices else shape

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


# The rules. Each gives the results and the readings.


def _call(ev: Evaluator, eqn: Any, ins: list[Any], path: Path) -> tuple[list[Any], list[Emission]]:
    (body,) = bodies(eqn)
    name = eqn.primitive.name
    if name not in JITS and name not in REMAT:
        return ev.run(body.jaxpr, body.consts, ins, path)

    def staged(*args: Any) -> tuple[list[Any], list[Emission]]:
        return ev.run(body.jaxpr, body.consts, args, path)

    if name in JITS:
        options = placed(eqn)
        outs, made = (jax.jit(staged, **options) if options else staged)(*ins)
        return outs, made
    # The barriers against merging the two forward passes come from the primitive's own form.
    closed, form = jax.make_jaxpr(staged, return_shape=True)(*ins)
    inner = closed.jaxpr
    inner = inner.replace(constvars=[], invars=[*inner.constvars, *inner.invars])
    found = rebind(eqn, [*closed.consts, *ins], jaxpr=inner)
    outs, made = jax.tree.unflatten(jax.tree.structure(form), found)
    return outs, made


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


def _scan(ev: Evaluator, eqn: Any, ins: list[Any], path: Path) -> tuple[list[Any], list[Emission]]:
    (body,) = bodies(eqn)
    last, length, reverse = body.fixed + body.carried, rounds_of(eqn) or 0, backwards(eqn)
    consts, carry, xs = ins[: body.fixed], ins[body.fixed : last], ins[last:]
    shapes = [shape.looped(length) for shape in ev.expected(body, path)]
    start = [replace(ev.blank(shape), rounds=None) for shape in shapes]
    depth = ev.depth

    def step(state: Any, x: Any) -> Any:
        values, seen, count = state
        ev.depth = depth + 1
        try:
            outs, new = ev.run(body.jaxpr, body.consts, [*consts, *values, *x], path)
        finally:
            ev.depth = depth
        it = length - 1 - count if reverse else count
        seen = [folded(a, b, it, depth) for a, b in zip(new, seen, strict=True)]
        rounds = [of_round(item) for item, shape in zip(new, shapes, strict=True) if shape.kept]
        return (outs[: len(values)], seen, count + 1), (outs[len(values) :], rounds)

    (values, seen, _), (ys, rounds) = lax.scan(
        step, (list(carry), start, ev.vary(jnp.int32(0))), list(xs),
        length=length, reverse=reverse, unroll=eqn.params["unroll"],
    )  # fmt: skip
    return [*values, *ys], with_rounds(seen, shapes, rounds)


def _while(ev: Evaluator, eqn: Any, ins: list[Any], path: Path) -> tuple[list[Any], list[Emission]]:
    (body,) = bodies(eqn)
    of_cond, of_body = body.skip, body.skip + body.fixed
    cond = eqn.params["cond_jaxpr"]
    shapes = [shape.looped(None) for shape in ev.expected(body, path)]
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
        if jnp.ndim(lanes):
            outs = going_on(lanes, outs, values)
        seen = [folded(a, b, count, depth) for a, b in zip(new, seen, strict=True)]
        rounds = [of_round(item) for item, shape in zip(new, shapes, strict=True) if shape.kept]
        kept = [a.at[count].set(b, mode="drop") for a, b in zip(kept, rounds, strict=True)]
        return outs, seen, kept, count + 1

    values, seen, kept, _ = lax.while_loop(
        lambda state: jnp.any(going(state[0])),
        step,
        (list(ins[of_body:]), start, empty, ev.vary(jnp.int32(0))),
    )
    return list(values), with_rounds(seen, shapes, kept)


def _cond(ev: Evaluator, eqn: Any, ins: list[Any], path: Path) -> tuple[list[Any], list[Emission]]:
    branches = bodies(eqn)
    shapes = [ev.expected(branch, branch.path(path)) for branch in branches]
    blanks = [[ev.blank(shape) for shape in found] for found in shapes]

    def taken(i: int) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            branch = branches[i]
            outs, new = ev.run(branch.jaxpr, branch.consts, args, branch.path(path))
            return outs, [new if i == j else blank for j, blank in enumerate(blanks)]

        return run

    index, *args = ins
    outs, made = lax.switch(index, [taken(i) for i in range(len(branches))], *args)
    return outs, [item for found in made for item in found]


def _shard_map(
    ev: Evaluator, eqn: Any, ins: list[Any], path: Path
) -> tuple[list[Any], list[Emission]]:
    (body,) = bodies(eqn)
    p = eqn.params
    axes = manual_axes(p)

    def local(*args: Any) -> Any:
        outer, ev.axes = ev.axes, (*ev.axes, *axes)
        try:
            outs, made = ev.run(body.jaxpr, body.consts, args, path)
            spread = jax.tree.map(lambda x: ev.vary(x)[None], made)
        finally:
            ev.axes = outer
        return outs, spread

    devices = jax.sharding.PartitionSpec(axes)
    outs, found = jax.shard_map(
        local, mesh=p["mesh"], in_specs=tuple(p["in_specs"]),
        out_specs=(list(p["out_specs"]), devices), check_vma=checked(p),
        axis_names=set(axes),
    )(*ins)  # fmt: skip
    return outs, [replace(item, shards=True) for item in found]


_RULES: dict[str, Rule] = {
    "call": _call,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}
