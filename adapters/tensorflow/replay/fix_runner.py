"""Operations repaired while a step's code is traced once more: the tape follows by itself.

A repaired operation stands in the graph in the place of the operation's results, and the tape holds
what the repair is made of, so the gradient is the repair's own. The operation as it was stays
beside it, and nothing takes it.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import execute
from tensorflow.python.framework import op_def_library

from anynan._base.patches import Patches
from anynan._diagnosis.rules import repair as repairs
from anynan._diagnosis.rules.repair import BaseFixRunner, Repair, RepairError, around
from anynan.tensorflow.graphs import lines, names
from anynan.tensorflow.graphs.operations import BACKWARD, arguments
from anynan.tensorflow.graphs.traces import Traces
from anynan.tensorflow.read.frames import here, is_loop
from anynan.tensorflow.read.probes import is_float

_SCOPE = "repaired"
_HIDDEN = (tf.variant, tf.resource)
# A softmax is over the last axis; what else takes axes is no one operation here.
_PARAMS = {"dim": -1, "keepdim": False}


class _Namespace(repairs.Namespace):
    def where(self, condition: Any, x: Any, y: Any) -> Any:
        dtype = next((v.dtype for v in (x, y) if tf.is_tensor(v)), None)
        return tf.where(condition, *(tf.convert_to_tensor(v, dtype) for v in (x, y)))

    def isfinite(self, x: Any) -> Any:
        if x.dtype.is_complex:
            return tf.math.is_finite(tf.math.real(x)) & tf.math.is_finite(tf.math.imag(x))
        return tf.math.is_finite(x)

    def reduce(self, name: str, x: Any, axis: Any, *, keepdims: bool) -> Any:
        return getattr(tf, f"reduce_{name}")(x, axis=axis, keepdims=keepdims)

    def eye(self, x: Any) -> Any:
        return tf.eye(tf.shape(x)[-1], dtype=x.dtype)


_WORDS = _Namespace(tf)


class FixRunner(BaseFixRunner):
    """Put repaired operations in the place of those that made bad values.

    Args:
        repairs: What to repair; one that is named later stands inside of one named before.
        traces: Are told where repairs stand.

    Attributes:
        unrepaired: What the operations of the first repair gave as they were.
    """

    def __init__(self, repairs: Sequence[Repair], traces: Traces) -> None:
        super().__init__(repairs)
        self.unrepaired: list[Any] = []
        self._traces = traces
        self._given: dict[int, Any] = {}
        self._graph: Any = None

    def enter(self) -> None:
        """Take the graph that is traced for the one to repair: no other is changed."""
        self._graph = here()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Repair what this thread traces meanwhile."""
        # What every generated function of TensorFlow makes its operation and its gradient with.
        self._record, self._taped = execute.record_gradient, execute.must_record_gradient
        self._make = op_def_library._apply_op_helper
        with Patches() as patches:
            patches.put(op_def_library, "_apply_op_helper", self._made)
            patches.put(execute, "record_gradient", self._recorded)
            yield

    def _recorded(self, kind: str, inputs: Any, attributes: Any, results: Any) -> None:
        """Have the tape take an operation, but one that was repaired: it has the repair."""
        if not any(self._given.get(id(x)) is x for x in results):
            self._record(kind, inputs, attributes, results)

    def _made(self, kind: str, name: Any = None, **given: Any) -> Any:
        """Make an operation, and its repair beside it if it is one of those."""
        made = self._make(kind, name, **given)
        if self.busy or not self.here or names.operation(kind) not in self.names:
            return made
        *about, node, results = made
        found = self._wanted(node)
        if not found:
            return made
        new = self.made(found, lambda: self._fixed(node, list(results), given, found))
        if new is None:
            return made
        self._given.update((id(x), x) for x in new)
        if self.repairs[0] in found:
            self.unrepaired += [x for x in results if is_float(x)]
        return (*about, node, new)

    def _wanted(self, node: Any) -> list[Repair]:
        """Choose the repairs of a node that was just made."""
        graph = node.graph
        while is_loop(graph):
            graph = graph.outer_graph
        if graph is not self._graph or BACKWARD in node.name.split("/"):
            return []
        trace = self._traces.of(node.graph)
        name, source = names.operation(node.type), lines.source(trace.traceback(node))
        return self.of(name, source, trace.running)

    def _fixed(
        self, node: Any, results: list[Any], given: dict[str, Any], found: list[Repair]
    ) -> list[Any]:
        """Make what stands in the place of a node's results."""
        if node.type in names.OPAQUE or any(x.dtype in _HIDDEN for x in node.inputs):
            raise RepairError(node.type)  # a gradient goes where no tensor shows it
        trace = self._traces.of(node.graph)
        trace.aside.add(node.name)
        floats = [x for x in node.inputs if is_float(x)]
        operands = {names.operand(node.type, i): x for i, x in enumerate(floats)}
        with tf.name_scope(_SCOPE) as scope:
            trace.repairs[scope.rstrip("/")] = names.operation(node.type)
            new = around(
                found,
                functools.partial(self._own, node, given),
                functools.partial(_expression, operands),
                functools.partial(_filled, floats, scope),
            )()
            many = list(new) if isinstance(new, list | tuple) else [new]
            return [_like(x, was) for x, was in zip(many, results, strict=True)]

    def _own(self, node: Any, given: dict[str, Any], *new: Any) -> Any:
        """Make the operation itself, with others in the place of its first operands."""
        inputs = list(node.inputs)
        at = [i for i, x in enumerate(inputs) if is_float(x)]
        if len(new) > len(at):
            raise RepairError(node.type)
        for i, x in zip(at, new, strict=False):
            inputs[i] = _like(x, inputs[i])
        keywords = given | arguments(node.op_def, node.get_attr, inputs)
        *_, made, results = self._make(node.type, None, **keywords)
        results = list(results)
        if self._taped():
            attributes = [(a.name, made.get_attr(a.name)) for a in made.op_def.attr]
            flat = tuple(part for pair in attributes for part in pair)
            self._record(made.type, made.inputs, flat, results)
        return results[0] if len(results) == 1 else results


