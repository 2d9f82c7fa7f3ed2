"""Records of operations with bad results, for the core's lineage."""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from anynan._base.summary import Summary
from anynan._base.walks import walk
from anynan._calls.collector import offer
from anynan._diagnosis.evidence import BadParameter
from anynan._diagnosis.lineage import External, OpRecord, Sink
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
from anynan.events import STATE
from anynan.jax.graphs import names
from anynan.jax.graphs.bodies import rounds_of
from anynan.jax.graphs.graph import Node, Value, fills
from anynan.jax.graphs.operations import Op
from anynan.jax.graphs.versions import rebind_in, wide_numbers
from anynan.jax.program.evaluator import jit_once
from anynan.jax.program.program import Program
from anynan.jax.read import probes
from anynan.jax.read.readings import Plan
from anynan.jax.replay import saving
from anynan.jax.replay.rounds import LoopIndex, LoopIterations, order

if TYPE_CHECKING:
    from anynan.jax.replay.flags import Flag

# Records of one replay at most: a loop may have a fault in every round.
INSTANCES = 1000
_PARAMS = {"y": "exponent", "axes": "dim", "axis": "dim", "dimension": "dim"}


@dataclass(frozen=True, slots=True)
class BadOp:
    """Hold an operation with a bad result, in one round of the loops around it.

    Attributes:
        op: The operation.
        its: The round of each loop, outermost first.
        worst: The result that its record is about.
    """

    op: Op
    its: LoopIndex
    worst: int


