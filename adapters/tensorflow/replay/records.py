"""Records of operations with bad results, for the core's lineage."""

import functools
import math
from typing import Any

import numpy as np
import tensorflow as tf

from anynan._arrays.measures import describe
from anynan._base.summary import Summary
from anynan._calls.collector import offer
from anynan._diagnosis.lineage import External, OpRecord, Replay, Sink
from anynan._diagnosis.operands import at_first_nan
from anynan._diagnosis.records import (
    DETAILED,
    KEPT,
    SAVED,
    SOFTMAX,
    Builder,
    Given,
    Origin,
    add_masked_rows,
    before,
    called,
    gradient_operands,
    makers,
)
from anynan._readings.readings import ProbePoint
from anynan.tensorflow.graphs import names
from anynan.tensorflow.graphs.lines import in_gradient
from anynan.tensorflow.graphs.operations import Op, raw_call, resolve
from anynan.tensorflow.messages import DREW_OTHERS, GRAPH_OPTIMIZED, LOOP_UNOPENED
from anynan.tensorflow.read import probes
from anynan.tensorflow.read.layers import Layers
from anynan.tensorflow.read.probes import is_bad, is_float, kind
from anynan.tensorflow.replay import saving
from anynan.tensorflow.replay.program import GIVEN, Program
from anynan.tensorflow.replay.run import Run


