"""Run the graph of a failing step again, on copies of its variables, with every operation read."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from anynan._diagnosis.agreement import Passed
from anynan._diagnosis.evidence import ReplayError
from anynan._diagnosis.lineage import Replay
from anynan._runtime.context import replay_context
from anynan.tensorflow import inlining, names, probes, readings
from anynan.tensorflow.frames import Step, named_arguments, tensors
from anynan.tensorflow.operations import Operations, results
from anynan.tensorflow.reach import ITERATOR, Reach
from anynan.tensorflow.session import Session
from anynan.tensorflow.traces import Block, Spot, Trace
from anynan.tensorflow.variables import read

SPREAD = (
    "the step runs on several replicas, which cannot be run again: the report stays at layer level"
)
NESTED = "what runs in a nested function is not run again by itself"
ARGUMENTS = (
    "the batch is taken inside of the function, so the step cannot be run again: give "
    "the function its batch as an argument, and the operation is named"
)


# Operations that take from iterators and queues, and what those are handed on as.
TAKING = ("IteratorGetNext", "QueueDequeue", "Unstage", "MultiDeviceIteratorGetNext", "ReaderRead")
HANDLES = (tf.resource, tf.variant, tf.string)


@dataclass
class Program:
    """Hold the graph of a step, and what to run it on.

    Attributes:
        graph: The graph.
        trace: What is known of it.
        feeds: The values of its inputs, in order.
        labels: Names of its inputs.
        variables: Name of a resource input -> its variable, ours or not.
        compiled: True if XLA compiled it.
        traced: True if it ran as a graph.
        results: What a tracked function gives back, with a name for each.
    """

    graph: Any
    trace: Trace
    feeds: list[Any]
    labels: dict[str, str]
    variables: dict[str, Any]
    compiled: bool
    traced: bool
    results: list[tuple[str, Any]]


def replay(session: Session, step: Step, *, failed: bool = True) -> Replay:
    """Run a step again, and record its operations with bad results.

    Args:
        session: Who watches.
        step: What ran.
        failed: A reading was bad, so it has to be found again, under XLA if need be.
    """
    from anynan.tensorflow.records import Recorder

    if _is_spread(step):
        raise ReplayError(SPREAD)
    with _again(session):
        program = prepare(session, step)
        run = Run(program)
        run.flag(failed=failed)
        if failed:
            _trail(session, run)
        result = Recorder(session, program, run).result()
        if not (run.optimized or result.uncompiled):  # then the arithmetic itself is another
            result.passed = passed(session, run)
        if failed and any(record.raw in names.OPAQUE for record in result.records):
            deeper = _deeper(session, step)
            if deeper is not None:
                deeper.passed, result = result.passed, deeper
    return result


def look(session: Session, step: Step, block: Block, places: list[int]) -> Any:
    """Read exactly some tensors that a block of a step's readings is of.

    Raises:
        ReplayError: If the step cannot be run again, or the block is of a nested function.
    """
    if _is_spread(step):
        raise ReplayError(SPREAD)
    with _again(session):
        program = prepare(session, step)
        if not any(known is block for known in program.trace.blocks):
            raise ReplayError(NESTED)
        return Run(program).rows([block.spots[i].name for i in places])


@contextmanager
def _again(session: Session) -> Iterator[None]:
    """Have nothing that runs count as a step of the user's."""
    state = session.state()
    before = state.replaying, state.tapes, state.frame, state.outputs
    state.replaying, state.tapes, state.frame, state.outputs = True, 0, None, []
    try:
        with replay_context(), as_written():
            yield
    except tf.errors.OpError as error:
        msg = f"the step failed when it was run again: {type(error).__name__}: {_last(error)}"
        raise ReplayError(msg) from error
    finally:
        state.replaying, state.tapes, state.frame, state.outputs = before


