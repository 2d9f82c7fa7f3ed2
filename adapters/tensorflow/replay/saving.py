"""Hand an operation's nodes over to a bundle, with whole operands."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from anynan._calls.calls import Call, Line, UnwritableError, encoded
from anynan._calls.collector import Collector, Operands
from anynan.tensorflow.graphs.operations import Op, raw_call
from anynan.tensorflow.read.probes import on_host
from anynan.tensorflow.read.weights import parts
from anynan.tensorflow.replay.program import Copied, Program


def inputs(into: Collector, program: Program) -> None:
    """Take what the call was given, and the weights it read."""
    for placeholder, x in zip(program.graph.inputs, program.feeds, strict=True):
        label = program.labels.get(placeholder.op.name)
        if label is not None and isinstance(x, tf.Tensor) and placeholder.dtype != tf.resource:
            into.add("call", label, on_host(x), on_host)
    before = {id(x.variable): x.content for x in program.feeds if isinstance(x, Copied)}
    for variable in program.variables.values():
        name = str(getattr(variable, "path", getattr(variable, "name", "variable")))
        if hasattr(variable, "dtype") and variable.dtype not in (
            tf.resource,
            tf.variant,
            tf.string,
        ):
            held = (before[id(part)] for part in parts(variable) if id(part) in before)
            value = next(held, variable)
            into.add("weights", name.partition(":")[0], on_host(value), on_host)


def call(
    op: Op, worst: Any, names: dict[str, str], values: Callable[[list[Any]], dict[str, Any]],
    operands: Operands,
) -> Call:  # fmt: skip
    """Describe an operation.

    Args:
        op: The operation.
        worst: Its bad result.
        names: The names of its operands.
        values: Gives the values of tensors.
        operands: Takes what it works on.
    """
    last = next(i for i, node in enumerate(op.nodes) if node.name == worst.op.name)
    nodes = op.nodes[: last + 1]
    inside = {node.name for node in nodes}
    outside = [x for node in nodes for x in node.inputs if x.op.name not in inside]
    held = values(outside)
    refs = {
        x.name: operands.ref(_plain(names.get(x.name, x.op.name)), held[x.name])
        for x in outside
        if x.name in held
    }
    missing = [x.name for x in outside if x.name not in refs]
    if missing:
        msg = f"the value of {missing[0]} was not recorded"
        raise UnwritableError(msg)
    made = {node.name: f"v{i}" for i, node in enumerate(nodes)}

    def value(x: Any) -> Any:
        if x.name in refs:
            return refs[x.name]
        many = {"item": x.value_index} if len(x.op.outputs) > 1 else {}
        return {"value": made[x.op.name], **many}

    lines = [Line(made[node.name], *_node(node, value)) for node in nodes]
    return Call(lines, lines[-1].gives)


def _plain(name: str) -> str:
    return name.rpartition("/")[2] or name


def _node(node: Any, value: Any) -> tuple[str, list[Any], dict[str, Any]]:
    """Give a node as a call of ``tf.raw_ops``."""
    if not hasattr(tf.raw_ops, node.type):
        msg = f"{node.type} is none of TensorFlow's raw operations"
        raise UnwritableError(msg)
    inputs, attributes = raw_call(node, [value(x) for x in node.inputs])
    return node.type, [], inputs | {k: encoded(x, _other) for k, x in attributes.items()}


def _other(value: Any) -> Any:
    if isinstance(value, tf.DType):
        return {"dtype": value.name}
    if isinstance(value, tf.TensorShape) and value.is_fully_defined():
        return value.as_list()
    return encoded(value.decode(), _other) if isinstance(value, bytes) else None
