"""Hand an operation's equations over to a bundle, with whole operands."""

import enum
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend.core import primitives

from anynan._bundle.calls import Call, Line, UnwritableError, encoded
from anynan._bundle.collector import Collector, Operands
from anynan._bundle.tensors import Held
from anynan.jax.program.evaluator import jit_once
from anynan.jax.read import probes
from anynan.jax.read.readings import Plan

if TYPE_CHECKING:
    from anynan._diagnosis.lineage import OpRecord
    from anynan.jax.replay.records import Moment, Recorder
    from anynan.jax.replay.steps import Step

# Where a primitive is known under its name, and what a script calls the place.
PLACES = {
    "lax": (jax.lax, "jax.lax"),
    "linalg": (jax.lax.linalg, "jax.lax.linalg"),
    "primitives": (primitives, "jax.extend.core.primitives"),
}


def host(x: Any) -> Held:
    """Bring an array to the host."""
    array = probes.on_host(x)
    return Held.of(array.dtype.name, array)


def inputs(into: Collector, step: "Step") -> None:
    """Take what the call was given: weights are among it."""
    for leaf, x in zip(step.program.leaves, step.inputs(), strict=True):
        if hasattr(x, "dtype"):
            keyed = jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
            into.add("call", leaf.name, jax.random.key_data(x) if keyed else x, host)


def operation(into: Collector, record: "OpRecord", recorder: "Recorder", bad: "Moment") -> None:
    """Take an operation, if it is the one that is wanted."""
    if into.wants(record):
        into.take(record, lambda operands: _call(recorder, bad, operands), host)


def _call(recorder: "Recorder", bad: "Moment", operands: Operands) -> Call:
    graph = recorder.graph
    nodes = sorted(bad.op.nodes, key=lambda node: node.index)
    # Up to the equation that made the bad value; what comes after it is not needed.
    last = next(i for i, node in enumerate(nodes) if bad.worst in node.outs)
    nodes = nodes[: last + 1]
    made: dict[int, Any] = {}
    outside = list(dict.fromkeys(i for node in nodes for i in node.ins))
    inside = {i for node in nodes for i in node.outs}
    names = dict(recorder._named(bad))
    held = _values(recorder, [i for i in outside if i not in inside], bad)
    for index, array in held.items():
        made[index] = operands.ref(names.get(index, f"v{index}"), array)
    missing = [i for i in outside if i not in inside and i not in held]
    lines = []
    if missing:
        what = f"the value of {graph.values[missing[0]].var} was not had"
        return Call(unwritable=what)
    text = "; ".join(str(node.eqn).splitlines()[0].strip() for node in nodes)[:2000]
    for node in nodes:
        try:
            keywords = {k: encoded(x, _other) for k, x in node.eqn.params.items()}
            function = _known_as(node.eqn.primitive)
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


def _values(recorder: "Recorder", indices: list[int], bad: "Moment") -> dict[int, Any]:
    """Give whole values as the operation saw them."""
    found: dict[int, Any] = {}
    plan, keys = Plan(replaying=True), {}
    for index in indices:
        value = recorder.graph.values[index]
        if value.known:
            number = np.asarray(value.constant, value.aval.dtype)  # of another shape, if folded
            found[index] = np.broadcast_to(number, value.aval.shape)
            continue
        key = recorder._key(index, bad)
        dtype = getattr(value.aval, "dtype", None)
        if key is None or dtype is None or jax.numpy.issubdtype(dtype, jax.dtypes.extended):
            continue
        keys[key] = index
        recorder.program.want(plan, index, "value", key[1])
    order: list[Any] = []

    def run(*inner: Any) -> list[Any]:
        _, made = recorder.program.evaluate(plan, inner)
        order[:] = [(item.probe.key, item.probe.at) for item in made]
        return [item.data for item in made]

    if keys:
        out = jit_once(run)(*recorder.arguments)
        shard = recorder._shard(bad) or 0
        for key, array in zip(order, out, strict=True):
            index = keys[key]
            spread = array.ndim > len(recorder.graph.values[index].aval.shape)
            found[index] = array[shard] if spread else array
    return found


def _known_as(primitive: Any) -> str:
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
    msg = f"an argument of it is a {type(value).__name__}"
    raise UnwritableError(msg)
