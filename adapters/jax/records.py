"""Records of operations with bad results, for the core's lineage."""

import math
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from anynan.adapter import BadParameter
from anynan.events import STATE
from anynan.jax import names, probes
from anynan.jax.evaluate import Plan, jit_once
from anynan.jax.graph import Node, Value, fills
from anynan.jax.layers import Spot
from anynan.jax.operations import Op
from anynan.jax.program import Program
from anynan.jax.wide import widened
from anynan.lineage import External, Operand, OpRecord, Sink
from anynan.operands import at, at_broadcast, at_first_nan
from anynan.summary import Summary

if TYPE_CHECKING:
    from anynan.jax.replay import Flag

DETAILED = 200
BYTES = 256 * 2**20
# They read a part: what is bad may be outside of it.
_PARTS = frozenset({"slice", "dynamic_slice", "gather", "split"})
_PARAMS = {"y": "exponent", "axes": "dim", "axis": "dim", "dimension": "dim"}


class Recorder:
    """Make the records of one replay."""

    def __init__(self, program: Program, found: "dict[int, Flag]", bad: list[Op]) -> None:
        self.program, self.found = program, found
        self.graph, self.operations = program.graph, program.operations()
        self.worst = {op.index: self._worst(op) for op in bad}
        self.bad = sorted(bad, key=self._order)
        self.index = {op.index: i for i, op in enumerate(self.bad)}
        self.held: dict[tuple[int, tuple[int, ...]], Any] = {}

    def _worst(self, op: Op) -> int:
        """Choose the result that a record is about."""
        mine = [i for i in op.outs if i in self.found]
        return max(mine, key=lambda i: self.found[i].word)

    def _its(self, op: Op) -> tuple[int, ...]:
        return self.found[self.worst[op.index]].its

    def _order(self, op: Op) -> tuple[Any, ...]:
        """Say when an operation first went bad: its position, each loop's round filled in."""
        writer = self.graph.values[self.worst[op.index]].writer
        node = op.nodes[-1] if writer is None else self.graph.nodes[writer]
        rounds = list(self.found[self.worst[op.index]].its)
        loops = [eqn for eqn in node.chain if eqn.primitive.name in ("scan", "while")]
        key: list[int] = []
        for part in node.order:
            if part is None:
                it, loop = rounds.pop(0), loops.pop(0)
                key.append(-it if loop.params.get("reverse") else it)
            else:
                key.append(part)
        return tuple(key)

    # Looking at the arrays themselves.

    def capture(self, arrays: list[Any]) -> None:
        """Run the program once more for the operands and results of the bad operations."""
        plan = Plan(replaying=True)
        wanted: set[tuple[int, tuple[int, ...]]] = set()
        size = 0
        for op in self.bad[:DETAILED]:
            for index in (*(i for i, _ in self._named(op)), self.worst[op.index]):
                key = self._key(index, op)
                value = self.graph.values[index]
                if key in wanted or not self._looked_at(value, op):
                    continue
                size += value.aval.size * value.aval.dtype.itemsize
                if size > BYTES:
                    break
                wanted.add(key)
        wanted.update((index, ()) for index in self.program.spoilt(self.found))
        for index, rounds in wanted:
            self.program.want(plan, index, "value", rounds)
        keys: list[tuple[int, tuple[int, ...]]] = []

        def run(*inner: Any) -> list[Any]:
            _, made = self.program.evaluate(plan, inner)
            keys[:] = [(item.probe.key, item.probe.at) for item in made]
            return [item.data for item in made]

        out = jit_once(run)(*arrays)
        self.held = dict(zip(keys, out, strict=True))
        for (index, _), array in self.held.items():
            flag = self.found.get(index)
            # A sum of Infs of both signs reads as NaN.
            if flag is not None and flag.word == probes.NAN and not probes.holds_nan(array):
                flag.word = probes.POSINF

    def _looked_at(self, value: Value, op: Op) -> bool:
        if value.known:
            return False
        if probes.checkable(value.aval):
            return True
        dtype = getattr(value.aval, "dtype", None)
        if op.name == "take":
            return dtype is not None and not jax.numpy.issubdtype(dtype, jax.dtypes.extended)
        return op.name in ("divide", "pow") and dtype is not None and not value.aval.shape

    def _key(self, index: int, op: Op) -> tuple[int, tuple[int, ...]]:
        return index, self._its(op)[: self.graph.values[index].loops]

    def _array(self, index: int, op: Op) -> Any:
        """Give the array of a value as an operation saw it, None if it was not looked at."""
        value = self.graph.values[index]
        if value.known:
            held = value.constant
            return held if isinstance(held, jax.Array) else np.asarray(held)
        array = self.held.get(self._key(index, op))
        shard = self._shard(op)
        if array is not None and array.ndim > len(value.aval.shape):
            return array[shard or 0]
        return array

    def _shard(self, op: Op) -> int | None:
        """Choose the shard to look at: a collective's operand is bad elsewhere than its result."""
        for index in op.ins:
            for writer in self.operations.writers(index):
                if writer.index in self.index and writer is not op:
                    shard = self.found[self.worst[writer.index]].shard
                    if shard is not None:
                        return shard
        return self.found[self.worst[op.index]].shard

    # Records.

    def records(self) -> list[OpRecord]:
        """Give a record for each operation with a bad result, in the order of execution."""
        return [self._record(i, op) for i, op in enumerate(self.bad)]

    def _record(self, index: int, op: Op) -> OpRecord:
        worst = self.worst[op.index]
        flag = self.found[worst]
        array = self._array(worst, op)
        value = self.graph.values[worst]
        output = (
            _light(value.aval, flag.word)
            if array is None
            else at_first_nan(probes.measure(array), probes.on_host(array))
        )
        first = output.first_bad
        shape = tuple(value.aval.shape)
        operands = []
        for i, name in self._named(op):
            item = self._operand(i, name, op, index, first, shape)
            if item is not None:
                operands.append(item)
        forward = None if op.forward is None else self.index.get(op.forward.index)
        phase = op.phase
        record = OpRecord(
            index, op.name, op.raw, op.layer, phase, output, tuple(operands), op.source,
            self._params(op), at(array, first), forward, self._feeds(op),
            self.program.allowed((op.forward or op).nodes[0]).get(output.kind or ""),
            call=op.call, direct=op.direct,
            iteration=flag.its[-1] if flag.its else None, shard=self._shard(op),
            hidden=None if phase == "backward" else self._hidden(op),
        )  # fmt: skip
        if phase == "optimizer":
            self._blame(record, op)
            record.name = names.update(op.site.near) or record.name
        self._masked_rows(record, op)
        if output.bad and not any(o.summary is not None and o.summary.bad for o in operands):
            record.wide = self._wide(op)
        return record

    def _hidden(self, op: Op) -> tuple[str, ...] | None:
        """Name the forward operations where what came of a bad result is finite again."""
        found: dict[str, None] = {}
        seen = set(op.outs)
        todo = [(i, False) for i in op.outs if self._word(i)]
        while todo:
            index, cut = todo.pop()
            for reader in self.graph.readers(index):
                if reader is None or reader.backward:
                    continue
                other = self.operations.of.get(reader.index)
                if other is op:
                    continue
                outs = [i for i in (reader if other is None else other).outs if i is not None]
                if other is not None:
                    words = [word for i in outs if (word := self._word(i)) is not None]
                    if outs and not words:
                        return None
                    if not any(words):
                        found.setdefault("getitem" if cut else other.name)
                        continue
                part = cut or (other is None and reader.name in _PARTS)
                new = [i for i in outs if i not in seen and (other is None or self._word(i))]
                seen.update(new)
                todo += [(i, part and other is None) for i in new]
        return tuple(found)

    def _word(self, index: int) -> int | None:
        """Give the worst kind that was read of a value, None if it was not read."""
        flag = self.found.get(index)
        return None if flag is None else flag.word

    def _named(self, op: Op) -> list[tuple[int, str]]:
        """Name the operands as the cause rules know them."""
        if op.forward is None:
            node = self._itself(op)
            if node is not None:
                count = len(node.ins)
                return [(i, names.operand(node.name, k, count)) for k, i in enumerate(node.ins)]
            floats = [i for i in op.ins if self._matters(i)]
            return [(i, names.operand("", k, len(floats))) for k, i in enumerate(floats)]
        return self._named_backward(op, op.forward)

    def _itself(self, op: Op) -> Node | None:
        """Give the equation that an operation is all about, None where there are several."""
        if len(op.nodes) == 1:
            return op.nodes[0]
        mine = (n for n in op.nodes if n.name == op.name and n.outs == (self.worst[op.index],))
        return next(mine, None) if op.index in self.worst else None

    def _matters(self, index: int) -> bool:
        """Tell whether a value is more than a number of the function's own."""
        value = self.graph.values[index]
        if not probes.checkable(value.aval):
            return getattr(value.aval, "size", 1) == 0
        return not (value.known and not value.aval.shape)

    def _named_backward(self, op: Op, forward: Op) -> list[tuple[int, str]]:
        root = self.operations.root
        named = self._named(forward)
        roots = [root(i) for i, _ in named]
        inside = {base: name for base, (_, name) in zip(roots, named, strict=True)}
        # Two parts of one array have one root, and are told apart by themselves.
        inside = {base: name for base, name in inside.items() if roots.count(base) == 1}
        inside.update(named)
        results = [*forward.outs, *(root(i) for i in forward.outs)]
        found: dict[str, int] = {}
        grads = 0
        for i in op.ins:
            base = i if i in inside or i in results else root(i)
            if base in results:
                name = "result"
            elif base in inside:
                name = inside[base]
            elif self._gradient(i):
                name = "grad" if not grads else f"grad{grads}"
                grads += 1
            elif not self._matters(base):
                continue
            else:
                name = f"saved[{i}]"
            found.setdefault(name, i)
        # What the slope is at says more than the slope.
        for base, name in [*named, *((i, "result") for i in forward.outs)]:
            if name != "condition":
                found.setdefault(name, base)
        order = sorted(found, key=lambda name: name != "grad")
        return [(found[name], name) for name in order]

    def _gradient(self, index: int) -> bool:
        value = self.graph.values[index]
        if value.writer is not None:
            return self.graph.nodes[value.writer].place.backward
        nodes, _ = self.graph.origins(index)
        return bool(nodes) and all(node.place.backward for node in nodes)

    def _operand(
        self, index: int, name: str, op: Op, order: int, first: Any, shape: tuple[int, ...]
    ) -> Operand | None:
        value = self.graph.values[index]
        array = self._array(index, op)
        if array is None:
            if not probes.checkable(value.aval):
                if getattr(value.aval, "size", 1) == 0:
                    return Operand(name, _light(value.aval, 0))
                return None
            return self._unseen(index, name, order)
        host = probes.on_host(array)
        counts = host.dtype.kind in "iu" and op.name in ("divide", "pow")
        if host.dtype.kind in "biuO" and not counts:
            return None
        item = Operand(
            name,
            at_first_nan(probes.measure(array), probes.on_host(array)),
            at_broadcast(host, first, shape),
        )
        if item.summary is not None and item.summary.bad:
            self._trace(item, index, order)
        return item

    def _unseen(self, index: int, name: str, order: int) -> Operand:
        flag = self.found.get(index)
        if flag is None:
            return Operand(name, None)
        item = Operand(name, _light(self.graph.values[index].aval, flag.word))
        if flag.word:
            self._trace(item, index, order)
        return item

    def _trace(self, item: Operand, index: int, order: int) -> None:
        """Say where an operand's bad values come from."""
        writers = self.operations.writers(index)
        known = [self.index[op.index] for op in writers if op.index in self.index]
        item.parents = tuple(sorted(i for i in known if i < order))
        if item.parents:
            return
        _, outside = self.graph.origins(index)
        for value in outside:
            source, label = self._outside(value, item.summary)
            if source is not None:
                item.source, item.label = source, label
                return

    def _outside(self, value: Value, summary: Summary | None) -> tuple[External | None, str | None]:
        if value.argument is not None:
            leaf = self.program.leaves[value.argument]
            # What a bad optimizer state does is the update's own story.
            return (None, None) if leaf.role == "state" else (leaf.role, leaf.name)
        held = probes.measure(value.constant) if hasattr(value.constant, "shape") else None
        if held is None:
            finite = not isinstance(value.constant, float) or math.isfinite(value.constant)
            return (None, None) if finite else ("constant", "value")
        if not held.bad:
            return None, None
        return "constant", "value"

    def _params(self, op: Op) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for node in (op.forward or op).nodes:
            for name, value in node.eqn.params.items():
                if name in _PARAMS and isinstance(value, int | float | tuple):
                    plain = list(value) if isinstance(value, tuple) else value
                    found.setdefault(_PARAMS[name], plain)
        if op.name == "take" and op.forward is None:
            found.update(self._out_of_range(op))
        if op.name in ("var", "std"):
            found["correction"] = self._correction(op.forward or op)
        if op.forward is not None:
            maker = self._maker(op.forward)
            if maker is not None:
                found["of"] = maker.name
                terms = self._maker(maker)
                if terms is not None:
                    found["terms"] = terms.name
        return found

    def _out_of_range(self, op: Op) -> dict[str, Any]:
        """Find the first index of a read that is out of range, and what the range is."""
        node = next((node for node in op.nodes if fills(node.eqn)), None)
        indices = None if node is None else self._array(node.ins[1], op)
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
        if op.forward is None:
            return ()
        found: dict[str, None] = {}
        for i in op.ins:
            if self._gradient(i):
                found.update(dict.fromkeys(writer.name for writer in self.operations.writers(i)))
        return tuple(found)

    def _masked_rows(self, record: OpRecord, op: Op) -> None:
        if op.name not in ("softmax", "log_softmax", "logsumexp"):
            return
        floats = (i for i in (op.forward or op).ins if self._matters(i))
        x = next(floats, None)
        array = None if x is None else self._array(x, op)
        axes = record.params.get("dim")
        if array is None or not isinstance(axes, list) or not np.ndim(array):
            return
        rows = int(np.all(probes.on_host(array) == -np.inf, axis=tuple(axes)).sum())
        if rows:
            record.params["masked_rows"] = rows

    def _blame(self, record: OpRecord, op: Op) -> None:
        """Put an update's operation where the weight is that it spoils."""
        program = self.program
        goal = {program.graph.results[i]: r for i, r in enumerate(program.results) if r.state}
        seen = set(op.outs)
        todo = list(op.outs)
        for index in todo:
            result = goal.get(index)
            if result is not None and result.source is not None:
                leaf = program.leaves[result.source]
                if leaf.role == "parameter":
                    record.parameter, record.layer = leaf.name, program.owner(leaf)
                    return
            for reader in program.graph.readers(index):
                for out in () if reader is None else reader.outs:
                    if out is not None and out not in seen:
                        seen.add(out)
                        todo.append(out)

    def spoilt(self) -> list[BadParameter]:
        """Describe the first weight that an update spoilt, with its gradient and state."""
        program, found = self.program, []
        for i, result in enumerate(program.results):
            array = self.held.get((program.graph.results[i], ()))
            if array is None or not result.state or result.source is None:
                continue
            leaf = program.leaves[result.source]
            if leaf.role != "parameter":
                continue
            grad = program.gradient_of(program.graph.results[i])
            gradient = None if grad is None else self.held.get((grad, ()))
            moments = {
                name: (j, probes.measure(self.held[program.graph.results[j], ()]))
                for j, name in program.moments(leaf)
                if (program.graph.results[j], ()) in self.held
            }
            summary, name, state = probes.measure(array), leaf.name, False
            bad = [j for j, held in moments.values() if held.bad]
            if not summary.bad and bad:
                name = program.leaves[program.results[bad[0]].source or 0].name
                summary, state = next(held for j, held in moments.values() if j == bad[0]), True
            found.append(
                BadParameter(
                    name, program.owner(leaf), summary,
                    gradient=None if gradient is None else probes.measure(gradient),
                    state={name: held for name, (_, held) in moments.items()}, optimizer=state,
                )
            )  # fmt: skip
        return found

    def _wide(self, op: Op) -> float | None:
        if len(op.nodes) != 1:
            return None
        node: Node = op.nodes[0]
        operands = [self._array(i, op) for i in node.ins]
        return None if any(x is None for x in operands) else widened(node.eqn, operands)

    # Where harm was done.

    def sinks(self, spots: list[Spot]) -> list[Sink]:
        """List where bad values arrived, in the order of execution."""
        found = []
        for spot in spots:
            flag = self.found.get(spot.value)
            if flag is None or not flag.word:
                continue
            if spot.tensor == STATE and flag.word != probes.NAN:  # it does no harm by itself
                continue
            parents = [
                self.index[op.index]
                for op in self.operations.writers(spot.value)
                if op.index in self.index
            ]
            phase: Any = "parameter" if spot.phase == "optimizer" else spot.phase
            label = spot.parameter or spot.tensor
            kind = probes.KINDS[flag.word]
            found.append(Sink(phase, spot.layer, label, tuple(parents), kind))
        return found


def _light(aval: Any, word: int) -> Summary:
    """Summarise by what kind is there, where the values were not looked at."""
    return Summary(
        tuple(aval.shape), str(aval.dtype), "", int(aval.size), nan=int(word == probes.NAN),
        posinf=int(word == probes.POSINF), neginf=int(word == probes.NEGINF),
    )  # fmt: skip
