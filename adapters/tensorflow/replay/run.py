"""One run of a program, and what its nodes made."""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.record import stop_recording
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from anynan._base.walks import walk
from anynan._diagnosis.evidence import ReplayError
from anynan.tensorflow.graphs.operations import Operations, results
from anynan.tensorflow.read import probes, readings
from anynan.tensorflow.replay.program import Copied, Program

WRITTEN = "the code asked for a value that depends on a variable the step had already written"
# What a checking or solving operation ends with; anything else is no answer to a bad value.
ENDS = (tf.errors.InvalidArgumentError,)
# What adds up over replicas begins with.
JOINING = ("Collective", "Nccl")
_NODE = re.compile(r"\{\{node (?:replay/)?([^}]+)\}\}")


class Run:
    """Run a program, and look at what its nodes make.

    Attributes:
        program: What is run.
        bad: Name of a tensor that was looked at -> whether it is bad.
        end: The node that failed, which ends the run; None if none did.
        error: What it raised.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._nodes: list[Any] = program.graph.get_operations()
        self._definition = program.graph.as_graph_def()
        self.compiled = self.optimized = False
        self.bad: dict[str, bool] = {}
        self.end: Any = None
        self.error: tf.errors.OpError | None = None

    @functools.cached_property
    def operations(self) -> Operations:
        """Give the operations of the graph."""
        return Operations(self.program.graph, self.program.trace)

    def flag(self, *, failed: bool) -> None:
        """Find what is bad; where something has to be, under XLA if need be."""
        program = self.program
        self.bad = self._flags()
        read = [point.value for block in program.trace.blocks for point in block.order]
        read += [x.name for _, x in program.results]
        if not failed or any(self.bad.get(name) for name in read):
            return
        if program.compiled:
            self.compiled = True  # what XLA alone does shows only under XLA
            self.bad = self._flags()
        self.optimized = program.traced and not program.compiled

    def ran(self, tensor: Any) -> bool:
        """Tell whether a tensor was made before the run ended."""
        return (self.end is None and not self._joined) or tensor.op in self._until()

    def _until(self) -> list[Any]:
        """List the nodes before the one that fails, but for what is made of several replicas."""
        end = None if self.end is None else self._nodes.index(self.end)
        return [node for node in self._nodes[:end] if node.name not in self._joined]

    @functools.cached_property
    def _joined(self) -> set[str]:
        """Name the nodes that are made of what several replicas give: they run at once alone."""
        found: set[str] = set()
        for node in self._nodes:
            before = (*(x.op for x in node.inputs), *node.control_inputs)
            if node.type.startswith(JOINING) or any(x.name in found for x in before):
                found.add(node.name)
        return found

    def _tensors(self) -> list[Any]:
        """List what is looked at: what was made before the node that fails, if one does."""
        nodes = [x for x in self._until() if x.type not in ("Placeholder", "Const")]
        return [out for node in nodes for out in results(node)]

    def _wrap(self, tensors: list[Any], look: Callable[[list[Any]], Any]) -> Any:
        """Make a function of the program's inputs that gives what is seen of some tensors."""
        # Only what they are made of: no variable is written that nobody reads afterwards.
        part = _behind(self._definition, [x.op.name for x in tensors])
        there = {node.name for node in part.node}
        inputs = self.program.inputs

        def run(*args: Any) -> Any:
            held = {
                f"{placeholder.op.name}:0": value
                for placeholder, value in zip(inputs, args, strict=True)
                if placeholder.op.name in there
            }
            names = [x.name for x in tensors]
            return look(
                tf.graph_util.import_graph_def(
                    part, input_map=held, return_elements=names, name="replay"
                )
            )

        signature = [tf.TensorSpec(t.shape, t.dtype) for t in inputs]
        return tf.compat.v1.wrap_function(run, signature)

    def _flags(self) -> dict[str, bool]:
        while True:
            tensors = self._tensors()
            try:
                host = self._call(self._wrap(tensors, _each_fine)).numpy()
            except ENDS as error:
                end = self._failing(error)
                if end is None:
                    raise
                self.end, self.error = end, error
            else:
                return {t.name: not bool(ok) for t, ok in zip(tensors, host, strict=False)}

    def _failing(self, error: Exception) -> Any:
        """Find the node before the known end that an error is of, or that holds it."""
        there = {node.name: node for node in self._until()}
        found = _NODE.findall(str(error))
        parts = found[-1].split("/") if found else []
        names = ["/".join(parts[:end]) for end in range(len(parts), 0, -1)]
        here = next((there[name] for name in names if name in there), None)
        if here is not None or not names:
            return here
        library = {f.signature.name: f for f in self._definition.library.function}
        held = (node for node in self._until() if _holds(node.node_def, names, library))
        return next(held, None)

    def value(self, tensor: Any) -> Any:
        """Give the value of a tensor of a graph that is still traced.

        Raises:
            ReplayError: If it may be made of a variable that was written before: what puts such
                operations into order is not there yet.
        """
        written: dict[str, int] = {}
        behind = {node.name for node in _behind(self._definition, [tensor.op.name]).node}
        for number, node in enumerate(self._nodes):
            for x in node.inputs:
                if x.dtype != tf.resource:
                    continue
                if node.type != "ReadVariableOp":
                    written.setdefault(x.name, number)
                elif node.name in behind and x.name in written:
                    raise ReplayError(WRITTEN)
        return self.values([tensor])[tensor.name]

    def _call(self, run: Any) -> Any:
        """Run on copies of what the step writes, made anew for each run."""
        copies = {
            i: ResourceVariable(x.content, trainable=False, shape=x.variable.shape)
            for i, x in enumerate(self.program.feeds)
            if isinstance(x, Copied)
        }
        feeds = [copies[i].handle if i in copies else x for i, x in enumerate(self.program.feeds)]
        if self.compiled:
            run = tf.function(run, jit_compile=True, autograph=False)
        with stop_recording():  # a tape of the program's may be open
            return run(*feeds)

    def rows(self, names: list[str]) -> Any:
        """Read these tensors exactly."""
        tensors = [self.program.graph.get_tensor_by_name(name) for name in names]
        return self._call(self._wrap(tensors, readings.exact)).numpy()

    def values(self, tensors: list[Any]) -> dict[str, Any]:
        """Give the values of these tensors, as host arrays."""
        found: dict[str, Any] = {}
        wanted = []
        feeds = {p.name: x for p, x in zip(self.program.inputs, self.program.feeds, strict=True)}
        for tensor in {t.name: t for t in tensors}.values():
            if tensor.name in feeds:
                if isinstance(feeds[tensor.name], tf.Tensor) and tensor.dtype != tf.resource:
                    found[tensor.name] = probes.on_host(feeds[tensor.name])
            elif tensor.op.type != "Placeholder":
                wanted.append(tensor)
        if wanted:
            out = self._call(self._wrap(wanted, list))
            found.update({t.name: probes.on_host(x) for t, x in zip(wanted, out, strict=True)})
        return found


