"""What ran under a tape outside of graphs: noted as it runs, and made again as a graph."""

import math
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import tensorflow as tf
from tensorflow.python.eager import execute
from tensorflow.python.framework import op_callbacks, op_def_library, op_def_registry

from anynan._base.context import but
from anynan._base.sources import is_anynans, is_library
from anynan._base.summary import Summary
from anynan._diagnosis.evidence import ReplayError
from anynan.events import Kind
from anynan.tensorflow.graphs import names
from anynan.tensorflow.graphs.operations import arguments, inferred
from anynan.tensorflow.graphs.traces import Trace
from anynan.tensorflow.messages import NOT_UNDER_TAPE
from anynan.tensorflow.read import probes
from anynan.tensorflow.read.buffers import Block
from anynan.tensorflow.read.frames import Frame, here, tensors
from anynan.tensorflow.read.layers import Layers

_READS = ("ReadVariableOp", "ResourceGather")
_OPAQUE = (tf.resource, tf.variant, tf.string)
_library: dict[Any, bool] = {}
_local = threading.local()


class Line(NamedTuple):
    """Name a line, as the nodes of a graph do."""

    filename: str
    lineno: int
    name: str


class Note(NamedTuple):
    """Hold one operation.

    Attributes:
        kind: TensorFlow's type of it.
        inputs: Its inputs.
        attributes: Names and values by turns.
        outputs: Its results.
        frames: Where it ran: code and line, up to the first that is no library's.
        layer: The layer of Keras it ran in, weakly, and which call of it.
    """

    kind: str
    inputs: tuple[Any, ...]
    attributes: tuple[Any, ...]
    outputs: tuple[Any, ...]
    frames: tuple[tuple[Any, int], ...]
    layer: tuple[Any, int] | None

    def trace(self) -> list[Line]:
        """Give its lines, the innermost last."""
        return [Line(c.co_filename, line, c.co_name) for c, line in reversed(self.frames)]

    def runs(self) -> bool:
        """Tell whether it can be made again: it draws nothing, and touches no variable."""
        known = op_def_registry.get(self.kind)
        if known is None or known.is_stateful or self.kind in names.RANDOM:
            return False
        if any(x.dtype in _OPAQUE for x in (*self.inputs, *self.outputs)):
            return False
        return all(x.type != "func" for x in known.attr)

    def again(self, held: dict[int, Any]) -> list[Any]:
        """Make it in a graph.

        Args:
            held: What stands for a tensor there, by the tensor's id.
        """
        call = self.named([held.get(id(x), x) for x in self.inputs])
        *_, node, results = op_def_library._apply_op_helper(self.kind, **call)
        results = list(results)
        if execute.must_record_gradient():
            pairs = [(a.name, node.get_attr(a.name)) for a in node.op_def.attr]
            execute.record_gradient(node.type, node.inputs, sum(pairs, ()), results)
        return results

    def named(self, left: list[Any]) -> dict[str, Any]:
        """Give its arguments by name.

        Args:
            left: Its inputs, or others in their place.
        """
        known = op_def_registry.get(self.kind)
        given = dict(zip(self.attributes[::2], self.attributes[1::2], strict=True))
        call, told = arguments(known, given.__getitem__, left), inferred(known)
        for attribute in known.attr:
            if attribute.name in given and attribute.name not in told:
                value = given[attribute.name]
                call[attribute.name] = tf.as_dtype(value) if attribute.type == "type" else value
        return call


@dataclass(frozen=True, slots=True)
class Call:
    """Hold a call of a compiled function: all that is in it is made again.

    Attributes:
        fn: The function.
        args: What it was called with.
        kwargs: Likewise.
        outputs: Its results.
        layer: As of a note.
        kind: What stands for a note's type.
    """

    fn: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Any, ...]
    layer: tuple[Any, int] | None
    kind: ClassVar = "call"

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Give the tensors among what it was called with."""
        return _tensors((self.args, self.kwargs))

    def graph(self) -> Any:
        """Give what it was compiled to."""
        return self.fn.get_concrete_function(*self.args, **self.kwargs).graph

    def runs(self) -> bool:
        """Tell whether it can be made again: it draws nothing, and writes to no variable."""
        nodes = self.graph().get_operations()
        return not any(node.type in names.RANDOM or "Assign" in node.type for node in nodes)

    def again(self, held: dict[int, Any]) -> list[Any]:
        """Make it in a graph, as a note is made."""
        given = tf.nest.map_structure(lambda x: held.get(id(x), x), (self.args, self.kwargs))
        return list(_tensors(self.run(*given)))

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call what it is a call of."""
        return in_place(self.fn, args, kwargs, asked=False)

    def variables(self) -> tuple[Any, ...]:
        """Give the variables that it reads by itself."""
        return tuple(self.graph().variables)