class Recorder:
    """Make the records of one replay."""

    def __init__(
        self, program: Program, found: "dict[int, Flag]", bad: list[Op], points: list[ProbePoint]
    ) -> None:
        self.program, self.found = program, found
        self.graph, self.operations = program.graph, program.operations()
        looked = None if program.look is None else program.look.its
        self.rounds = LoopIterations(self.graph, self.operations, found, looked)
        # Where bad values arrived, and in which round: first of all, and first as NaN.
        self.arrived = [(point, its) for point in points for its in self._first(point.value)]
        moments = self._moments(bad)
        self.bad = sorted(moments, key=self._order)
        self.index = {(m.op.index, m.its): i for i, m in enumerate(self.bad)}
        self.held: dict[tuple[int, LoopIndex], Any] = {}
        self.arguments: list[Any] = []
        self.trouble: list[str] = []

    def _first(self, index: int) -> list[LoopIndex]:
        """Give the rounds in which a value was first bad, and first NaN."""
        flag = self.found.get(index)
        if flag is None or not flag.word:
            return []
        rounds = [self.rounds.first(index), self.rounds.first(index, probes.NAN)]
        return list(dict.fromkeys(rounds))

    def _moments(self, bad: list[Op]) -> list[BadOp]:
        """Choose the rounds that are looked at: those that handed bad values on to the harm."""
        todo: list[tuple[Op, LoopIndex]] = []
        for point, its in self.arrived:
            todo += self.rounds.writers(point.value, its)
        for op in bad:  # what was hidden again, and where an Inf became NaN
            for index in op.outs:
                todo += [(op, its) for its in self._first(index)]
        found: dict[tuple[int, LoopIndex], BadOp] = {}
        while todo and len(found) < INSTANCES:
            op, its = todo.pop(0)
            worst = self.rounds.worst(op, its)
            if worst is None or (op.index, its) in found:
                continue
            found[op.index, its] = BadOp(op, its, worst)
            for index in op.ins:
                todo += self.rounds.writers(index, its)
            if op.forward is not None:
                todo.append((op.forward, self._paired(op.forward, its)))
        return list(found.values())

    def _paired(self, forward: Op, its: LoopIndex) -> LoopIndex:
        """Give the round of a forward operation that a round of its gradient belongs to."""
        return its[: forward.nodes[0].loops]

    def _order(self, bad: BadOp) -> tuple[Any, ...]:
        """Say when an operation ran: its position, each loop's round filled in."""
        writer = self.graph.values[bad.worst].writer
        node = bad.op.nodes[-1] if writer is None else self.graph.nodes[writer]
        rounds = list(order(bad.its, self.graph.loops.get(node.path, ())))
        return tuple(
            part if part is not None else (rounds.pop(0) if rounds else 0) for part in node.order
        )

    # Looking at the arrays themselves.

    def capture(self, arrays: list[Any]) -> None:
        """Run the program once more for the operands and results of the bad operations."""
        self.arguments = arrays
        wanted: set[tuple[int, tuple[int, ...]]] = set()
        size = 0
        for bad in self.bad[:DETAILED]:
            for index in (*(i for i, _ in self._named(bad)), bad.worst):
                key = self._key(index, bad)
                value = self.graph.values[index]
                if key is None or key in wanted or not self._looked_at(value, bad.op):
                    continue
                size += value.aval.size * value.aval.dtype.itemsize
                if size > KEPT:
                    break
                wanted.add(key)
        wanted.update((index, ()) for index in self.program.spoilt(self.found))
        if self.program.look is not None:
            self.held = self.program.look.capture(wanted)
            self.program.look = None  # a second run is not kept alive
        else:
            self.held = self._whole(wanted)
        self._sure()

    def _whole(self, wanted: Iterable[tuple[int, LoopIndex]]) -> dict[tuple[int, LoopIndex], Any]:
        """Give values in rounds of the program, which runs once more for those not at hand."""
        plan, held = Plan(replaying=True), dict[tuple[int, LoopIndex], Any]()
        for index, rounds in wanted:
            flag, argument = self.found.get(index), self.graph.values[index].argument
            array = None if flag is None else flag.array
            array = array if argument is None else self.arguments[argument]
            if array is not None:
                held[index, rounds] = array
            else:
                self.program.want(plan, index, "value", rounds)
        if plan.probes:
            run = jit_once(lambda *inner: self.program.evaluate(plan, inner)[1])
            held.update({(x.probe.key, x.probe.at): x.data for x in run(*self.arguments)})
        return held

    def _values(self, bad: BadOp, indices: list[int]) -> dict[int, Any]:
        """Give whole values as an operation saw them, for a bundle."""
        found: dict[int, Any] = {}
        keys: dict[tuple[int, LoopIndex], int] = {}
        for index in indices:
            value = self.graph.values[index]
            if value.known:
                number = np.asarray(value.constant, value.aval.dtype)  # of another shape, if folded
                found[index] = np.broadcast_to(number, value.aval.shape)
                continue
            key, dtype = self._key(index, bad), getattr(value.aval, "dtype", None)
            if key is None or dtype is None or jax.numpy.issubdtype(dtype, jax.dtypes.extended):
                continue
            keys[key] = index
        shard = self._shard(bad) or 0
        for key, array in self._whole(keys).items() if keys else ():
            index = keys[key]
            spread = np.ndim(array) > len(self.graph.values[index].aval.shape)  # or a number
            found[index] = array[shard] if spread else array
        return found

    def _sure(self) -> None:
        """Tell a NaN from Infs of both signs, where the values are at hand."""
        for (index, its), array in self.held.items():
            flag = self.found.get(index)
            # A sum of Infs of both signs reads as NaN.
            if flag is not None and flag.word == probes.NAN and not probes.holds_nan(array):
                if flag.its == its:
                    flag.word = probes.POSINF
                kept = flag.rounds is not None and flag.rounds.ndim == len(its)
                if kept and all(i < n for i, n in zip(its, flag.rounds.shape, strict=True)):
                    flag.rounds[its] = min(flag.rounds[its], probes.POSINF)

    def _looked_at(self, value: Value, op: Op) -> bool:
        if value.known:
            return False
        if probes.checkable(value.aval):
            return True
        dtype = getattr(value.aval, "dtype", None)
        if op.name == "take":
            return dtype is not None and not jax.numpy.issubdtype(dtype, jax.dtypes.extended)
        return op.name in ("divide", "pow") and dtype is not None and not value.aval.shape

    def _key(self, index: int, bad: BadOp) -> tuple[int, LoopIndex] | None:
        """Give the round of a value that an operation saw, None if that is not known."""
        value = self.graph.values[index]
        if value.loops > len(bad.its):
            return None
        mine = self.graph.loops.get(self.graph.values[bad.worst].path, ())
        for a, b in zip(self.rounds.loops(value), mine, strict=False):
            # A loop and its gradient's have a round for each item.
            if a is not b and (rounds_of(a) or -1) != rounds_of(b):
                return None
        return index, bad.its[: value.loops]

    def _array(self, index: int, bad: BadOp) -> Any:
        """Give the array of a value as an operation saw it, None if it was not looked at."""
        value = self.graph.values[index]
        if value.known:
            held = value.constant
            return held if isinstance(held, jax.Array) else np.asarray(held)
        key = self._key(index, bad)
        array = None if key is None else self.held.get(key)
        shard = self._shard(bad)
        if array is not None and np.ndim(array) > len(value.aval.shape):
            return array[shard or 0]
        return array

    def _shard(self, bad: BadOp) -> int | None:
        """Choose the shard to look at: a collective's operand is bad elsewhere than its result."""
        for made in (self.bad[i] for index in bad.op.ins for i in self._made_by(index, bad.its)):
            shard = self.found[made.worst].shard
            if shard is not None and made.op is not bad.op:
                return shard
        return self.found[bad.worst].shard

    def _made_by(self, index: int, its: LoopIndex) -> list[int]:
        """List the records of what wrote a value, as a round of the loops has it."""
        found = ((op.index, at) for op, at in self.rounds.writers(index, its))
        return [self.index[key] for key in found if key in self.index]

    # Records.

    def records(self) -> list[OpRecord]:
        """Give a record for each operation with a bad result, in the order of execution."""
        return [self._record(i, bad) for i, bad in enumerate(self.bad)]

    def _record(self, index: int, bad: BadOp) -> OpRecord:
        op, forward, named = bad.op, None, self._named(bad)
        if op.forward is not None:
            its = self._paired(op.forward, bad.its)
            forward = self.index.get((op.forward.index, its))
        record = OpRecord(
            index, op.name, op.raw, op.layer, op.phase, None, source=op.source,
            params=self._params(bad), forward=forward, feeds=self._feeds(op), direct=op.direct,
            call=op.call, iteration=bad.its[-1] if bad.its else None, shard=self._shard(bad),
            hidden=None if op.phase == "backward" else self.rounds.hidden(
                op, lambda index: self._word(index, bad)
            ),
        )  # fmt: skip
        word = self.rounds.word(bad.worst, bad.its) or 0
        known = _light(self.graph.values[bad.worst].aval, word)
        result = Given("result", self._array(bad.worst, bad), known)
        given = [self._given(i, name, bad) for i, name in named]
        Builder(_measured, self._origin, self.trouble.append, probes.on_host).describe(
            record, result, [item for item in given if item is not None],
            expected=self.program.allowed((op.forward or op).nodes[0]),
            wide=lambda _: self._wide(bad),
        )  # fmt: skip
        if op.phase == "optimizer":
            blame(self.program, record, op)
            record.name = names.update(op.site.near) or record.name
        self._masked_rows(record, bad)
        values = functools.partial(self._values, bad)
        call = functools.partial(saving.call, self.graph, op, bad.worst, dict(named), values)
        offer(record, call, probes.on_host)
        return record

    def _word(self, index: int, bad: BadOp) -> int | None:
        """Give the worst kind that was read of a value, None if it was not read."""
        mine = self.graph.loops.get(self.graph.values[bad.worst].path, ())
        same = self.rounds.loops(self.graph.values[index])[: len(mine)] == mine
        return self.rounds.word(index, bad.its if same else ())

    def _named(self, bad: BadOp) -> list[tuple[int, str]]:
        """Name the operands as the cause rules know them."""
        if bad.op.forward is None:
            return self._named_forward(bad.op, bad.worst)
        return self._named_backward(bad.op, bad.op.forward)

    def _named_forward(self, op: Op, worst: int | None = None) -> list[tuple[int, str]]:
        node = self._itself(op, worst)
        if node is not None:
            count = len(node.ins)
            return [(i, names.operand(node.name, k, count)) for k, i in enumerate(node.ins)]
        floats = [i for i in op.ins if self._matters(i)]
        return [(i, names.operand("", k, len(floats))) for k, i in enumerate(floats)]

    def _itself(self, op: Op, worst: int | None) -> Node | None:
        """Give the equation that an operation is all about, None where there are several."""
        if len(op.nodes) == 1:
            return op.nodes[0]
        mine = [n for n in op.nodes if n.name == op.name and (worst is None or n.outs == (worst,))]
        return mine[0] if len(mine) == 1 else None

    def _matters(self, index: int) -> bool:
        """Tell whether a value is more than a number of the function's own."""
        value = self.graph.values[index]
        if not probes.checkable(value.aval):
            return getattr(value.aval, "size", 1) == 0
        return not (value.known and not value.aval.shape)

    def _named_backward(self, op: Op, forward: Op) -> list[tuple[int, str]]:
        root = self.operations.root
        named = self._named_forward(forward)
        roots = [root(i) for i, _ in named]
        inside = {base: name for base, (_, name) in zip(roots, named, strict=True)}
        # Two parts of one array have one root, and are told apart by themselves.
        inside = {base: name for base, name in inside.items() if roots.count(base) == 1}
        inside.update(named)
        results = [*forward.outs, *(root(i) for i in forward.outs)]
        inside.update(dict.fromkeys(results, "result"))
        gave = [*named, *((i, "result") for i in forward.outs)]
        return gradient_operands(
            op.ins,
            lambda i: inside.get(i) or inside.get(root(i)),
            lambda i: self._other(i, root(i)),
            [pair for pair in gave if pair[1] != "condition"],
        )

    def _other(self, index: int, root: int) -> str | None:
        if self._gradient(index):
            return "grad"
        return f"{SAVED}[{index}]" if self._matters(root) else None

    def _gradient(self, index: int) -> bool:
        value = self.graph.values[index]
        if value.writer is not None:
            return self.graph.nodes[value.writer].place.backward
        nodes, _ = self.graph.origins(index)
        return bool(nodes) and all(node.place.backward for node in nodes)

    def _given(self, index: int, name: str, bad: BadOp) -> Given | None:
        """Give an operand, None for one that says nothing: an index, a flag."""
        aval = self.graph.values[index].aval
        array = self._array(index, bad)
        if array is not None:
            kind = probes.on_host(array).dtype.kind
            counts = kind in "iu" and bad.op.name in ("divide", "pow")
            return None if kind in "biuO" and not counts else Given(name, array, None, index)
        if not probes.checkable(aval):
            return Given(name, None, _light(aval, 0)) if getattr(aval, "size", 1) == 0 else None
        word = self._word(index, bad)
        return Given(name, None, None if word is None else _light(aval, word), index)

    def _origin(self, given: Given, record: OpRecord) -> Origin:
        """Say where an operand's bad values come from."""
        known = self._made_by(given.key, self.bad[record.index].its)
        parents = tuple(sorted(i for i in known if i < record.index))
        if parents:
            return Origin(parents)
        _, outside = self.graph.origins(given.key)
        found = (self._outside(value, record.phase) for value in outside)
        return next((Origin((), *place) for place in found if place[0] is not None), Origin())

    def _outside(self, value: Value, phase: str) -> tuple[External | None, str | None]:
        if value.argument is not None:
            if not probes.measure(self.arguments[value.argument]).bad:
                return None, None
            leaf = self.program.leaves[value.argument]
            if leaf.role != "state":
                return leaf.role, leaf.name
            # What a bad optimizer state does is the update's own story. What is computed of it
            # before is a weight that the state holds.
            return (None, None) if phase == "optimizer" else ("parameter", leaf.name)
        held = value.constant
        if hasattr(held, "shape"):
            bad = bool(probes.measure(held).bad)
        else:
            bad = isinstance(held, float) and not math.isfinite(held)
        return ("constant" if bad else None), None

    def _params(self, bad: BadOp) -> dict[str, Any]:
        found: dict[str, Any] = {}
        op = bad.op
        for node in (op.forward or op).nodes:
            for name, value in node.eqn.params.items():
                if name in _PARAMS and isinstance(value, int | float | tuple):
                    plain = list(value) if isinstance(value, tuple) else value
                    found.setdefault(_PARAMS[name], plain)
        if op.name == "take" and op.forward is None:
            found.update(self._out_of_range(bad))
        if op.name in ("var", "std"):
            found["correction"] = self._correction(op.forward or op)
        if op.forward is not None:
            found |= makers(
                called(op.name, op.nodes[-1].ins) for op in before(op.forward, self._maker)
            )
        return found

    def _out_of_range(self, bad: BadOp) -> dict[str, Any]:
        """Find the first index of a read that is out of range, and what the range is."""
        node = next((node for node in bad.op.nodes if fills(node.eqn)), None)
        indices = None if node is None else self._array(node.ins[1], bad)
        if node is None or indices is None:
            return {}
        params = node.eqn.params
        axes = params["dimension_numbers"].start_index_map
        sizes = [self.graph.values[node.ins[0]].aval.shape[axis] for axis in axes]
        last = [size - params["slice_sizes"][a] for a, size in zip(axes, sizes, strict=True)]
        flat = np.asarray(probes.on_host(indices)).reshape(-1, len(axes)).astype(int)
        outside = (flat < 0) | (flat > np.array(last))
        if not outside.any():
            return {}
        row, k = (int(i) for i in np.argwhere(outside)[0])
        index, size = int(flat[row, k]), sizes[k]
        # JAX's own functions count from the end first: they add the size to what is below 0.
        index = index - size if index < 0 else index
        return {"index": index, "entries": size, "outside": int(outside.any(1).sum())}

    def _maker(self, op: Op) -> Op | None:
        """Give the operation that made an operation's first operand."""
        for index in op.ins:
            if probes.checkable(self.graph.values[index].aval):
                writers = self.operations.writers(index)
                return writers[-1] if writers else None
        return None

    def _correction(self, op: Op) -> float:
        """Read what a variance subtracts from the count."""
        for index in op.ins:
            value = self.graph.values[index]
            if value.known and not np.shape(value.constant) and not probes.checkable(value.aval):
                return float(value.constant)
        return 0.0

    def _feeds(self, op: Op) -> tuple[str, ...]:
        came = () if op.forward is None else filter(self._gradient, op.ins)
        names_of = (writer.name for i in came for writer in self.operations.writers(i))
        return tuple(dict.fromkeys(names_of))

    def _masked_rows(self, record: OpRecord, bad: BadOp) -> None:
        op = bad.op
        if op.name not in SOFTMAX | {"logsumexp"}:
            return
        floats = (i for i in (op.forward or op).ins if self._matters(i))
        x = next(floats, None)
        array = None if x is None else self._array(x, bad)
        axes = record.params.get("dim")
        if array is not None and isinstance(axes, list):
            add_masked_rows(record, probes.on_host(array), tuple(axes))

    def _wide(self, bad: BadOp) -> Any:
        """Run an operation again in a wider dtype, None if it has none."""
        node = bad.op.nodes[0]
        operands = [self._array(i, bad) for i in node.ins]
        if len(bad.op.nodes) != 1 or any(x is None for x in operands):
            return None
        given, out = [var.aval.dtype for var in node.eqn.invars], node.eqn.outvars[0].aval.dtype
        real = any(jax.numpy.issubdtype(dtype, jax.numpy.floating) for dtype in given)
        if not real or jax.numpy.issubdtype(out, jax.numpy.complexfloating):
            return None
        narrow = out in (jax.numpy.float16, jax.numpy.bfloat16) or out.itemsize == 1
        with wide_numbers():
            operands = [jax.numpy.asarray(probes.on_host(x)) for x in operands]
            wide = rebind_in(node.eqn, operands, "float32" if narrow else "float64")
            return probes.on_host(wide[0])

    # Where harm was done.

    def sinks(self) -> list[Sink]:
        """List where bad values arrived, in the order of execution."""
        found = []
        for point, its in self.arrived:
            word = self.rounds.word(point.value, its) or 0
            if not word or (point.tensor == STATE and word != probes.NAN):
                continue  # an Inf in optimizer state does no harm by itself
            parents = self._made_by(point.value, its)
            phase: Any = "parameter" if point.phase == "optimizer" else point.phase
            label = point.parameter or point.tensor
            sink = Sink(phase, point.layer, label, tuple(parents), probes.KINDS[word])
            if not parents and word != probes.NAN and phase == "forward":  # such as padding
                sink = replace(sink, written=self.graph.takes_inf(point.value))
            found.append(sink)
        return found


