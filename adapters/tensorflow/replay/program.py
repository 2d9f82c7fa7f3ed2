"""The graph of a step, and what to run it on."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import cond as branches
from tensorflow.python.ops import while_loop as loops

from anynan._arrays.containers import leaves
from anynan._base.patches import Patches
from anynan._diagnosis.agreement import same_end
from anynan._diagnosis.evidence import ReplayError
from anynan._reach import Exhausted
from anynan.errors import reason
from anynan.tensorflow.graphs.traces import Trace
from anynan.tensorflow.messages import BATCH_INSIDE
from anynan.tensorflow.read.frames import here, named_arguments, tensors
from anynan.tensorflow.read.weights import parts, read
from anynan.tensorflow.replay import nested, turns
from anynan.tensorflow.replay.reached import Began, Reached
from anynan.tensorflow.replay.steps import Held, Part, Step
from anynan.tensorflow.replay.taped import Differentiated

GIVEN = "output_gradients"
EARLY = "the second run ended before the first did: {}"
# How far loops and branches are looked into: each turn counts the nodes that there are by then,
# since what it asks for is a run of them.
MOST = 100_000
TOO_LONG = "its loops and branches take too many turns"
# A part of the graph, with its inputs and what they hold, and one of its tensors -> its value.
Ask = Callable[[Any, list[tuple[Any, Any]], Any], Any]


class Answers:
    """Give the tensors of a graph that is traced their values, as an eager run would.

    Args:
        given: The arguments of the first run.
        ended: The exception that ended it.
        ask: Runs what there is of the graph.
        most: How many nodes all turns of loops and branches may count, None for any number.

    Attributes:
        taken: What the code took last before it ended so again: a tensor, or a node.
        notes: What is to be said of the run.
    """

    def __init__(
        self, given: Any, ended: BaseException | None, ask: Ask, most: int | None = None
    ) -> None:
        self.taken: Any = None
        self.notes: list[str] = []
        self._given, self._ended, self._ask = given, ended, ask
        self._graph: Any = None
        self._inputs: list[tuple[Any, Any]] = []
        self._asked: tuple[Any, int] = None, -1
        self._left = most

    def heard(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Make a function that is answered, and that ends early where the code raises."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._graph, self.taken, self.notes = here(), None, []
            pairs = zip(_leaves_of((args, kwargs)), _leaves_of(self._given), strict=True)
            self._inputs = [(p, x) for p, x in pairs if isinstance(p, tf.Tensor)]
            try:
                return fn(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  what ran before it may show the fault
                self._stop(error)
                return None

        return functools.update_wrapper(run, fn, updated=())

    def _stop(self, error: Exception) -> None:
        """Note how the code ended: what there is up to then is run."""
        if self._ended is not None and same_end(self._ended, error):
            nodes = self._graph.get_operations()
            last, count = self._asked
            self.taken = last if count == len(nodes) else nodes[-1]
        elif isinstance(error, Exhausted):
            raise error
        else:
            self.notes = [EARLY.format(reason(error))]

    @contextmanager
    def given(self) -> Iterator[None]:
        """Answer what is asked meanwhile."""
        with tf.Graph().as_default():
            kind = type(tf.constant(0.0))
        with Patches() as patches:
            for name, take in (("bool", bool), ("float", float), ("int", int), ("index", int)):
                self._answered(patches, kind, name, lambda x, take=take: take(self._value(x)))
            self._answered(patches, kind, "array", self._array)
            self._answered(patches, kind, "iter", lambda x: iter(self.each(x)))
            self._answered(patches, kind, "len", lambda x: x.shape[0])
            patches.put(kind, "numpy", property(self._numpy))
            if self._left is not None:
                patches.change(branches, "cond", lambda run: self._ours(run, self._branch))
                patches.change(loops, "while_loop", lambda run: self._ours(run, self._loop))
            yield

    def _answered(self, patches: Patches, kind: Any, name: str, own: Callable[..., Any]) -> None:
        """Answer what the tensors of the graph are asked; others answer as they would."""
        real = getattr(kind, f"__{name}__", None)

        def answer(x: Any, *args: Any, **kwargs: Any) -> Any:
            if x.graph is self._graph:
                return own(x, *args)
            if real is None:
                msg = f"a {kind.__name__} has no __{name}__"
                raise TypeError(msg)
            return real(x, *args, **kwargs)

        patches.put(kind, f"__{name}__", answer)

    def _numpy(self, x: Any) -> Any:
        if x.graph is not self._graph:
            raise AttributeError
        return functools.partial(self._array, x)

    def _array(self, x: Any, dtype: Any = None) -> Any:
        value = self._value(x)
        return value if dtype is None else value.astype(dtype)

    def each(self, x: Any) -> Iterator[Any]:
        """Give what a tensor holds, one after the other."""
        count = x.shape[0]
        for i in range(int(self._value(tf.shape(x)[0])) if count is None else count):
            self._spend()
            yield x[i]

    def _ours(self, run: Any, by_value: Any) -> Any:
        """Run what TensorFlow makes of a branch or a loop by values, in the graph that is asked."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return (by_value if here() is self._graph else run)(*args, **kwargs)

        return call

    def _branch(self, pred: Any, true_fn: Any = None, false_fn: Any = None, **_: Any) -> Any:
        return true_fn() if pred else false_fn()

    def _loop(
        self, cond: Any, body: Any, loop_vars: Any, maximum_iterations: Any = None, **_: Any
    ) -> Any:
        most = itertools.count() if maximum_iterations is None else range(int(maximum_iterations))
        for _turn in most:
            if not cond(*loop_vars):
                break
            loop_vars = turns.several(body(*loop_vars))
        return loop_vars

    def _spend(self) -> None:
        """Count a turn.

        Raises:
            ReplayError: If there were too many.
        """
        if self._left is not None:
            self._left -= len(self._graph.get_operations())
            if self._left < 0:
                raise ReplayError(TOO_LONG)

    def _value(self, x: Any) -> Any:
        self._spend()
        self._asked = x, len(self._graph.get_operations())
        with tf.init_scope():
            return self._ask(self._graph, self._inputs, x)