class Custom(Call):
    """Hold a call of a function that gives its result and what makes its own gradient."""

    __slots__ = ()

    def runs(self) -> bool:
        """Tell whether it can be made again."""
        return True

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function."""
        return tf.custom_gradient(self.fn)(*args, **kwargs)

    def variables(self) -> tuple[Any, ...]:
        """Give the variables that it was called with."""
        held = tf.nest.flatten((self.args, self.kwargs))
        return tuple(x for x in held if isinstance(x, tf.Variable))


def _run(fn: Any, args: Any, kwargs: Any) -> Any:
    return fn(*args, **kwargs)


def in_place(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, asked: bool) -> Any:
    """Call what a compiled function was made of, with its control flow as compiled, or as asked."""
    if asked:
        return fn.python_function(*args, **kwargs)
    # Converted, our own call hands the function on to be converted, and its lines are kept.
    converted: Callable[..., Any] = tf.autograph.to_graph(_run)
    return converted(fn.python_function, args, kwargs)


def _tensors(value: Any) -> tuple[Any, ...]:
    return tuple(x for x in tf.nest.flatten(value) if isinstance(x, tf.Tensor))


Noted = Note | Call


class Record:
    """Note what runs outside of graphs in this thread.

    Args:
        before: What it goes on from.

    Attributes:
        notes: What ran.
        before: What ran before it.
        on: Whether it is noted now.
    """

    def __init__(self, before: Iterable[Noted] = ()) -> None:
        self.notes: deque[Noted] = deque()
        self.before = tuple(before)
        self._inside: list[tuple[Any, int]] = []
        self._calls: dict[int, int] = {}
        self.on = True

    def note(
        self, kind: Any, inputs: Any, attributes: Any, outputs: Any, op_name: Any = None,
        graph: Any = None,
    ) -> None:  # fmt: skip
        """Note an operation that has run, as TensorFlow tells of it."""
        if graph is not None or not self.on:
            return
        kind = kind.decode() if isinstance(kind, bytes) else kind
        if kind.startswith("IteratorGetNext"):  # else all batches of an epoch were kept
            return
        layer = self._inside[-1] if self._inside else None
        self._add(Note(kind, tuple(inputs), tuple(attributes), tuple(outputs), frames(), layer))

    def _add(self, note: Noted) -> None:
        self.notes.append(note)

    def whole(
        self, run: Callable[[], Any], kind: type[Call], fn: Any, args: Any, kwargs: Any
    ) -> Any:
        """Run a call of a function, and note it as a whole."""
        if not self.on:
            return run()
        with self.off():
            out = run()
        layer = self._inside[-1] if self._inside else None
        note = kind(fn, args, kwargs, _tensors(out), layer)
        if not any(map(tf.is_symbolic_tensor, (*note.inputs, *note.outputs))):  # a model is saved
            self._add(note)
        return out

    def all(self) -> tuple[Noted, ...]:
        """Give what ran, and what ran before it."""
        return (*self.before, *self.notes)

    def off(self) -> AbstractContextManager[None]:
        """Note nothing meanwhile."""
        return but(self, on=False)

    @contextmanager
    def inside(self, layer: Any) -> Iterator[None]:
        """Note that a layer runs."""
        call = self._calls[id(layer)] = self._calls.get(id(layer), -1) + 1
        self._inside.append((weakref.ref(layer), call))
        try:
            yield
        finally:
            self._inside.pop()


# What a trail holds at most: operations, and elements of what they took and gave.
_MANY, _LARGE = 1000, 2**24


class Trail(Record):
    """Note what follows a gradient, or a call of a model, outside of the layers."""

    def __init__(self, before: Iterable[Noted] = ()) -> None:
        super().__init__(before)
        self._sizes: deque[int] = deque()
        self._size = 0

    def _add(self, note: Noted) -> None:
        """Note an operation; where there are too many the oldest are let go."""
        super()._add(note)
        size = sum(x._num_elements() for x in (*note.inputs, *note.outputs))
        self._sizes.append(size)
        self._size += size
        while len(self._sizes) > _MANY or self._size > _LARGE:
            self._size -= self._sizes.popleft()
            self.notes.popleft()

    @contextmanager
    def inside(self, layer: Any) -> Iterator[None]:
        """Note nothing in a layer: what it gives is read."""
        with self.off():
            yield


def begin() -> None:
    """Begin a record of this thread, in the place of the one before; a trail goes before it."""
    last = running()
    end()
    before = last.notes if isinstance(last, Trail) else ()
    record = _local.record = _local.running = Record(before)
    op_callbacks.add_op_callback(record.note)


def trail(*, afresh: bool) -> None:
    """Begin to note what follows, unless a record is written; a tape's own goes before it.

    Args:
        afresh: Whether to let go of what followed before.
    """
    record = running()
    if isinstance(record, Trail) and afresh:
        end()
        record = None
    if record is None:
        under = newest()
        record = _local.running = Trail(() if under is None else under.all())
        op_callbacks.add_op_callback(record.note)


def end() -> None:
    """End it; that of a tape is there until the next begins, or it is dropped."""
    record = getattr(_local, "running", None)
    if record is not None:
        _local.running = None
        op_callbacks.remove_op_callback(record.note)


def drop() -> None:
    """Keep nothing of what ran."""
    end()
    _local.record = None


def newest() -> Record | None:
    """Give the record of this thread's last tape."""
    return getattr(_local, "record", None)