def _trail(session: Session, run: "Run") -> None:
    """Fill in how large the values of each layer were."""
    blocks = run.program.trace.blocks
    spots = [s for block in blocks for s in block.spots if s.phase == "forward" and s.name]
    places, rows = session.places(spots), session.tracker.judge.rows()
    keys = zip((site.index for site in places.sites), places.calls, strict=True)
    found = dict(zip(keys, spots, strict=True))
    unknown = {
        order: found[site.index, call].name
        for order, (site, call) in enumerate(zip(rows.sites, rows.calls, strict=True))
        if rows.lo[order] > rows.hi[order] and (site.index, call) in found
    }
    if not unknown:
        return
    low, high, _ = readings.read(run.rows(list(unknown.values())))
    for order, lo, hi in zip(unknown, low.tolist(), high.tolist(), strict=True):
        rows.lo[order], rows.hi[order] = lo, hi


def passed(session: Session, run: "Run") -> list[Passed]:
    """Read again what the first run read, to be compared with it."""
    if session.looped:  # each iteration was read if it ran eagerly, and none is in a graph
        return []
    blocks = run.program.trace.blocks
    spots = [s for b in blocks for s in b.spots if s.name and s.parameter is None]
    for label, x in run.program.results:
        tensor = "loss" if label == "result" else label
        spots.append(Spot(None, "loss", tensor, x.dtype.name, probes.dtype_max(x.dtype), x.name))
    if not spots:
        return []
    low, high, there = readings.read(run.rows([spot.name for spot in spots]))
    if run.program.compiled and not session.sizes:  # a sum took Infs of both signs for a NaN
        both = np.isinf(low) & np.isinf(high) & (low < high)
        low, high = np.where(both, np.nan, low), np.where(both, np.nan, high)
    calls = session.places(spots).calls
    return [
        Passed(spot.layer, spot.phase, spot.tensor, call, float(lo), float(hi))
        for spot, call, lo, hi, ok in zip(spots, calls, low, high, there, strict=True)
        if ok
    ]


def _deeper(session: Session, step: Step) -> Replay | None:
    """Run a step again with what is nested in place; None if that shows nothing."""
    from anynan.tensorflow.records import Recorder

    for unrolled in (True, False):
        try:
            with inlining.in_place(session, unrolled=unrolled):
                program = prepare(session, step, fresh=True)
            run = Run(program)
            run.flag(failed=True)
            result = Recorder(session, program, run).result()
        except (ReplayError, tf.errors.OpError):
            continue
        if result.records:
            return result
    return None


def prepare(session: Session, step: Step, *, fresh: bool = False) -> Program:
    """Get the graph of a step, traced once more where it ran without one, or if wanted."""
    compiled = hasattr(step.fn, "get_concrete_function")
    fn, args, kwargs = step.fn, step.args, step.kwargs
    if fresh and compiled:
        fn = inlining.anew(fn)
    if not compiled:
        whole = _whole(session, step) if step.layer else step.fn
        fn = tf.function(whole if step.reach is None else _from_start(whole, step.reach))
    reach = Reach(step.fn) if fresh and compiled else step.reach
    with reach.second_run() if reach is not None else nullcontext():
        try:
            concrete = fn.get_concrete_function(*args, **kwargs)
        except Exception as error:
            msg = (
                f"the step could not be traced to a graph: {type(error).__name__}: {_first(error)}"
            )
            raise ReplayError(msg) from error
    graph = concrete.graph
    source = _source_of_data(graph, concrete.captured_inputs)
    if source is not None:
        raise ReplayError(ITERATOR.format(name=source))
    explicit = concrete.inputs[: len(concrete.inputs) - len(concrete.captured_inputs)]
    pairs = list(arguments(step, fn))
    if len(pairs) != len(explicit):
        raise ReplayError(ARGUMENTS)
    for (_, value), placeholder in zip(pairs, explicit, strict=True):
        if isinstance(value, tf.Variable) or placeholder.dtype == tf.resource:
            raise ReplayError(ARGUMENTS)
    labels = {p.op.name: name for (name, _), p in zip(pairs, explicit, strict=True)}
    feeds = [
        tf.convert_to_tensor(value, dtype=placeholder.dtype)
        for (_, value), placeholder in zip(pairs, explicit, strict=True)
    ]
    owners = {id(v.handle): v for v in graph.variables if hasattr(v, "handle")}
    kept = {id(variable): value for variable, value in step.kept}
    variables = {}
    for placeholder, value in zip(
        concrete.inputs[len(explicit) :], concrete.captured_inputs, strict=True
    ):
        variable = owners.get(id(value))
        if variable is not None:
            variables[placeholder.op.name] = variable
            before = kept.get(id(variable))
            written = any(op.type != "ReadVariableOp" for op in placeholder.consumers())
            if before is not None or written:
                content = read(variable) if before is None else before
                value = _Copied(variable, content)  # noqa: PLW2901
        feeds.append(value)
    return Program(
        graph, session.trace(graph), feeds, labels, variables,
        compiled and bool(getattr(fn, "_jit_compile", False)), compiled,
        [] if session.model() is not None else list(tensors(graph.structured_outputs, "result")),
    )  # fmt: skip