def _leaves_of(value: Any) -> list[Any]:
    return list(tf.nest.flatten(value, expand_composites=True))


ARGUMENTS = BATCH_INSIDE(
    why="the batch is taken inside of the function, so the step cannot be run again"
)
# Operations that take from iterators and queues, and what those are handed on as.
TAKING = ("IteratorGetNext", "QueueDequeue", "Unstage", "MultiDeviceIteratorGetNext", "ReaderRead")
HANDLES = (tf.resource, tf.variant, tf.string)


class UntracedError(ReplayError):
    """The code of a step cannot be traced to a graph."""


@dataclass(frozen=True)
class Copied:
    """Stand for a variable that the step may write, and what it held before."""

    variable: Any
    content: Any


@dataclass
class Program:
    """Hold the graph of a step, and what to run it on.

    Attributes:
        graph: The graph.
        inputs: Its inputs.
        trace: What is known of it.
        feeds: The values of its inputs, in order.
        labels: Names of its inputs.
        variables: Name of a resource input -> its variable, ours or not.
        compiled: True if XLA compiled it.
        traced: True if it ran as a graph.
        results: What a tracked function gives back, with a name for each.
        taken: What its Python code took last, if an exception ended that; a node or a tensor.
        notes: What is to be said of the run.
        weights: Name of an input -> the weight that was read for it.
    """

    graph: Any
    inputs: list[Any]
    trace: Trace
    feeds: list[Any]
    labels: dict[str, str]
    variables: dict[str, Any]
    compiled: bool = False
    traced: bool = False
    results: list[tuple[str, Any]] = field(default_factory=list)
    taken: Any = None
    notes: list[str] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)


