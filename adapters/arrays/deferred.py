"""The tape of arrays on a device, or not computed yet: flags stay there until one read.

Each result is reduced to a few scalars where it lives. At the end of the call they cross to the
host together. If a bad value arrived somewhere, the call is run once more under the live tape,
where nothing forbids it; else the report is made of what this tape knows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from anynan._arrays.access import (
    REFUSALS,
    detached,
    device_name,
    namespace,
    on_host,
    standard_format,
    to_host,
    unreadable,
)
from anynan._arrays.chunked import is_chunked
from anynan._arrays.probe import probe, reduced, span_of
from anynan._base.summary import Summary
from anynan._diagnosis.lineage import OpRecord, Replay, Sink
from anynan._diagnosis.operands import blank, flagged
from anynan._diagnosis.records import Builder, Given, Origin
from anynan._readings.policy import reading_kind
from anynan.arrays.names import is_number
from anynan.arrays.operations import ArrayOp
from anynan.arrays.records import measure
from anynan.arrays.tape import Tape
from anynan.arrays.trackable import is_array
from anynan.arrays.tracked import TrackedArray, is_tracked
from anynan.events import Phase, Source

Span = tuple[float, float]
# Fewer than elsewhere: to look at an array that is not computed yet is to compute it.
DETAILED = 8


class StandardSlots:
    """Keep flags as arrays of the library itself, by the functions of the array API standard."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._waiting: dict[int, tuple[Any, Any, Any, bool]] = {}
        self.reads = 0

    def put(self, raw: Any) -> int | None:
        """Reduce an array to its two ends, None if it holds no floats; read host memory at once."""
        if not is_array(raw) or (not is_chunked(raw) and on_host(raw) is not None):
            span = probe(raw)
            if span is None:
                return None
            self._spans.append(span)
            return len(self._spans) - 1
        form = standard_format(raw)
        if form.kind not in ("real", "complex") or 0 in raw.shape:
            return None
        compound = form.kind == "complex"
        try:
            found = reduced(detached(raw), compound=compound)
        except REFUSALS as error:
            raise unreadable(raw, error) from error
        self._waiting[len(self._spans)] = (*found, compound)
        self._spans.append((0.0, 0.0))
        return len(self._spans) - 1

    def read(self) -> list[Span]:
        """Compute and copy all flags together, one read for each library and device."""
        groups: dict[tuple[Any, str], list[int]] = {}
        for slot, (low, *_) in self._waiting.items():
            groups.setdefault((namespace(low), device_name(low)), []).append(slot)
        for slots in groups.values():
            try:
                numbers = self.numbers([x for slot in slots for x in self._waiting[slot][:3]])
            except REFUSALS as error:
                raise unreadable(self._waiting[slots[0]][0], error) from error
            self.reads += 1
            for slot, found in zip(slots, numbers.reshape(-1, 3).tolist(), strict=True):
                self._spans[slot] = span_of(*found, compound=self._waiting[slot][3])
        self._waiting.clear()
        return self._spans

    def numbers(self, flags: list[Any]) -> Any:
        """Copy flags of one library and device to the host: the one read."""
        xp = namespace(flags[0])
        double = getattr(xp, "float64", None)  # which not every library makes on request
        wide = xp.float32 if double not in [x.dtype for x in flags] else double
        return to_host(xp.stack([xp.astype(x, wide) for x in flags]))


@dataclass(slots=True)
class Node:
    """Hold one operation, or one array that came in."""

    name: str
    raw: str
    layer: str | None
    source: Source | None
    blank: Summary
    slot: int | None
    operands: list[tuple[str, Any]] = field(default_factory=list)
    params: Mapping[str, Any] = field(default_factory=dict)
    expected: Mapping[str, str] | None = None
    label: str | None = None
    array: Any = None
    came: Any = None


@dataclass(slots=True)
class Known:
    """Stand for an operand: its shape, who wrote it, and itself where it costs nothing to keep."""

    blank: Summary
    nodes: tuple[int, ...]
    array: Any = None