def _source_of_data(graph: Any, captured: Any) -> str | None:
    """Name an operation that takes something out of what is not the step's own."""
    variables = {id(variable.handle) for variable in graph.variables}
    foreign = any(x.dtype in HANDLES and id(x) not in variables for x in captured)
    definition = graph.as_graph_def() if foreign else tf.compat.v1.GraphDef()
    nodes = [definition.node, *(function.node_def for function in definition.library.function)]
    return next((node.op for part in nodes for node in part if node.op.startswith(TAKING)), None)


@dataclass(frozen=True)
class _Copied:
    """Stand for a variable that the step may write, and what it held before."""

    variable: Any
    content: Any


def _from_start(fn: Any, reach: Reach) -> Any:
    """Make a function that begins with what was kept: one that makes variables is traced twice."""
    put_back = tf.autograph.experimental.do_not_convert(reach.put_back)

    def run(*args: Any, **kwargs: Any) -> Any:
        put_back()
        return fn(*args, **kwargs)

    return functools.update_wrapper(run, fn, updated=())


def _whole(session: Session, step: Step) -> Any:
    """Make a function of a model's call and its backward pass."""
    model = step.fn
    weights = session.weights.trainable()
    incoming = session.state().incoming

    def call(*args: Any, **kwargs: Any) -> Any:
        if not weights or not incoming:
            return model(*args, **kwargs)
        with tf.GradientTape() as tape:
            out = model(*args, **kwargs)
        found = [x for _, x in tensors(out, "")]
        pairs = [pair for pair in zip(found, incoming, strict=False) if pair[1] is not None]
        tape.gradient([x for x, _ in pairs], weights, output_gradients=[g for _, g in pairs])
        return out

    return call


def arguments(step: Step, fn: Any) -> list[tuple[str, Any]]:
    """Name the arrays among a step's arguments, in the order of the graph's inputs."""
    import inspect

    try:
        known = list(inspect.signature(fn.python_function).parameters)
    except (TypeError, ValueError):
        known = []
    if step.layer:
        known = list(named_arguments(step.fn, step.args, {}))
    found: list[tuple[str, Any]] = []
    for i, value in enumerate(step.args):
        name = known[i] if i < len(known) and known[i] not in ("args", "kwargs") else f"args[{i}]"
        if name == "data" and isinstance(value, tuple) and 1 <= len(value) <= 3:
            for part, item in zip(("x", "y", "sample_weight"), value, strict=False):
                found += _flat(part, item)
            continue
        found += _flat(name, value)
    order = {name: i for i, name in enumerate(known)}
    for name in sorted(step.kwargs, key=lambda key: (order.get(key, len(order)), key)):
        found += _flat(name, step.kwargs[name])
    return found


def _flat(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [pair for key in sorted(value) for pair in _flat(f"{name}[{key!r}]", value[key])]
    if isinstance(value, list | tuple):
        fields = getattr(value, "_fields", None)
        return [
            pair
            for i, item in enumerate(value)
            for pair in _flat(f"{name}.{fields[i]}" if fields else f"{name}[{i}]", item)
        ]
    if isinstance(value, tf.Tensor | np.ndarray | tf.Variable):
        return [(name, value)]
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor | tf.IndexedSlices):
        return [(name, part) for part in tf.nest.flatten(value, expand_composites=True)]
    return []