class Programs(Part):
    """Make the programs of steps.

    Args:
        held: What all parts of a session work on.
        value: Runs a part of a program for the value of one of its tensors.
    """

    def __init__(self, held: Held, value: Callable[[Program, Any], Any]) -> None:
        super().__init__(held)
        self._value = value

    def prepare(
        self, step: Step, *, fresh: bool = False, entering: Callable[[], None] | None = None
    ) -> Program:
        """Get the graph of a step, traced once more where it ran without one, or if wanted.

        Args:
            step: What ran.
            fresh: Whether to trace it once more in any case.
            entering: Called whenever its code begins to run for that.

        Raises:
            ReplayError: If that cannot be done.
        """
        if step.made is not None:
            ready: Program = step.made()
            return ready
        if step.taped is not None:
            return self._of_tape(step.taped, entering)
        compiled = hasattr(step.fn, "get_concrete_function")
        fn, concrete, answers = self._traced(step, entering, fresh=fresh and compiled)
        graph = concrete.graph
        source = _source_of_data(graph, concrete.captured_inputs)
        if source is not None:
            taken = f"the step takes its data from an iterator ({source})"
            why = f"{taken}, which a second run would advance"
            raise ReplayError(BATCH_INSIDE(why=why))
        found = self._fed(step, fn, graph, concrete.captured_inputs)
        found.compiled = compiled and bool(getattr(fn, "_jit_compile", False))
        found.traced = compiled
        if answers is not None:
            found.taken, found.notes = answers.taken, answers.notes
        if self._layers.model() is None or step.gives:
            found.results = list(tensors(graph.structured_outputs, "result"))
        return found

    def _of_tape(self, taped: Differentiated, entering: Callable[[], None] | None) -> Program:
        """Make a graph of what ran under a tape.

        Raises:
            ReplayError: If that cannot be done.
        """
        made = taped.prepare(self._layers)
        first = [] if entering is None else [entering]
        run = made.function(lambda: self._traces.of(here()), self._layers.weights.layer, *first)
        leaves = list(made.leaves.values())
        fn = tf.function(run, autograph=False)
        try:
            concrete = fn.get_concrete_function(*(tf.TensorSpec(x.shape, x.dtype) for x in leaves))
        except Exception as error:
            what = f"{type(error).__name__}: {first_line(error)}"
            msg = f"what ran under the tape could not be made again: {what}"
            raise ReplayError(msg) from error
        graph = concrete.graph
        known = zip(made.leaves, graph.inputs, strict=False)
        weights = {p.op.name: made.weights[i] for i, p in known if i in made.weights}
        pairs = list(zip(concrete.captured_inputs, graph.inputs[len(leaves) :], strict=True))
        more, variables = _captured(graph, pairs, [])
        begins = {id(x) for _, x in tensors(taped.incoming, GIVEN)}
        inputs = zip(made.leaves, graph.inputs, strict=False)
        labels = {p.op.name: GIVEN for i, p in inputs if i in begins}
        return Program(
            graph, graph.inputs, self._traces.of(graph), [*leaves, *more], labels, variables,
            weights=weights,
        )  # fmt: skip

    def _fed(self, step: Step, fn: Any, graph: Any, captured: list[Any]) -> Program:
        """Find what a graph is to be run on.

        Raises:
            ReplayError: If that cannot be told.
        """
        explicit = graph.inputs[: len(graph.inputs) - len(captured)]
        pairs = list(arguments(step, fn))
        if len(pairs) != len(explicit):
            raise ReplayError(ARGUMENTS)
        held, given, labels = list(step.kept), [], {}
        for (name, value), placeholder in zip(pairs, explicit, strict=True):
            variable = isinstance(value, tf.Variable)
            if variable != (placeholder.dtype == tf.resource):
                raise ReplayError(ARGUMENTS)
            if not variable:
                labels[placeholder.op.name] = name
                given.append(tf.convert_to_tensor(value, dtype=placeholder.dtype))
                continue
            if not any(value is v for v, _ in held):
                held.append((value, read(value)))
            given.append(value.handle)
        feeds, variables = _captured(
            graph, list(zip([*given, *captured], graph.inputs, strict=True)), held
        )
        return Program(graph, graph.inputs, self._traces.of(graph), feeds, labels, variables)

    def _traced(
        self, step: Step, entering: Callable[[], None] | None, *, fresh: bool
    ) -> tuple[Any, Any, Answers | None]:
        """Give the function that is run again, its graph, and what its code was answered."""
        fn, began = step.fn, step.began
        first = [] if began is None else [began.put_back]
        first += [] if entering is None else [entering]
        if fresh:
            python = fn.python_function
            fn, began = nested.anew(fn, *first), Reached(self._layers).begin(python)
            fn = python if self._state.asked else fn
        if hasattr(fn, "get_concrete_function"):
            return fn, _concrete(fn, step, began), None
        whole = self._whole(step) if step.layer else fn
        failed = None
        asked = self._state.asked
        if not asked and (step.ended is None or isinstance(step.ended, tf.errors.OpError)):
            try:
                made = tf.function(nested.begun(whole, *first))
                return made, _concrete(made, step, began), None
            except UntracedError as error:
                failed = error
        # It ran without a graph, so it may have asked for values: they are given to it again.
        ask, most = functools.partial(self._ask, step), MOST if asked else None
        answers = Answers((step.args, step.kwargs), step.ended, ask, most)
        made = tf.function(nested.begun(answers.heard(whole), *first), autograph=False)
        try:
            with answers.given():
                return made, _concrete(made, step, began), answers
        except UntracedError as error:
            raise failed or error from None

    def parted(self, step: Step) -> AbstractContextManager[None]:
        """Have the turn of a loop that goes bad traced by itself."""

        def value(graph: Any, x: Any) -> Any:
            given = [value for _, value in arguments(step, step.fn)]  # captures come after them
            return self._ask(step, graph, list(zip(graph.inputs, given, strict=False)), x)

        return turns.parted(value)

    def _ask(self, step: Step, graph: Any, inputs: list[tuple[Any, Any]], x: Any) -> Any:
        """Give the value of a tensor of a graph that is still traced."""
        captured, variables = _captured(graph, graph.captures, step.kept)
        inside = [p for p, _ in inputs] + [inner for _, inner in graph.captures]
        feeds = [tf.convert_to_tensor(value, dtype=p.dtype) for p, value in inputs] + captured
        part = Program(graph, inside, self._traces.of(graph), feeds, {}, variables)
        return self._value(part, x)

    def _whole(self, step: Step) -> Any:
        """Make a function of a model's call and its backward pass."""
        model = step.fn
        weights = self._layers.weights.trainable()
        incoming = self._state.incoming

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


