"""What an equation holds inside: the bodies of calls, loops, branches and shard_map.

Primitives are known by name, since their classes are private to JAX. An equation of an unknown
primitive is opaque: it is run as it is, and its results are looked at.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from anynan.jax.graphs.versions import PARAMETERS, expanded, manual_axes, scanned

Kind = Literal["call", "scan", "while", "cond", "shard_map"]

CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})
REMAT = frozenset({"remat", "remat2", "checkpoint"})
JITS = frozenset({"jit", "pjit"})
_CALLS = {
    **dict.fromkeys(JITS | REMAT, "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call", "core_closed_call", "eval_jaxpr"), "call_jaxpr"),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_lin": "",
}


@dataclass(frozen=True, slots=True)
class Body:
    """Hold one jaxpr inside an equation.

    Attributes:
        step: What it adds to the path of its equation, None for nothing.
        kind: How its values are connected to the equation's.
        jaxpr: The open jaxpr.
        consts: Values of its constants.
        skip: How many of the equation's first operands are not its own.
        fixed: How many of its first arguments are the same in every round.
        carried: How many after those a round hands to the next.
        devices: Over how many devices its arguments are spread, 0 for none.
    """

    step: Any
    kind: Kind
    jaxpr: Any
    consts: Any
    skip: int = 0
    fixed: int = 0
    carried: int = 0
    devices: int = 0

    def path(self, outer: tuple[Any, ...]) -> tuple[Any, ...]:
        """Give its own path."""
        return outer if self.step is None else (*outer, self.step)

    def fits(self, eqn: Any) -> bool:
        """Tell whether it takes and gives what its equation does."""
        given, made = len(eqn.invars) - self.skip, len(self.jaxpr.outvars)
        return given == len(self.jaxpr.invars) and made == len(eqn.outvars)


def bodies(eqn: Any) -> list[Body]:
    """List the bodies of an equation that can be opened, none for an opaque one.

    An equation that has other parameters than those that are known is opaque, too.
    """
    name = eqn.primitive.name
    if name not in _OPENED or not eqn.params.keys() <= PARAMETERS.get(name, eqn.params.keys()):
        return []
    try:
        found = _OPENED[name](eqn)
        return found if all(body.fits(eqn) for body in found) else []
    except Exception:  # noqa: BLE001  another version of JAX has another form of it
        return []


def _call(eqn: Any) -> list[Body]:
    name, params = eqn.primitive.name, eqn.params
    inner = params.get(_CALLS[name]) or params.get("jaxpr") or params.get("call_jaxpr")
    return [_body(None, "call", inner)] if hasattr(inner, "eqns") else []


def _scan(eqn: Any) -> list[Body]:
    fixed, carried = scanned(eqn.params)
    return [_body(None, "scan", eqn.params["jaxpr"], fixed=fixed, carried=carried)]


def _while(eqn: Any) -> list[Body]:
    p, carried = eqn.params, len(eqn.outvars)
    skip, fixed = p["cond_nconsts"], p["body_nconsts"]
    return [_body(None, "while", p["body_jaxpr"], skip=skip, fixed=fixed, carried=carried)]


def _cond(eqn: Any) -> list[Body]:
    return [_body(i, "cond", branch, skip=1) for i, branch in enumerate(eqn.params["branches"])]


def _shard_map(eqn: Any) -> list[Body]:
    sizes, axes = eqn.params["mesh"].shape, manual_axes(eqn.params)
    devices = math.prod(sizes[axis] for axis in axes)
    return [_body(None, "shard_map", eqn.params["jaxpr"], devices=devices)]


_OPENED: dict[str, Callable[[Any], list[Body]]] = {
    **dict.fromkeys(_CALLS, _call),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    "call_hi_primitive": lambda eqn: [_body(None, "call", expanded(eqn))],
}


def rounds_of(eqn: Any) -> int | None:
    """Give how many rounds a loop has, None where that is not known."""
    return int(eqn.params["length"]) if eqn.primitive.name == "scan" else None


def backwards(eqn: Any) -> bool:
    """Tell whether a loop begins with its last round."""
    return bool(eqn.params.get("reverse", False))


# Their code inside is a single operation on numbers, or the linear algebra of a solver.
_SIMPLE = ("reduce", "scatter", "select_and", "sort", "arg", "cum", "approx", "custom_linear_solve")


def hides(eqn: Any) -> bool:
    """Tell whether an equation holds code that cannot be opened."""
    name = eqn.primitive.name
    if bodies(eqn) or name.startswith(_SIMPLE):
        return False
    values = [x for v in eqn.params.values() for x in (v if isinstance(v, list | tuple) else [v])]
    return name in _OPENED or any(hasattr(x, "eqns") for x in values)


def _body(step: Any, kind: Kind, inner: Any, **counts: int) -> Body:
    return Body(step, kind, getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), **counts)


def lanes(eqn: Any) -> bool:
    """Tell whether it is a loop under vmap, whose lanes end apart."""
    return eqn.primitive.name == "while" and bool(eqn.params["cond_jaxpr"].out_avals[0].shape)
