"""From the operations of a run, as they are shown, to the records and sinks of a replay.

No adapter makes records by itself. One that shows its operations as ``LinkedOp`` gets them from
that stream alone (``Recorder``): which results are bad, what made their operands, what a gradient
came from and where the harm was done. One that follows bad values in a way of its own says how
(``BaseRecorder``).
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from anynan._base.summary import Summary
from anynan._diagnosis.agreement import CheckedPoint
from anynan._diagnosis.lineage import OpRecord, Replay, Sink
from anynan._diagnosis.operands import light
from anynan._diagnosis.records import SOFTMAX, Builder, Given, Origin, add_masked_rows, makers
from anynan._readings.policy import reading_kind
from anynan._trace.op import Key, LinkedOp, Op
from anynan.events import Phase

_NARROW = ("float16", "bfloat16")


class Arrays(Protocol):
    """Say what is asked of a framework's arrays."""

    def is_finite(self, x: Any, /) -> bool:
        """Tell whether an array holds neither NaN nor Inf; one without a fraction does not."""
        ...

    def span(self, x: Any, /) -> tuple[float, float] | None:
        """Give the smallest and the largest value, as a probe does; None where there is none."""
        ...

    def measure(self, x: Any, /) -> Summary:
        """Summarise an array, pointing at its first NaN if it holds one."""
        ...

    def on_host(self, x: Any, /) -> Any:
        """Give an array as NumPy's."""
        ...


class BaseRecorder:
    """Make records of operations with bad results, and sinks of where these arrive.

    A subclass follows bad values from one operation to the next, by whatever its framework knows
    an array by: it says what wrote an array's bad values (``_wrote_bad``, ``_origin``), and what an
    operation took (``_taken``).

    Args:
        arrays: Reads the framework's arrays.
        tell: Is told of what could not be described: one sentence.
        offer: Is offered each record and its operation, for a bundle.

    Attributes:
        records: Operations with bad results, in execution order.
        sinks: Where bad values arrived.
        passed: What was read on the way.
    """

    def __init__(
        self, arrays: Arrays, tell: Callable[[str], None],
        offer: Callable[[OpRecord, Any], object] = lambda record, op: None,  # noqa: ARG005
    ) -> None:  # fmt: skip
        self._arrays, self.tell, self.offer = arrays, tell, offer
        self.records: list[OpRecord] = []
        self.sinks: list[Sink] = []
        self.passed: list[CheckedPoint] = []

    def arrive(
        self, phase: Phase, layer: str | None, label: str, x: Any, key: Any, call: int | None = 0
    ) -> None:
        """Look at a value where it arrives.

        Args:
            phase: Phase of the reading.
            layer: Layer path, None outside every watched layer.
            label: Which value of the layer's.
            x: The value.
            key: By what it is known; in ``backward`` that of what it is a gradient of.
            call: Which call of the layer; None for a place that a first run does not read.
        """
        span = self._arrays.span(x)
        if span is None:
            return
        if call is not None:
            self.passed.append(CheckedPoint(layer, phase, label, call, *span))
        kind = reading_kind(*span)
        if kind is not None:
            self.sink(Sink(phase, layer, label, self._wrote_bad(phase, key), kind))

    def sink(self, sink: Sink) -> None:
        """Note where bad values arrived."""
        self.sinks.append(sink)

    def record(self, op: Op, result: Any) -> OpRecord:
        """Make a record of an operation.

        Args:
            op: The operation, while it is shown.
            result: Its first bad result.
        """
        record = OpRecord(
            len(self.records), op.name, op.raw, op.layer, op.phase, None, source=op.source,
            params=dict(op.params), call=op.call,
        )  # fmt: skip
        self._link(op, record)
        builder = Builder(self._arrays.measure, self._origin, self.tell)
        held = Given("result", result, light(result))
        given = self._taken(op)
        look = builder.fresh(record, held, given)
        builder.describe(
            record, held, self._listed(op, given, look=look), look=look, expected=op.expected,
            wide=partial(self._wide, op),
        )  # fmt: skip
        if look:
            self._count(op, record)
        self.records.append(record)
        self.offer(record, op)
        return record

    def _wrote_bad(self, phase: Phase, key: Any) -> tuple[int, ...]:
        """Give the records that wrote a value's bad elements, or of ``backward`` its gradient's."""
        raise NotImplementedError

    def _origin(self, given: Given, record: OpRecord) -> Origin:
        """Say where the bad values of an operand came from."""
        raise NotImplementedError

    def _taken(self, op: Any) -> list[Given]:
        """Give what an operation worked on."""
        raise NotImplementedError

    def _link(self, op: Any, record: OpRecord) -> None:
        """Say what else is known of an operation: of a gradient, what it belongs to."""

    def _listed(self, op: Any, given: list[Given], *, look: bool) -> list[Given]:  # noqa: ARG002
        """Give what the record lists of what an operation worked on."""
        return given

    def _wide(self, op: Any, output: Summary) -> Any:
        """Give an operation's result in a wider dtype, None if it has none."""
        if output.nan or op.forward is not None or op.name == "astype":
            return None
        dtype = "float32" if output.dtype in _NARROW else "float64"
        return self._arrays.on_host(op.rerun(dtype=dtype)[0])

    def _count(self, op: Any, record: OpRecord) -> None:
        """Count what a cause rule asks of some operations."""
        scores = next((x for label, x in op.inputs if label == "self"), None)
        if op.name in SOFTMAX and scores is not None:
            axes = op.params.get("dim", -1)
            axes = tuple(axes) if isinstance(axes, list) else axes
            add_masked_rows(record, self._arrays.on_host(scores), axes)