def _holds(node: Any, names: list[str], library: dict[str, Any]) -> bool:
    """Tell whether a node calls a function that has a node of one of these names."""
    functions = (library.get(x.func.name) for x in node.attr.values() if x.HasField("func"))
    inside = [part for function in functions if function is not None for part in function.node_def]
    return any(part.name in names or _holds(part, names, library) for part in inside)


def _behind(definition: Any, wanted: list[str]) -> Any:
    """Cut a graph down to what some of its nodes are made of."""
    nodes = {node.name: node for node in definition.node}
    seen = set(
        walk(wanted, lambda name: [x.lstrip("^").partition(":")[0] for x in nodes[name].input])
    )
    part = tf.compat.v1.GraphDef(versions=definition.versions, library=definition.library)
    part.node.extend(node for node in definition.node if node.name in seen)
    return part


def _each_fine(found: list[Any]) -> Any:
    """Tell of each tensor whether all of it is finite, whatever its shape was thought to be."""
    if not found:
        return tf.constant([True])
    flat, axis = tf.constant([-1]), tf.constant([0])

    def fine(x: Any) -> Any:
        if x.dtype.is_complex:
            return tf.logical_and(fine(tf.math.real(x)), fine(tf.math.imag(x)))
        if x.dtype.name.startswith("float8"):
            x = tf.cast(x, tf.float32)
        # There are thousands of these: the plain operations are made faster.
        whole = tf.raw_ops.IsFinite(x=tf.raw_ops.Reshape(tensor=x, shape=flat))
        return tf.raw_ops.All(input=whole, axis=axis)

    return tf.stack([fine(x) for x in found])


@contextmanager
def as_written() -> Iterator[None]:
    """Run graphs without TensorFlow's optimizer, which takes longer than the one run it is for."""
    name = "disable_meta_optimizer"
    before = tf.config.optimizer.get_experimental_options().get(name, False)
    try:
        tf.config.optimizer.set_experimental_options({name: True})
        yield
    finally:
        tf.config.optimizer.set_experimental_options({name: before})