def running() -> Record | None:
    """Give this thread's record while it is written."""
    return getattr(_local, "running", None)


@contextmanager
def off() -> Iterator[None]:
    """Note nothing meanwhile."""
    with ExitStack() as stack:
        for record in (newest(), running()):
            if record is not None:
                stack.enter_context(record.off())
        yield


class Differentiated(NamedTuple):
    """Hold what a gradient was asked of, and what had run by then.

    Attributes:
        notes: What ran.
        target: What is differentiated.
        incoming: The gradient it begins with, None for ones.
        sources: Data whose gradient was asked for.
        frame: What is read of it, where no gradient was asked.
    """

    notes: tuple[Noted, ...]
    target: Any
    incoming: Any = None
    sources: tuple[Any, ...] = ()
    frame: Frame | None = None

    def _needed(self) -> list[Noted]:
        """Choose what the target is made of, and what it is differentiated with.

        Raises:
            ReplayError: If that is nothing.
        """
        given = (*tensors(self.incoming, "gradient"), *tensors(self.target, "loss"))
        wanted = {id(x) for _, x in given}
        needed: list[Noted] = []
        for note in reversed(self.notes):
            if any(id(x) in wanted for x in note.outputs) and note.runs():
                needed.append(note)
                wanted |= {id(x) for x in note.inputs}
        if not needed:
            raise ReplayError(NOT_UNDER_TAPE())
        return needed[::-1]

    def _leaves(self, needed: list[Noted]) -> dict[int, Any]:
        """Give what that begins with, by id."""
        made = {id(x) for note in needed for x in note.outputs}
        begins = [x for _, x in tensors(self.incoming, "gradient")]
        leaves: dict[int, Any] = {}
        for x in (*begins, *(x for note in needed for x in note.inputs)):
            if id(x) not in made and (x.dtype.is_floating or x.dtype.is_complex):
                leaves[id(x)] = x
        return leaves

    def prepare(self, layers: Layers) -> "Made":
        """Choose what is to be made again.

        Args:
            layers: What is watched.

        Raises:
            ReplayError: If that is nothing.
        """
        needed = self._needed()
        leaves = self._leaves(needed)
        owners = layers.weights.handles()
        read: dict[int, str] = {}
        for note in self.notes:
            if note.kind in _READS and id(note.inputs[0]) in owners:
                read |= {id(x): owners[id(note.inputs[0])] for x in note.outputs}
        # What reads a variable by itself, without an operation of its own, is told by its content.
        for i, x in leaves.items():
            name = None if i in read else layers.weights.holding(x)
            if name is not None:
                read[i] = name
        paths = {id(layer): path for path, layer in layers.alive().items()}
        calls = (note for note in needed if not isinstance(note, Note))
        inside = {id(v): v for call in calls for v in call.variables()}
        mine = [v for v in inside.values() if layers.weights.name(v)]
        return Made(self, needed, leaves, read, paths, mine)


