"""What an equation holds inside: the bodies of calls, loops, branches and shard_map.

Primitives are known by name, since their classes are private to JAX. An equation of an unknown
primitive is opaque: it is run as it is, and its results are looked at.
"""

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["call", "scan", "while", "cond", "shard_map"]

_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "core_closed_call": "call_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_lin": "",
}
CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})
REMAT = frozenset({"remat", "remat2", "checkpoint"})
JITS = frozenset({"jit", "pjit"})


@dataclass(frozen=True, slots=True)
class Body:
    """Hold one jaxpr inside an equation.

    Attributes:
        step: What it adds to the path of its equation, None for nothing.
        kind: How its values are connected to the equation's.
        jaxpr: The open jaxpr.
        consts: Values of its constants.
    """

    step: Any
    kind: Kind
    jaxpr: Any
    consts: Any

    def path(self, outer: tuple[Any, ...]) -> tuple[Any, ...]:
        """Give its own path."""
        return outer if self.step is None else (*outer, self.step)


def bodies(eqn: Any) -> list[Body]:
    """List the bodies of an equation that can be opened, none for an opaque one."""
    name, params = eqn.primitive.name, eqn.params
    if name in _CALLS:
        inner = params.get(_CALLS[name]) or params.get("jaxpr") or params.get("call_jaxpr")
        if inner is None or not hasattr(inner, "eqns"):
            return []
        found = _body(None, "call", inner)
        return [found] if len(found.jaxpr.invars) == len(eqn.invars) else []
    if name == "scan":
        return [_body(None, "scan", params["jaxpr"])]
    if name == "while":
        return [_body(None, "while", params["body_jaxpr"])]
    if name == "cond":
        return [_body(i, "cond", branch) for i, branch in enumerate(params["branches"])]
    if name == "shard_map":
        return [_body(None, "shard_map", params["jaxpr"])]
    return []


# Their code inside is a single operation on numbers, or the linear algebra of a solver.
_SIMPLE = ("reduce", "scatter", "select_and", "sort", "arg", "cum", "approx", "custom_linear_solve")


def hides(eqn: Any) -> bool:
    """Tell whether an equation holds code that cannot be opened."""
    if bodies(eqn) or eqn.primitive.name.startswith(_SIMPLE):
        return False
    for value in eqn.params.values():
        items = value if isinstance(value, list | tuple) else [value]
        if any(hasattr(item, "eqns") for item in items):
            return True
    return False


def dropped(var: Any) -> bool:
    """Tell whether a variable stands for a result that nobody takes."""
    return type(var).__name__ == "DropVar"  # public under no name in every version


def _body(step: Any, kind: Kind, inner: Any) -> Body:
    return Body(step, kind, getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()))