def _expression(operands: dict[str, Any], item: Repair, own: Callable[..., Any], *new: Any) -> Any:
    given = {**operands, **dict(zip(operands, new, strict=False))}
    return repairs.run(item, _WORDS, own, given, _PARAMS)


def _filled(floats: list[Any], scope: str, item: Repair, own: Callable[..., Any], *new: Any) -> Any:
    """Make it with 0 in the place of the bad values that it makes, and of its gradient's."""

    def made(*given: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(given)
            out = own(*given)

        def back(*incoming: Any) -> list[Any]:
            with tf.name_scope(f"{BACKWARD}/{scope}"):  # ends in a slash: taken as it is
                clean = tf.reduce_all(
                    [tf.reduce_all(_WORDS.isfinite(x)) for x in incoming if is_float(x)]
                )
                many = list(incoming) if isinstance(out, list) else incoming[0]
                slopes = tape.gradient(out, given, output_gradients=many)
                # What came in bad is another fault's.
                return [x if x is None else tf.where(clean, _fill(x), x) for x in slopes]

        return (out if item.phase == "backward" else tf.nest.map_structure(_fill, out)), back

    return tf.custom_gradient(made)(*new, *floats[len(new) :])


def _fill(x: Any) -> Any:
    return repairs.neutral(_WORDS, x) if is_float(x) else x


def _like(new: Any, was: Any) -> Any:
    """Give a repaired tensor the form of the operation's own."""
    new = tf.cast(new, was.dtype)
    if not new.shape.is_compatible_with(was.shape):
        raise RepairError(was.name)
    return tf.ensure_shape(new, was.shape)
