"""The operations of a graph, forward ones and gradients, and which belongs to which."""

import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from anynan._base.walks import walk
from anynan.events import Phase, Source
from anynan.tensorflow.graphs import lines, names
from anynan.tensorflow.graphs.traces import Trace, scopes
from anynan.tensorflow.read.probes import SCOPE, is_float

# The scope of what a tape makes, and that of ``tf.gradients``.
BACKWARD = "gradient_tape"
_SLOPES = re.compile(rf"{BACKWARD}|gradients(_\d+)?")


@dataclass(slots=True)
class Op:
    """Hold one operation: a node, or the nodes of one gradient.

    Attributes:
        index: Its number, in the order of execution.
        nodes: Its nodes.
        name: Canonical name.
        phase: Phase it runs in.
        layer: Layer path.
        call: Which call of the layer.
        forward: The forward operation, for a gradient's.
        ins: Float tensors that come from outside of it.
        outs: Float tensors that it makes.
        lines: Lines of its first node.
    """

    index: int
    nodes: list[Any]
    name: str
    phase: Phase
    layer: str | None
    call: int
    forward: "Op | None" = None
    ins: list[Any] = field(default_factory=list)
    outs: list[Any] = field(default_factory=list)
    lines: Any = ()

    @property
    def kind(self) -> str:
        """Give the framework's type of a forward operation."""
        return str((self.forward or self).nodes[0].type)

    @property
    def raw(self) -> str:
        """Give the framework's own names."""
        return ", ".join(list(dict.fromkeys(node.type for node in self.nodes))[:4])

    @property
    def source(self) -> Source | None:
        """Find the user's line: for a gradient the forward line."""
        return lines.source((self.forward or self).lines)


def results(node: Any) -> list[Any]:
    """Give a node's float results; the last ones of a batch norm are memory that it keeps."""
    most = names.RESULTS.get(node.type)
    return [out for out in node.outputs[:most] if is_float(out)]


def arguments(known: Any, attribute: Callable[[str], Any], inputs: Sequence[Any]) -> dict[str, Any]:
    """Give the inputs of an operation, or others in their place, by their names.

    Args:
        known: What TensorFlow defines the operation as.
        attribute: Gives an attribute of it.
        inputs: The inputs.
    """
    left, found = list(inputs), dict[str, Any]()
    for argument in known.input_arg:
        count = None
        if argument.number_attr:
            count = int(attribute(argument.number_attr))
        elif argument.type_list_attr:
            count = len(attribute(argument.type_list_attr))
        found[argument.name] = left[0] if count is None else left[:count]
        left = left[1 if count is None else count :]
    return found


def inferred(known: Any) -> set[str]:
    """Name the attributes that the inputs of an operation tell."""
    return {
        name
        for argument in known.input_arg
        for name in (argument.type_attr, argument.number_attr, argument.type_list_attr)
    }