def _captured(
    graph: Any, pairs: list[tuple[Any, Any]], held: list[tuple[Any, Any]]
) -> tuple[list[Any], dict[str, Any]]:
    """Give what a graph took from around it, and the variables among it by their inputs' names."""
    # A graph takes each replica's part of a variable, and the layers know the whole.
    kept = {id(part): (v, value) for v, value in held for part in parts(v)}
    # One that is still traced does not know its variables yet.
    known = (*graph.variables, *(part for v, _ in held for part in parts(v)))
    owners = {id(v.handle): v for v in known if hasattr(v, "handle")}
    found: list[Any] = []
    variables = {}
    for value, placeholder in pairs:
        variable = owners.get(id(value))
        if variable is None:
            found.append(value)
            continue
        variables[placeholder.op.name], before = kept.get(id(variable), (variable, None))
        written = any(op.type != "ReadVariableOp" for op in placeholder.consumers())
        if before is not None or written:
            value = Copied(variable, read(variable) if before is None else before)  # noqa: PLW2901
        found.append(value)
    return found, variables


def _concrete(fn: Any, step: Step, began: Began | None) -> Any:
    """Trace a function.

    Raises:
        UntracedError: If that cannot be done.
        ReplayError: If it would take what is not the replay's to take.
    """
    with nullcontext() if began is None else began.second_run():
        try:
            return fn.get_concrete_function(*step.args, **step.kwargs)
        except Exception as error:
            what = f"{type(error).__name__}: {first_line(error)}"
            msg = f"the step could not be traced to a graph: {what}"
            raise UntracedError(msg) from error


def _source_of_data(graph: Any, captured: Any) -> str | None:
    """Name an operation that takes something out of what is not the step's own."""
    variables = {id(variable.handle) for variable in graph.variables}
    foreign = any(x.dtype in HANDLES and id(x) not in variables for x in captured)
    return next((x for x in types(graph) if x.startswith(TAKING)), None) if foreign else None


def types(graph: Any) -> dict[str, None]:
    """List the types of a graph's nodes, and of those of the functions that it calls."""
    definition = graph.as_graph_def()
    nodes = [definition.node, *(function.node_def for function in definition.library.function)]
    return dict.fromkeys(node.op for part in nodes for node in part)


def arguments(step: Step, fn: Any) -> list[tuple[str, Any]]:
    """Name the arrays among a step's arguments, in the order of the graph's inputs."""
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
    found = leaves(value, name, parts=_components, flat=True)
    return [pair for pair in found if isinstance(pair[1], tf.Tensor | np.ndarray | tf.Variable)]


def _components(x: Any) -> list[tuple[str, Any]] | None:
    kinds = tf.RaggedTensor | tf.SparseTensor | tf.IndexedSlices | tf.distribute.DistributedValues
    if not isinstance(x, kinds) or isinstance(x, tf.Variable):
        return None
    return [("", part) for part in tf.nest.flatten(x, expand_composites=True)]


def first_line(error: Exception) -> str:
    """Give the beginning of an error's message."""
    return str(error).strip().partition("\n")[0][:200]