def _is_spread(step: Step) -> bool:
    return tf.distribute.get_strategy().num_replicas_in_sync > 1 or any(
        hasattr(x, "values") and not isinstance(x, tf.SparseTensor | tf.RaggedTensor | dict)
        for x in tf.nest.flatten(step.args)
    )


def _first(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]


class Run:
    """Run a program, and look at what its nodes make."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.operations = Operations(program.graph, program.trace)
        self._tensors = [
            out
            for node in program.graph.get_operations()
            if node.type not in ("Placeholder", "Const")
            for out in results(node)
        ]
        self._definition = program.graph.as_graph_def()
        self.compiled = self.optimized = False
        self.bad: dict[str, bool] = {}

    def flag(self, *, failed: bool) -> None:
        """Find what is bad; where something has to be, under XLA if need be."""
        program = self.program
        self.bad = self._flags()
        read = [spot.name for block in program.trace.blocks for spot in block.order]
        read += [x.name for _, x in program.results]
        if not failed or any(self.bad.get(name) for name in read):
            return
        if program.compiled:
            self.compiled = True  # what XLA alone does shows only under XLA
            self.bad = self._flags()
        self.optimized = program.traced and not program.compiled

    def _wrap(self, tensors: list[Any], look: Callable[[list[Any]], Any]) -> Any:
        """Make a function of the program's inputs that gives what is seen of some tensors."""
        # Only what they are made of: no variable is written that nobody reads afterwards.
        part = _behind(self._definition, [x.op.name for x in tensors])
        there = {node.name for node in part.node}
        inputs = self.program.graph.inputs

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
        host = self._call(self._wrap(self._tensors, _each_fine)).numpy()
        return {t.name: not bool(ok) for t, ok in zip(self._tensors, host, strict=False)}

    def _call(self, run: Any) -> Any:
        """Run on copies of what the step writes, made anew for each run."""
        copies = {
            i: tf.Variable(x.content, trainable=False, shape=x.variable.shape)
            for i, x in enumerate(self.program.feeds)
            if isinstance(x, _Copied)
        }
        feeds = [copies[i].handle if i in copies else x for i, x in enumerate(self.program.feeds)]
        if not self.compiled:
            return run(*feeds)
        under = tf.function(run, jit_compile=True, autograph=False)
        return under(*feeds)

    def rows(self, names: list[str]) -> Any:
        """Read these tensors exactly."""
        tensors = [self.program.graph.get_tensor_by_name(name) for name in names]
        return self._call(self._wrap(tensors, readings.exact)).numpy()

    def values(self, tensors: list[Any]) -> dict[str, Any]:
        """Give the values of these tensors, as host arrays."""
        found: dict[str, Any] = {}
        wanted = []
        feeds = {
            p.name: x for p, x in zip(self.program.graph.inputs, self.program.feeds, strict=True)
        }
        for tensor in {t.name: t for t in tensors}.values():
            if tensor.op.type == "Placeholder" and tensor.name in feeds:
                if isinstance(feeds[tensor.name], tf.Tensor) and tensor.dtype != tf.resource:
                    found[tensor.name] = probes.on_host(feeds[tensor.name])
            elif tensor.op.type != "Placeholder":
                wanted.append(tensor)
        if wanted:
            out = self._call(self._wrap(wanted, list))
            found.update({t.name: probes.on_host(x) for t, x in zip(wanted, out, strict=True)})
        return found


def _last(error: Exception) -> str:
    """Give what went wrong, without the stack that TensorFlow puts before it."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "node" not in line), _first(error))[:200]


def _behind(definition: Any, wanted: list[str]) -> Any:
    """Cut a graph down to what some of its nodes are made of."""
    nodes = {node.name: node for node in definition.node}
    seen: set[str] = set()
    todo = list(wanted)
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += [x.lstrip("^").partition(":")[0] for x in nodes[name].input]
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
    tf.config.optimizer.set_experimental_options({name: True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({name: before})