def raw_call(node: Any, inputs: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Give what ``tf.raw_ops`` has to be called with for a node: its inputs, its attributes.

    Args:
        node: The node.
        inputs: What stands in the place of its inputs.
    """
    known = inspect.signature(getattr(tf.raw_ops, node.type)).parameters
    given = arguments(node.op_def, node.get_attr, inputs)
    attributes = {attribute.name for attribute in node.op_def.attr}
    # Some are called otherwise in Python: the axis of a sum.
    others = (name for name in known if name not in given and name not in attributes)
    told = inferred(node.op_def)
    named = {name if name in known else next(others): x for name, x in given.items()}
    chosen = [x.name for x in node.op_def.attr if x.name in known.keys() - told]
    return named, {name: node.get_attr(name) for name in chosen}


def resolve(tensor: Any) -> Any:
    """Follow a tensor back through what only hands it on."""
    while tensor.op.type in names.PASSING and tensor.op.type != "ReadVariableOp":
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor


class Operations:
    """Group the nodes of a graph."""

    def __init__(self, graph: Any, trace: Trace) -> None:
        self.trace = trace
        self.ops: list[Op] = []
        self.of: dict[str, Op] = {}
        self._forward: dict[str, list[Op]] = {}
        self._readers: dict[str, list[Op]] = {}
        self._last: tuple[Any, Op] | None = None
        self._repairs: dict[tuple[str, bool], Op] = {}
        for node in graph.get_operations():
            if node.type in names.PASSING or node.type in ("Const", "Placeholder"):
                continue
            if SCOPE in node.name.split("/") or node.name in trace.aside:
                continue
            if results(node):
                self._add(node)
        for op in self.ops:
            self._border(op)

    def _add(self, node: Any) -> None:
        name, backward = forward_name(node.name)
        repair = self.trace.repair(name)
        if repair is not None:
            self._repair(node, repair, backward=backward)
            return
        if backward:
            self._gradient(node, name)
            return
        self._last = None
        if node.type == "AddN" and all(self._is_backward(x) for x in node.inputs):
            self._open(node, "add", "backward", self.trace.layer(node.name), None)
            return
        place = self.trace.layer(node.name)
        phase: Phase = "loss" if place is None else "forward"
        if any(node.name.startswith(f"{scope}") for scope in self.trace.updates):
            phase = "optimizer"
        op = self._open(node, names.operation(node.type), phase, place, None)
        self._forward.setdefault(names.plain(node.type), []).append(op)
        for x in (*node.inputs, *node.outputs):
            self._readers.setdefault(resolve(x).name, []).append(op)

    def _repair(self, node: Any, scope: str, *, backward: bool) -> None:
        """Take what a repair is made of for one operation, and its gradient for another."""
        self._last = None
        op = self._repairs.get((scope, backward))
        if op is not None:
            op.nodes.append(node)
            self.of[node.name] = op
            return
        place = self.trace.layer(scope)
        phase: Phase = "backward" if backward else "loss" if place is None else "forward"
        forward = self._repairs.get((scope, False)) if backward else None
        name = self.trace.repairs[scope]
        self._repairs[scope, backward] = self._open(node, name, phase, place, forward)

    def _gradient(self, node: Any, name: str) -> None:
        function = lines.gradient_function(node.traceback)
        scope = name.rpartition("/")[0]
        key = (scope, function)
        if self._last is not None and self._last[0] == key and function is not None:
            op = self._last[1]
            if not _repeats(op, node):
                op.nodes.append(node)
                self.of[node.name] = op
                return
        forward = self._maker(node, name, function)
        place = self.trace.layer(name)
        if forward is None:
            op = self._open(node, names.operation(node.type), "backward", place, None)
        else:
            place = None if forward.layer is None else (forward.layer, forward.call)
            op = self._open(node, forward.name, "backward", place, forward)
        self._last = (key, op)

    def _maker(self, node: Any, name: str, function: str | None) -> Op | None:
        """Find the forward operation whose gradient this is."""
        kind = None if function is None else names.gradient_of(function)
        found = self._forward.get(kind or "", [])
        scope = name.rpartition("/")[0]
        found = [op for op in found if op.nodes[0].name == scope or _within(op, scope)] or found
        if not found:
            return self._by_name(name)
        near = {resolve(x).name for x in node.inputs}
        for op in reversed(found):
            if near & {resolve(x).name for x in (*op.nodes[0].inputs, *op.nodes[0].outputs)}:
                return op
        shapes = {str(x.shape) for x in node.inputs if is_float(x)}
        for op in reversed(found):
            if str(op.nodes[0].outputs[0].shape) in shapes:
                return op
        return found[-1]

    def _by_name(self, name: str) -> Op | None:
        return next((self.of[scope] for scope in scopes(name) if scope in self.of), None)

    def _open(
        self, node: Any, name: str, phase: Phase, place: tuple[str, int] | None, forward: Op | None
    ) -> Op:
        layer, call = place or (None, 0)
        op = Op(len(self.ops), [node], name, phase, layer, call, forward)
        op.lines = self.trace.traceback(node)
        self.ops.append(op)
        self.of[node.name] = op
        return op

    def _is_backward(self, tensor: Any) -> bool:
        op = self.of.get(resolve(tensor).op.name)
        return op is not None and op.phase == "backward"

    def _border(self, op: Op) -> None:
        members = {node.name for node in op.nodes}
        found = [
            x
            for node in op.nodes
            for x in itertools.chain(*map(_floats, node.inputs))
            if resolve(x).op.name not in members
        ]
        # Which operand is which goes by position in a single node.
        op.ins = found if len(op.nodes) == 1 else list({x.name: x for x in found}.values())
        outs = [out for node in op.nodes for out in results(node)]
        # What only the nodes of one gradient, or of one repair, see is no result of it.
        repair = self.trace.repair(forward_name(op.nodes[0].name)[0])
        if repair is not None:
            left = [x for x in outs if self._leaves(x, repair)]
        else:
            left = [x for x in outs if any(n.name not in members for n in x.consumers())]
        op.outs = left or outs

    def _leaves(self, x: Any, repair: str) -> bool:
        """Tell whether a tensor is taken outside of a repair and its gradient."""
        return any(
            self.trace.repair(forward_name(node.name)[0]) != repair
            or (node.type in names.PASSING and any(self._leaves(y, repair) for y in node.outputs))
            for node in x.consumers()
        )

    def writer(self, tensor: Any) -> Op | None:
        """Give the operation that wrote a tensor, None if it came from outside."""
        return self.of.get(resolve(tensor).op.name)


def _floats(tensor: Any) -> Iterator[Any]:
    """Yield a float tensor, or those that were put into a list."""
    if is_float(tensor):
        yield tensor
        return
    for node in walk(_lists([tensor]), lambda node: _lists(node.inputs), near=True):
        yield from filter(is_float, node.inputs)


def _lists(tensors: Iterable[Any]) -> list[Any]:
    variants = (_before_loops(x) for x in tensors if x.dtype == tf.variant)
    return [x.op for x in variants if x.op.type.startswith("TensorList")]


def _before_loops(tensor: Any) -> Any:
    """Follow what loops hand on from turn to turn to what the first of them began with."""
    while tensor.op.type.endswith("While"):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def forward_name(name: str) -> tuple[str, bool]:
    """Give a node's name without the scope of a tape, and whether it had that."""
    parts = name.split("/")
    at = next((i for i, part in enumerate(parts) if _SLOPES.fullmatch(part)), None)
    return (name, False) if at is None else ("/".join(parts[at + 1 :]), True)


def _within(op: Op, scope: str) -> bool:
    return not scope or op.nodes[0].name.startswith(scope + "/")


def _repeats(op: Op, node: Any) -> bool:
    """Tell whether a node begins the same gradient function again, for another operation."""
    return bool(node.type == op.nodes[0].type and _line(node) == _line(op.nodes[0]))


def _line(node: Any) -> Any:
    for frame in reversed(list(node.traceback)):
        if frame.name.startswith("_") and "Grad" in frame.name:
            return frame.lineno
    return None