class Recorder(BaseRecorder):
    """Make the records and sinks of a run from its operations alone, as they are shown.

    Args:
        outside: Says where bad values came from that no operation was seen making, by the key of
            the array and the array itself; the others are the base's.
    """

    def __init__(
        self, arrays: Arrays, outside: Callable[[Key, Any], Origin], tell: Callable[[str], None],
        offer: Callable[[OpRecord, Any], object] = lambda record, op: None,  # noqa: ARG005
    ) -> None:  # fmt: skip
        super().__init__(arrays, tell, offer)
        self._outside = outside
        self._wrote: dict[Key, int] = {}
        # Which records gave a value's bad gradient, and which operations gave any of it.
        self._flow: dict[Key, list[int]] = defaultdict(list)
        self._feeds: dict[Key, dict[str, None]] = defaultdict(dict)
        self._last: LinkedOp | None = None

    def land(self, name: str, layer: str, x: Any) -> None:
        """Look at the gradient of a weight."""
        self.arrive("backward", layer, name, x, ("weight", name), None)

    def _wrote_bad(self, phase: Phase, key: Key) -> tuple[int, ...]:
        if phase == "backward":
            return tuple(self._flow[key])
        if key in self._wrote:
            return (self._wrote[key],)
        if key[0] != "array":
            return ()
        # What no operation made may be a gradient that was handed out: of what had none either.
        given = (found for of, found in self._flow.items() if of[0] == "array")
        return tuple(dict.fromkeys(index for found in given for index in found))

    # Operations.

    def see(self, op: LinkedOp) -> None:
        """Make a record of an operation, if its result is bad."""
        of = op.of
        if of is None:
            self._last = op
        else:
            self._turn(of)
            for key in of.grown:
                self._feeds[key][op.name] = None
        bad = [not self._arrays.is_finite(x) for x in op.outputs]
        if not any(bad):
            return
        index = self.record(op, op.outputs[bad.index(True)]).index
        if of is None:
            self._wrote |= {k: index for k, is_bad in zip(op.results, bad, strict=True) if is_bad}
        else:
            for key, is_bad in zip(of.grown, bad, strict=True):
                self._flow[key] += [index] * is_bad

    def _link(self, op: LinkedOp, record: OpRecord) -> None:
        of = op.of
        if of is not None:
            record.params |= makers(of.chain)
            record.feeds = tuple(dict.fromkeys(n for key in of.results for n in self._feeds[key]))
            record.forward = next((self._wrote[k] for k in of.results if k in self._wrote), None)

    def _turn(self, of: LinkedOp) -> None:
        """Look at what the gradient begins with, the loss, as it begins."""
        if self._last is None:
            return
        self._last = None
        index = next((self._wrote[key] for key in of.results if key in self._wrote), None)
        output = None if index is None else self.records[index].output
        if index is not None and output is not None and output.kind and of.layer is None:
            self.sinks.append(Sink("loss", None, "loss", (index,), output.kind))

    def _taken(self, op: LinkedOp) -> list[Given]:
        return [self._given(op, label, x) for label, x in op.given]

    def _given(self, op: LinkedOp, label: str, x: Any) -> Given:
        if not hasattr(x, "dtype"):
            return Given(label, number=x)
        key: Any = op.operands.get(label)
        if op.of is not None:
            if label.startswith("grad"):
                key = "gradient", op.of.results[int(label[4:] or 0)]
            else:
                key = op.of.results[0] if label == "result" else op.of.operands.get(label)
        return Given(label, x, light(x), key)

    def _origin(self, given: Given, record: OpRecord) -> Origin:  # noqa: ARG002
        key: Key = given.key or ("", "")
        if key[0] == "gradient":
            return Origin(self._wrote_bad("backward", key[1]))
        made = self._wrote_bad("forward", key)
        return Origin(made) if made else self._outside(key, given.array)

    def replay(self, notes: list[str], *, ends: bool = False) -> Replay:
        """Give what was seen.

        Args:
            notes: What was not.
            ends: Whether of the first run only the ends were read.
        """
        passed = [each for each in self.passed if each.layer is None or not ends]
        return Replay(self.records, self.sinks, list(dict.fromkeys(notes)), passed=passed)