def _measured(array: Any) -> Summary:
    return at_first_nan(probes.measure(array), probes.on_host(array))


def _light(aval: Any, word: int) -> Summary:
    """Summarise by what kind is there, where the values were not looked at."""
    return Summary(
        tuple(aval.shape), str(aval.dtype), "", int(aval.size), nan=int(word == probes.NAN),
        posinf=int(word == probes.POSINF), neginf=int(word == probes.NEGINF),
    )  # fmt: skip


def blame(program: Program, record: OpRecord, op: Op) -> None:
    """Put an update's operation where the weight is that it spoils."""
    goal = {index: leaf for _, index, leaf in program.weights()}
    for index in walk(op.outs, program.graph.makes, near=True):
        if index in goal:
            record.parameter, record.layer = goal[index].name, program.owner(goal[index])
            return


def spoilt(program: Program, arrays: dict[tuple[int, LoopIndex], Any]) -> list[BadParameter]:
    """Describe the first weight that an update spoilt, with its gradient and state."""
    found = []
    for _, index, leaf in program.weights():
        array = arrays.get((index, ()))
        if array is None:
            continue
        grad = program.gradient_of(index)
        gradient = None if grad is None else arrays.get((grad, ()))
        moments = {
            name: (j, probes.measure(arrays[program.graph.results[j], ()]))
            for j, name in program.moments(leaf)
            if (program.graph.results[j], ()) in arrays
        }
        summary, name, state = probes.measure(array), leaf.name, False
        bad = [j for j, held in moments.values() if held.bad]
        if not summary.bad and bad:
            name = program.leaves[program.back[bad[0]]].name
            summary, state = next(held for j, held in moments.values() if j == bad[0]), True
        found.append(
            BadParameter(
                name, program.owner(leaf), summary,
                gradient=None if gradient is None else probes.measure(gradient),
                state={name: held for name, (_, held) in moments.items()}, optimizer=state,
                after=True,
            )
        )  # fmt: skip
    return found