@off()
def suspect(kind: Kind, taken: Sequence[Summary]) -> Differentiated | None:
    """Hold what ran before up to what made NaN or Inf of finite numbers, if one line alone did.

    Args:
        kind: What came into a step: counts where several lines made some.
        taken: What held it there.
    """
    record, held = running() or newest(), dict[int, Any]()
    notes = () if record is None else record.all()
    for x in (x for note in notes for x in (*note.inputs, *note.outputs) if probes.is_float(x)):
        held[id(x)] = held.get(id(x)) or probes.kind(probes.on_host(x))
    made: dict[Any, dict[Any, int]] = {}
    for i, note in enumerate(notes):
        word = max(filter(None, (held.get(id(x)) for x in note.outputs)), default=None)
        if word and note.inputs and not any(map(held.get, map(id, note.inputs))) and note.runs():
            line = note.frames[-1] if isinstance(note, Note) else note.fn
            made.setdefault(word, {}).setdefault((note.kind, line), i)
    mine = made.get(kind, {}) if len(made) > 1 else next(iter(made.values()), {})
    bad = [tuple(x.shape) for note in notes for x in note.outputs if held.get(id(x))]
    # It may be that, rows of it, or several like it.
    same = any(x[1:] == y.shape[1:] or math.prod(x) == y.size for x in bad for y in taken)
    if len(mine) != 1 or not same:
        return None
    (last,) = mine.values()
    frame = Frame(None)
    for x in notes[last].outputs:
        frame.take(x, None, "loss", "loss")
    return Differentiated(notes[: last + 1], frame.tensors, frame=frame)


class Made(NamedTuple):
    """Hold what makes the graph.

    Attributes:
        of: What it is of.
        notes: What is made again.
        leaves: What it begins with, by id.
        weights: The weight that one of those is, by id.
        paths: The watched layers' paths, by id.
        inside: The weights that compiled functions read by themselves.
    """

    of: Differentiated
    notes: list[Noted]
    leaves: dict[int, Any]
    weights: dict[int, str]
    paths: dict[int, str]
    inside: list[Any]

    def function(
        self, trace: Callable[[], Trace], layer: Callable[[str], str], *first: Callable[[], None]
    ) -> Callable[..., Any]:
        """Make the function to be traced.

        Args:
            trace: Gives what is known of the graph that is traced.
            layer: Gives the layer of a weight.
            first: Called when it begins.
        """

        def run(*given: Any) -> None:
            for each in first:
                each()
            graph, known = here(), trace()
            held = dict(zip(self.leaves, given, strict=True))
            watched = [(i, x) for i, x in held.items() if i in self.weights]
            asked = {id(x) for x in self.of.sources}  # an operation before may have made them
            with tf.GradientTape() as tape:
                tape.watch([x for i, x in held.items() if i in self.weights or i in asked])
                for note in self.notes:
                    made = dict(
                        zip(map(id, note.outputs), self._again(note, known, held), strict=True)
                    )
                    tape.watch([x for i, x in made.items() if i in asked])
                    held |= made
            frame = Frame(graph, replaying=True)
            if self.of.frame is not None:
                for point, x in zip(self.of.frame.points, self.of.frame.tensors, strict=True):
                    place = point.layer, point.phase, point.tensor, point.parameter
                    frame.take(held.get(id(x), x), *place)
                known.blocks.append(Block(-1, frame.points, frame.order))
                return
            target = tf.nest.map_structure(lambda x: held.get(id(x), x), self.of.target)
            data = [held[i] for i in asked if i in held]
            sources = [*(x for _, x in watched), *self.inside, *data]
            begins = tf.nest.map_structure(lambda x: held.get(id(x), x), self.of.incoming)
            slopes = tape.gradient(target, sources, output_gradients=begins)
            # Where it is asked for those of variables, that reads them, and the loss.
            for label, x in tensors(() if self.inside else target, "loss"):
                frame.take(x, None, "loss", label)
            for (i, _), slope in zip(watched, slopes, strict=False):
                name = self.weights[i]
                for _, x in tensors(slope, ""):
                    label = f"grad of {name.rpartition('.')[2]}"
                    frame.take(x, layer(name), "backward", label, name)
            for _, x in tensors(slopes[len(sources) - len(data) :], ""):
                frame.take(x, None, "backward", "gradient")
            known.blocks.append(Block(-1, frame.points, frame.order, backward=True))

        return run

    def _again(self, note: Noted, trace: Trace, held: dict[int, Any]) -> list[Any]:
        with tf.name_scope("note") as scope:
            place = scope.rstrip("/")
            if isinstance(note, Note):
                trace.lines[place] = note.trace()
            path = None if note.layer is None else self.paths.get(id(note.layer[0]()))
            if note.layer is None or path is None:
                return note.again(held)
            trace.scopes[place] = path, note.layer[1]
            with trace.under(path):
                return note.again(held)


def frames() -> tuple[tuple[Any, int], ...]:
    """Give where the operation runs that is told of: code and line, up to the user's own."""
    found = []
    frame: Any = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        found.append((code, frame.f_lineno))
        known = _library.get(code)
        if known is None:
            file = code.co_filename
            known = _library[code] = is_library(file) or is_anynans(file)
        if not known:
            break
        frame = frame.f_back
    return tuple(found)
