"""Hand an operation's equations over to a bundle, with whole operands."""

import enum
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import primitives

from anynan._calls.calls import Call, Line, UnwritableError, encoded
from anynan._calls.collector import Collector, Operands
from anynan.jax.graphs.graph import Graph
from anynan.jax.graphs.operations import Op
from anynan.jax.read.probes import on_host
from anynan.jax.replay.steps import Step

# Where a primitive is known under its name, and what a script calls the place.
PLACES = {
    "lax": (jax.lax, "jax.lax"),
    "linalg": (jax.lax.linalg, "jax.lax.linalg"),
    "primitives": (primitives, "jax.extend.core.primitives"),
}


def inputs(into: Collector, step: Step) -> None:
    """Take what the call was given: weights are among it."""
    for leaf, x in zip(step.program.leaves, step.inputs(), strict=True):
        if hasattr(x, "dtype"):
            keyed = jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
            into.add("call", leaf.name, jax.random.key_data(x) if keyed else x, on_host)


def call(
    graph: Graph, op: Op, worst: int, names: dict[int, str],
    values: Callable[[list[int]], dict[int, Any]], operands: Operands,
) -> Call:  # fmt: skip
    """Describe an operation.

    Args:
        graph: What it is in.
        op: The operation.
        worst: Its bad result.
        names: The names of its operands.
        values: Gives values as it saw them.
        operands: Takes what it works on.
    """
    nodes = sorted(op.nodes, key=lambda node: node.index)
    # Up to the equation that made the bad value; what comes after it is not needed.
    last = next(i for i, node in enumerate(nodes) if worst in node.outs)
    nodes = nodes[: last + 1]
    made: dict[int, Any] = {}
    outside = list(dict.fromkeys(i for node in nodes for i in node.ins))
    inside = {i for node in nodes for i in node.outs}
    held = values([i for i in outside if i not in inside])
    for index, array in held.items():
        made[index] = operands.ref(names.get(index, f"v{index}"), array)
    missing = [i for i in outside if i not in inside and i not in held]
    lines = []
    if missing:
        what = f"the value of {graph.values[missing[0]].var} was not recorded"
        return Call(unwritable=what)
    text = "; ".join(str(node.eqn).splitlines()[0].strip() for node in nodes)[:2000]
    for node in nodes:
        try:
            keywords = {k: encoded(x, _other) for k, x in node.eqn.params.items()}
            function = known_as(node.eqn.primitive)
        except UnwritableError as error:
            return Call(unwritable=str(error), text=text)
        given = [made[i] for i in node.ins]
        name = f"v{node.index}"
        lines.append(Line(name, function, given, keywords))
        for k, out in enumerate(node.outs):
            if out is not None:
                many = node.eqn.primitive.multiple_results
                made[out] = {"value": name, "item": k} if many else {"value": name}
    return Call(lines, lines[-1].gives)


def known_as(primitive: Any) -> str:
    """Give the name by which JAX has a primitive.

    Raises:
        UnwritableError: If it is none of JAX's own.
    """
    name = f"{primitive.name.removesuffix('_p')}_p"
    for place, (module, _) in PLACES.items():
        if getattr(module, name, None) is primitive:
            return f"{place}.{name}"
    msg = f"the primitive {primitive.name} has no name in jax.lax"
    raise UnwritableError(msg)


def _other(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return {"name": f"{type(value).__name__}.{value.name}"}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        fields = {name: encoded(item, _other) for name, item in value._asdict().items()}
        return {"object": type(value).__name__, "fields": fields}
    if isinstance(value, np.generic):
        return encoded(value.item(), _other)
    if isinstance(value, np.dtype) or (isinstance(value, type) and hasattr(value, "dtype")):
        return {"dtype": np.dtype(value).name}
    return None