class Recorder:
    """Make the records of one replay."""

    def __init__(self, session: Layers, program: Program, run: Run) -> None:
        self.session, self.program, self.run = session, program, run
        self.operations = run.operations
        self.bad = [op for op in self.operations.ops if any(run.bad.get(t.name) for t in op.outs)]
        self.index = {op.index: i for i, op in enumerate(self.bad)}
        self.points = [
            (point, program.graph.get_tensor_by_name(point.value))
            for block in program.trace.blocks
            for point in block.order
            if point.value
        ]
        self.points += [
            (ProbePoint(x.name, None, "loss", "loss", dtype=probes.dtype(x)), x)
            for _, x in program.results
        ]
        self.points = [(point, x) for point, x in self.points if run.ran(x)]
        self.held = self.run.values(self._wanted())
        self.trouble: list[str] = []

    def _wanted(self) -> list[Any]:
        """Choose the tensors to look at: results and operands of the first bad operations."""
        wanted: list[Any] = [t for _, t in self.points if self._is_bad(t)]
        size = 0
        for op in self.bad[:DETAILED]:
            for tensor in (self._worst(op), *(t for t, _ in self._named(op))):
                size += (tensor.shape.num_elements() or 2**10) * tensor.dtype.size
                if size <= KEPT:
                    wanted.append(tensor)
        return wanted

    def _is_bad(self, tensor: Any) -> bool:
        found = self.run.bad.get(tensor.name)
        if found is None:  # an input or a constant
            array = self.run.values([tensor]).get(tensor.name)
            return array is not None and bool(is_bad(array))
        return bool(found)

    def _worst(self, op: Op) -> Any:
        return next(t for t in op.outs if self.run.bad.get(t.name))

    def result(self) -> Replay:
        """Give the records and where harm was done."""
        records = [self._record(i, op) for i, op in enumerate(self.bad)]
        found = Replay(records, self._sinks(), self._notes())
        found.uncompiled = self.program.compiled and not self.run.compiled
        found.notes += dict.fromkeys(self.trouble)
        found.end()
        made = (r for r in found.records if not any(x.parents for x in r.operands))
        opaque = [names.OPAQUE.get(kind) for r in made for kind in r.raw.split(", ")]
        for what in dict.fromkeys(filter(None, opaque)):
            found.notes.append(LOOP_UNOPENED(what=what))
        return found

    def _notes(self) -> list[str]:
        types = {node.type for node in self.program.graph.get_operations()}
        notes = [] if self.bad else list(self.program.notes)
        if types & names.RANDOM:
            drawn = ", ".join(sorted(types & names.RANDOM))
            notes.append(DREW_OTHERS(drawn=drawn))
        if self.run.optimized:
            notes.append(GRAPH_OPTIMIZED())
        return notes

    def taken(self) -> Sink | None:
        """Give what was taken last, if that is bad: by the node that failed, or by Python code."""
        last = self.run.end if self.program.taken is None else self.program.taken
        if last is None:
            return None
        inside = self.program.trace.layer(getattr(last, "op", last).name)
        seen: set[str] = set()
        todo = [last] if isinstance(last, tf.Tensor) else [*last.outputs, *last.inputs]
        while todo:
            x = todo.pop(0)
            if x.name in seen or not self.run.ran(x):
                continue
            seen.add(x.name)
            if not is_float(x):  # a truth, or a whole number
                todo += [] if x.op.type in ("Placeholder", "Const") else x.op.inputs
                continue
            writer = self.operations.writer(x)
            at = None if writer is None else self.index.get(writer.index)
            if self._is_bad(x) and at is not None:
                word = kind(self.run.values([x])[x.name]) or "nan"
                return Sink("value", None if inside is None else inside[0], "", (at,), word)
        return None

    # Records.

    def _record(self, index: int, op: Op) -> OpRecord:
        looped = op.layer in self.session.looped  # it was unrolled: each call is an iteration
        record = OpRecord(
            index, op.name, op.raw, op.layer, op.phase, None, source=op.source,
            params=self._params(op), feeds=self._feeds(op),
            forward=None if op.forward is None else self.index.get(op.forward.index),
            call=0 if looped else op.call, iteration=op.call if looped else None,
            direct=op.phase != "backward" and in_gradient(op.lines),
        )  # fmt: skip
        worst, named = self._worst(op), self._named(op)
        result = Given("result", self.held.get(worst.name), _light(worst), worst)
        operands = [self._given(tensor, name) for tensor, name in named]
        builder = Builder(_measured, self._origin, self.trouble.append)
        builder.describe(record, result, operands, wide=lambda _: self._wide(op))
        if op.name in SOFTMAX and operands:
            self._masked_rows(record, op)
        operand_names = {t.name: name for t, name in named}
        call = functools.partial(saving.call, op, worst, operand_names, self.run.values)
        offer(record, call, probes.on_host)
        return record

    def _given(self, tensor: Any, name: str) -> Given:
        known = _light(tensor) if self.run.bad.get(tensor.name, False) else None
        return Given(name, self.held.get(tensor.name), known, tensor)

    def _named(self, op: Op) -> list[tuple[Any, str]]:
        """Name the operands as the cause rules know them."""
        if op.forward is None:
            return [(t, names.operand(op.kind, i)) for i, t in enumerate(op.ins)]
        operands = self._named(op.forward)
        inside = {resolve(t).name: name for t, name in operands}
        results = dict.fromkeys((resolve(t).name for t in op.forward.outs), "result")
        # A forward operation that is a gradient itself has operands beside its inputs.
        tensors = {resolve(t).name: t for t in (*(x for x, _ in operands), *op.forward.outs)}
        known = inside | results
        return gradient_operands(
            op.ins,
            lambda tensor: known.get(resolve(tensor).name),
            self._other,
            [(tensors[base], name) for base, name in (*inside.items(), *results.items())],
        )

    def _other(self, tensor: Any) -> str | None:
        if self._incoming(tensor):
            return "grad"
        return None if tensor.op.type == "Const" else SAVED

    def _incoming(self, tensor: Any) -> bool:
        """Tell whether a tensor is a gradient that came in."""
        writer = self.operations.writer(tensor)
        if writer is not None:
            return writer.phase == "backward"
        name = str(resolve(tensor).op.name)
        given = self.program.labels.get(name) == GIVEN
        return given or name.startswith(("ones", "gradient_tape"))

    def _origin(self, given: Given, record: OpRecord) -> Origin:
        """Say where an operand's bad values come from."""
        writer = self.operations.writer(given.key)
        if writer is None:
            return Origin((), *self._outside(resolve(given.key)))
        found = self.index.get(writer.index)
        return Origin() if found is None or found >= record.index else Origin((found,))

    def _outside(self, tensor: Any) -> tuple[External, str | None]:
        node = tensor.op
        if node.type == "ReadVariableOp":
            variable = self.program.variables.get(node.inputs[0].op.name)
            name = None if variable is None else self.session.weights.name(variable)
            if name is not None:
                buffer = self.session.weights.is_buffer(name)
                return ("buffer" if buffer else "parameter"), name
            return "buffer", str(getattr(variable, "name", "variable")).partition(":")[0]
        if node.name in self.program.weights:
            name = self.program.weights[node.name]
            return ("buffer" if self.session.weights.is_buffer(name) else "parameter"), name
        if node.type == "Placeholder" and node.name in self.program.labels:
            return "input", self.program.labels[node.name]
        # Only what the call was given is its input: all else stands in the code.
        return "constant", "a tensor of the closure" if node.type == "Placeholder" else None

    def _params(self, op: Op) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if op.name in SOFTMAX:
            found["dim"] = -1
        if op.forward is not None:
            found |= makers(
                called(op.name, [x.name for x in op.ins]) for op in before(op.forward, self._made)
            )
        return found

    def _made(self, op: Op) -> Op | None:
        return self.operations.writer(op.ins[0]) if op.ins else None

    def _feeds(self, op: Op) -> tuple[str, ...]:
        writers = map(self.operations.writer, () if op.forward is None else op.ins)
        came = (x for x in writers if x is not None and x.phase == "backward" and x is not op)
        return tuple(dict.fromkeys(x.name for x in came))

    def _masked_rows(self, record: OpRecord, op: Op) -> None:
        source = (op.forward or op).ins
        array = self.held.get(source[0].name) if source else None
        add_masked_rows(record, None if array is None else np.asarray(array), -1)

    def _wide(self, op: Op) -> Any:
        """Run an operation again in a wider dtype, None if it has none."""
        node, held = op.nodes[0], {t.name: self.held.get(t.name) for t in op.ins}
        if len(op.nodes) != 1 or op.forward is not None or node.type in names.OPAQUE:
            return None
        if any(x is None for x in held.values()):
            return None
        narrow = all(t.dtype == tf.float16 for t in node.inputs if t.dtype.is_floating)
        target = tf.float32 if narrow else tf.float64
        wide = [
            tf.constant(np.asarray(held[x.name], np.float64), target)
            if x.name in held
            else tf.constant(tf.get_static_value(x), x.dtype)  # refused, where that is not known
            for x in node.inputs
        ]
        inputs, attributes = raw_call(node, wide)
        if attributes.get("DstT") in (tf.float16, tf.float32, tf.bfloat16):
            attributes["DstT"] = target
        return tf.nest.flatten(getattr(tf.raw_ops, node.type)(**inputs, **attributes))[0]

    # Where harm was done.

    def _sinks(self) -> list[Sink]:
        found = []
        for point, tensor in self.points:
            array = self.held.get(tensor.name)
            if point.phase == "input" or array is None:
                continue
            word = kind(array)
            if word is None:
                continue
            writer = self.operations.writer(tensor)
            at = None if writer is None else self.index.get(writer.index)
            parents = () if at is None else (at,)
            label = point.parameter or point.tensor
            found.append(Sink(point.phase, point.layer, label, parents, word))
        return found


def _measured(array: Any) -> Summary:
    return at_first_nan(describe(array), array)


def _light(tensor: Any) -> Summary:
    """Summarise by what is known without the values."""
    shape = tuple(n or 0 for n in (tensor.shape.as_list() if tensor.shape.rank is not None else ()))
    return Summary(shape, tensor.dtype.name, "cpu", math.prod(shape), nan=1)