class DeferredTape(Tape):
    """Note every operation and leave its flags on the device until ``finish``."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.nodes: list[Node] = []
        self.slots = self.session.slots()
        self._rows: list[tuple[int, int]] = []
        self._arrivals: list[tuple[Phase, str | None, str, tuple[int, ...], int]] = []
        self.spans: list[Span] = []

    def about_to_write(self, target: TrackedArray) -> None:
        """Remember whether an argument is lost for a second run."""
        if any(self.nodes[i].label is not None for i in self.parents(target)):
            self.overwritten = True

    def look(
        self, results: list[TrackedArray], show: Callable[[], ArrayOp], *, clean: bool,
        writes: TrackedArray | None,
    ) -> None:  # fmt: skip
        """Note an operation."""
        op = show()
        operands = [(label, self._known(x)) for label, x in op.given]
        for x in results:
            slot = self.slots.put(x._raw)
            if slot is None and x is not writes:
                continue
            self.nodes.append(
                Node(
                    op.name, op.raw, op.layer, op.source, blank(x._raw), slot, operands,
                    op.params, op.expected, array=x._raw if is_chunked(x._raw) else None,
                )
            )  # fmt: skip
            self.wrote(x, len(self.nodes) - 1, op)
        op.over()

    def _known(self, value: Any) -> Any:
        if is_number(value):
            return value
        if is_tracked(value):
            raw, nodes = value._raw, self.parents(value)
            if value._cell.handed:  # whoever holds the plain array may have written into it
                nodes = (*nodes, *self._fresh(raw))
        else:
            raw, nodes = value, self._fresh(value)
        return Known(blank(raw), nodes, raw if is_chunked(raw) else None)

    def is_changed(self) -> bool:
        """Tell whether an argument holds other values than when the call began."""
        for node in self.nodes:
            if node.label is not None and node.came is not None and node.slot is not None:
                span = probe(node.came)
                if span is not None and str(span) != str(self.spans[node.slot]):
                    return True
        return False

    def _fresh(self, raw: Any) -> tuple[int, ...]:
        """Reduce an array as it is now, whoever wrote it."""
        slot = self.slots.put(raw)
        if slot is None:
            return ()
        self.nodes.append(Node("", "", None, None, blank(raw), slot))
        return (len(self.nodes) - 1,)

    def read(self, layer: str | None, phase: Phase, tensor: str, x: TrackedArray) -> None:
        """Open a row; its numbers come with the one read."""
        label = self.inputs.get(id(x._raw)) if phase == "input" else None
        nodes = self.parents(x)
        if phase != "input" and x._cell.handed:
            nodes = (*nodes, *self._fresh(x._raw))
        slot = self.nodes[nodes[-1]].slot if nodes else self.slots.put(x._raw)
        if slot is None:
            return
        if label is not None:
            x._node = len(self.nodes)
            came = Node("", "", None, None, blank(x._raw), slot, label=label, came=x._raw)
            self.nodes.append(came)
        elif phase != "input":
            self._arrivals.append((phase, layer, tensor, nodes or self.lost(), slot))
        order = self.add_row(self.site(layer, phase, tensor, x._raw))
        self._rows.append((order, slot))
        if self.rows is not None:
            raw = x._raw
            self.rows.keep(order, lambda: raw)

    def arrive(self, index: int) -> None:
        """Take what an operation made as a result of the call."""
        node = self.nodes[index]
        layer, phase = self.placed(node.layer)
        assert node.slot is not None
        self._arrivals.append((phase, layer, "output", (index,), node.slot))
        monitor = self.session.tracker.judge.monitor
        site = monitor.site(layer, phase, "output", node.blank.dtype, None)
        self._rows.append((self.add_row(site), node.slot))

    def finish(self) -> None:
        """Bring the flags to the host and fill the rows in."""
        rows = self.rows
        assert rows is not None
        self.spans = self.slots.read()
        spans = [self.spans[slot] for _, slot in self._rows]
        rows.fill((lo for lo, _ in spans), (hi for _, hi in spans))

    def history(self, x: TrackedArray) -> tuple[int, ...]:
        """Bring the flags so far to the host; give the records that made this array bad."""
        self.spans = self.slots.read()
        return self._bad(self.parents(x)) or self._bad(self.lost())

    def _ends(self, index: int) -> Span | None:
        slot = self.nodes[index].slot
        return None if slot is None else self.spans[slot]

    def _kind(self, index: int) -> str | None:
        ends = self._ends(index)
        return None if ends is None else reading_kind(*ends)

    def replay(self) -> Replay:
        """Make records of what this tape knows, without a second run."""
        records: list[OpRecord] = []
        detailed = 0
        for index, node in enumerate(self.nodes):
            ends = self._ends(index)
            if not node.name or ends is None or reading_kind(*ends) is None:
                continue
            layer, phase = self.placed(node.layer)
            record = OpRecord(
                index, node.name, node.raw, layer, phase, None, source=node.source,
                params=dict(node.params),
            )  # fmt: skip
            given = [self._given(label, value) for label, value in node.operands]
            # Where a NaN came in, the record that made it is measured.
            look = node.array is not None and detailed < DETAILED and not any(map(_is_nan, given))
            detailed += look
            result = Given("result", node.array, flagged(node.blank, *ends))
            builder = Builder(measure, self._origin, self.notes.append)
            builder.describe(record, result, given, look=look, expected=node.expected)
            records.append(record)
        sinks = []
        for phase, layer, tensor, nodes, slot in self._arrivals:
            kind = reading_kind(*self.spans[slot])
            if kind is not None:
                parents = self._bad(nodes) or self._bad(self.lost())
                came = [i for i in nodes if self.nodes[i].label is not None]
                overwritten = not parents and any(self._kind(i) is None for i in came)
                sinks.append(Sink(phase, layer, tensor, parents, kind, overwritten))
                if not parents:
                    self.notes.append(self.unseen())
        return Replay(records, sinks, list(dict.fromkeys(self.notes)), whole=True)

    def _bad(self, nodes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(i for i in nodes if self._kind(i) is not None and self.nodes[i].name)

    def _given(self, label: str, value: Any) -> Given:
        if not isinstance(value, Known):
            return Given(label, number=value)
        ends = next((e for i in reversed(value.nodes) if (e := self._ends(i)) is not None), None)
        known = value.blank if ends is None else flagged(value.blank, *ends)
        return Given(label, value.array, known, value)

    def _origin(self, given: Given, _record: OpRecord) -> Origin:
        """Say where the bad values of an operand came from."""
        nodes = given.key.nodes
        parents = self._bad(nodes)
        if parents:
            return Origin(parents)
        came = next((i for i in nodes if self.nodes[i].label is not None), None)
        known = None if came is None else self.nodes[came].label
        bad = came is not None and self._kind(came) is not None
        return self.from_outside(given.name, known, came_bad=bad)


def _is_nan(given: Given) -> bool:
    if given.known is None:
        return given.number is not None and given.number != given.number
    return given.known.nan > 0
