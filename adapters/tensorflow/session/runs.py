"""What a program runs by ``tf.compat.v1.Session``: each run that gives numbers is a step."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.client.session import BaseSession
from tensorflow.python.eager.context import eager_mode

from anynan._base.patches import Patches
from anynan._base.walks import walk
from anynan._diagnosis.evidence import ReplayError
from anynan.tensorflow.graphs.names import RANDOM
from anynan.tensorflow.graphs.traces import Trace
from anynan.tensorflow.read.probes import is_float
from anynan.tensorflow.replay.program import ARGUMENTS, TAKING, Program

# Of variables that a run writes: what they held before is kept up to this size.
KEPT = 2**26
WRITTEN = (
    "this run of a session changed variables that held nothing before, or more than 64 MiB, which "
    "are not kept: the report names no operation"
)
_VARIABLES = ("Variable", "VariableV2", "VarHandleOp")
_TAKES = ("Identity", "ReadVariableOp")
_BEGINS = ("Assign", "AssignVariableOp")
_ASKS = ("IsVariableInitialized", "VarIsInitializedOp")


class Part:
    """Be the part of a graph that some tensors are made of.

    Args:
        graph: The graph.
        wanted: Operations that a run is asked for.
        anew: See below, where a larger part of the same run knows it.

    Attributes:
        anew: What variables begin anew with, by their names, if no variable has a part in that: a
            read in the same run is of it.
        reads: What takes the content of a variable, and the name of that.
        draws: What it draws at random: a run gives that too, and another is given it.
        writes: Whether running it changes a variable.
        taking: Whether it takes its data from an iterator or a queue.
        updates: What it writes into variables: gradients.
    """

    def __init__(self, graph: Any, wanted: list[Any], anew: dict[str, Any] | None = None) -> None:
        behind = set(walk(wanted, _behind))
        self._graph, self.writes, self.taking = graph, False, False
        self._nodes = [op for op in graph.get_operations() if op in behind]
        self.reads: dict[Any, str] = {}
        drawn = (x for op in self._nodes if op.type in RANDOM for x in op.outputs)
        self.draws: list[Any] = [x for x in drawn if graph.is_fetchable(x)]
        self.updates: list[Any] = []
        begun = [op.inputs for op in self._nodes if op.type in _BEGINS]
        self.anew = anew or {
            variable.op.name: x
            for variable, x in begun
            if not any(op.type in _VARIABLES for op in walk([x.op], _behind))
        }
        for op in self._nodes:
            held = [x.op.name for x in op.inputs if x.op.type in _VARIABLES]
            if held and op.type in _TAKES:
                if held[0] not in self.anew:
                    self.reads[op.outputs[0]] = held[0]
            elif held and op.type not in _ASKS:
                self.writes = True
                if op.type in _BEGINS:
                    continue
                found = [x for x in op.inputs if is_float(x) and x.op.type not in _VARIABLES]
                self.updates += [x for x in found if graph.is_fetchable(x) and x not in self.reads]
            self.taking = self.taking or op.type.startswith(TAKING)
        self.get_tensor_by_name = graph.get_tensor_by_name

    def as_graph_def(self) -> Any:
        """Give the graph, with an input in the place of what reads a variable or draws."""
        found, given = self._graph.as_graph_def(), {x.op.name: x for x in self._given()}
        for node in found.node:
            node.attr.pop("_class", None)  # a place beside a variable, which is not among them
            if node.name in given:
                node.op = "Placeholder"
                del node.input[:]
                node.attr.clear()
                node.attr["dtype"].type = given[node.name].dtype.base_dtype.as_datatype_enum
            elif node.op in _TAKES and node.input[0] in self.anew:
                x = self.anew[node.input[0]]
                node.op, node.input[:] = "Identity", [x.name]
                node.attr.clear()
                node.attr["T"].type = x.dtype.base_dtype.as_datatype_enum
        return found

    def get_operations(self) -> list[Any]:
        """List its operations, but for those that read a variable or draw."""
        given = {x.op for x in self._given()}
        return [op for op in self._nodes if op not in given and op.type not in _VARIABLES]

    def _given(self) -> list[Any]:
        return [*self.reads, *self.draws]


class Ran:
    """Know one run of a session: what it was asked for, what it was fed, what it began with.

    Args:
        run: Runs a session in nobody's sight.
        session: The session.
        tensors: What it was asked for.
        feeds: What it was fed.
        part: What the run needs of the graph.

    Attributes:
        draws: What the run is to give of what it draws at random.
    """

    def __init__(
        self, run: Callable[..., Any], session: Any, tensors: list[Any],
        feeds: Mapping[Any, Any] | None, part: Part,
    ) -> None:  # fmt: skip
        self._run, self._session, self._part = run, session, part
        self._drawn: dict[Any, Any] = {}
        # What is a number is the loss, as far as a report goes: the first of them.
        first = next((x for x in tensors if x.shape.rank == 0), None)
        self.fetched = [("loss" if x is first else x.op.name, x) for x in tensors]
        self._feeds = {
            session.graph.as_graph_element(x): value for x, value in (feeds or {}).items()
        }
        self.writes, self.draws = part.writes, part.draws
        self._kept = self._content() if part.writes and _size(part.reads) <= KEPT else None

    def _content(self) -> list[Any] | None:
        """Give what the variables hold."""
        try:
            content: list[Any] = self._run(self._session, list(self._part.reads))
        except tf.errors.OpError:  # one holds nothing yet
            return None
        return content

    def keep(self, drawn: list[Any]) -> None:
        """Keep what the run drew; where that is much, no later run gives it."""
        if sum(x.nbytes for x in drawn) <= KEPT:
            self._drawn = dict(zip(self.draws, drawn, strict=True))
        else:
            self._part.draws = []

    def program(self) -> Program:
        """Give the part of the graph and what to run it on.

        Raises:
            ReplayError: If that cannot be told any more.
        """
        if self._part.taking:
            raise ReplayError(ARGUMENTS)
        kept = self._kept if self._part.writes else self._content()
        if kept is None:
            raise ReplayError(WRITTEN)
        reads, graph = self._part.reads, self._session.graph
        try:
            fed = {graph.as_graph_element(x): value for x, value in self._feeds.items()}
        except (KeyError, TypeError, ValueError):  # it is made of several
            raise ReplayError(ARGUMENTS) from None
        fed = self._drawn | fed
        inputs = [*fed, *reads]
        feeds = [
            tf.constant(value, x.dtype.base_dtype)
            for x, value in zip(inputs, [*fed.values(), *kept], strict=True)
        ]
        weights = {x.op.name: name for x, name in reads.items()} | {x: x for x in reads.values()}
        anew = self._part.anew
        wanted = [*(x for _, x in self.fetched), *anew.values()]
        part: Any = Part(graph, [x.op for x in wanted], anew)
        part.draws = [x for x in part.draws if x in self._drawn]
        return Program(
            part, inputs, Trace(), feeds, {x.op.name: x.op.name for x in fed}, {},
            results=[(name, x) for name, x in self.fetched if x.dtype == x.dtype.base_dtype],
            weights=weights,
        )  # fmt: skip


def watch(
    step: Callable[[Ran, list[Any]], object], free: Callable[[], bool],
    failed: Callable[[Exception], object],
) -> Patches:  # fmt: skip
    """Have each run of a session that gives or writes numbers with a fraction be a step.

    Args:
        step: Is told what ran, and the numbers that it gave, in the order of ``Ran.fetched``.
        free: Tells whether nobody else runs at this moment.
        failed: Is told why a run is not watched.

    Returns:
        What was changed.
    """
    # By session: a part holds its graph, and would hold itself by that.
    parts: weakref.WeakKeyDictionary[Any, dict[Any, Part]] = weakref.WeakKeyDictionary()

    def begun(
        real: Callable[..., Any], session: Any, fetches: Any, feeds: Any
    ) -> tuple[Ran, list[int], int] | None:
        """Give what is known of a run before it: itself, where its numbers are, of how many."""
        asked = list(_asked(session.graph, fetches))
        places = [i for i, x in enumerate(asked) if isinstance(x, tf.Tensor) and is_float(x)]
        key = tuple(x.name for x in asked if x is not None)
        known = parts.setdefault(session, {})
        if key not in known:
            wanted = [getattr(x, "op", x) for x in asked if x is not None]
            known[key] = Part(session.graph, wanted)
        part, tensors = known[key], [asked[i] for i in places]
        # A gradient may be bad where each number that was asked for is finite.
        written = [x for x in part.updates if x not in tensors]
        if not tensors or _size(written) <= KEPT:
            tensors += written
        if not tensors:
            return None
        return Ran(real, session, tensors, feeds, part), places, len(asked)

    def change(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, fetches: Any, feed_dict: Any = None, *args: Any, **kwargs: Any) -> Any:
            try:
                found = begun(real, self, fetches, feed_dict) if free() else None
            except Exception as error:  # noqa: BLE001  the program's run is none of our affair
                failed(error)
                found = None
            if found is None:
                return real(self, fetches, feed_dict, *args, **kwargs)
            ran, places, count = found
            # What it only writes is read as well, and what it draws.
            written = [x for _, x in ran.fetched[len(places) :]]
            asked = fetches, written, ran.draws
            out, values, drawn = real(self, asked, feed_dict, *args, **kwargs)
            ran.keep(drawn)
            if places and all(np.isfinite(x).all() for x in values):
                values = []  # to read each would take longer than a small step
                del ran.fetched[len(places) :]
            given = tf.nest.flatten(out)
            if not places or len(given) == count:
                with eager_mode():
                    step(ran, [*(given[i] for i in places), *values])
            return out

        return run

    patches = Patches()
    patches.change(BaseSession, "run", change)
    return patches


def _size(tensors: Iterable[Any]) -> int:
    """Count the bytes of tensors; what has no shape yet counts as none."""
    return sum((x.shape.num_elements() or 0) * x.dtype.size for x in tensors)


def _behind(op: Any) -> list[Any]:
    """List what an operation needs, and what it is the gradient of."""
    forward = getattr(op, "_original_op", None)
    needed = [*(x.op for x in op.inputs), *op.control_inputs]
    return needed if forward is None else [*needed, forward]


def _asked(graph: Any, fetches: Any) -> Iterator[Any]:
    """Give the tensors and operations that a run is asked for; None for what is made of some."""
    for x in tf.nest.flatten(fetches):
        try:
            yield graph.as_graph_element(x)
        except (KeyError, TypeError, ValueError):
            yield None
