"""From the operations of a run, as they are shown, to the records and sinks of a replay.

An adapter that shows its operations as ``LinkedOp`` makes no records by itself: which results are
bad, what made their operands, what a gradient came from and where the harm was done is told from
that stream alone.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

from anynan._base.summary import Summary
from anynan._diagnosis.agreement import CheckedPoint
from anynan._diagnosis.lineage import OpRecord, Replay, Sink
from anynan._diagnosis.records import SOFTMAX, Builder, Given, Origin, add_masked_rows, makers
from anynan._readings.policy import reading_kind
from anynan._trace.op import Key, LinkedOp
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

    def light(self, x: Any, /) -> Summary:
        """Summarise an array by its ends alone."""
        ...

    def on_host(self, x: Any, /) -> Any:
        """Give an array as NumPy's."""
        ...


class Recorder:
    """Make records of operations with bad results, and sinks of where these arrive.

    Args:
        arrays: Reads the framework's arrays.
        outside: Says where bad values came from that no operation was seen making, by the key of
            the array and the array itself.
        tell: Is told of what could not be described: one sentence.
        offer: Is offered each record and its operation, for a bundle.

    Attributes:
        records: Operations with bad results, in execution order.
        sinks: Where bad values arrived.
        passed: What was read on the way.
    """

    def __init__(
        self, arrays: Arrays, outside: Callable[[Key, Any], Origin], tell: Callable[[str], None],
        offer: Callable[[OpRecord, Any], object] = lambda record, op: None,  # noqa: ARG005
    ) -> None:  # fmt: skip
        self._arrays, self._outside, self._tell, self._offer = arrays, outside, tell, offer
        self.records: list[OpRecord] = []
        self.sinks: list[Sink] = []
        self.passed: list[CheckedPoint] = []
        self._wrote: dict[Key, int] = {}
        # Which records gave a value's bad gradient, and which operations gave any of it.
        self._flow: dict[Key, list[int]] = defaultdict(list)
        self._feeds: dict[Key, dict[str, None]] = defaultdict(dict)
        self._last: LinkedOp | None = None

    # Where values arrive.

    def arrive(
        self, phase: Phase, layer: str | None, label: str, x: Any, key: Key, call: int = 0
    ) -> None:
        """Look at a value where it arrives; in ``backward`` the key is that of what it is of."""
        span = self._arrays.span(x)
        if span is None:
            return
        self.passed.append(CheckedPoint(layer, phase, label, call, *span))
        kind = reading_kind(*span)
        if kind is not None:
            self.sinks.append(Sink(phase, layer, label, self._made(phase, key), kind))

    def land(self, name: str, layer: str, x: Any) -> None:
        """Look at the gradient of a weight."""
        span = self._arrays.span(x)
        kind = None if span is None else reading_kind(*span)
        if kind is not None:
            made = self._made("backward", ("weight", name))
            self.sinks.append(Sink("backward", layer, name, made, kind))

    def _made(self, phase: Phase, key: Key) -> tuple[int, ...]:
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
        index = len(self.records)
        record = OpRecord(
            index, op.name, op.raw, op.layer, op.phase, None, source=op.source,
            params=dict(op.params), call=op.call,
        )  # fmt: skip
        if of is not None:
            record.params |= makers(of.chain)
            record.feeds = tuple(dict.fromkeys(n for key in of.results for n in self._feeds[key]))
            record.forward = next((self._wrote[k] for k in of.results if k in self._wrote), None)
        self.records.append(record)
        self._describe(op, record, op.outputs[bad.index(True)])
        self._offer(record, op)
        if of is None:
            self._wrote |= {k: index for k, is_bad in zip(op.results, bad, strict=True) if is_bad}
        else:
            for key, is_bad in zip(of.grown, bad, strict=True):
                self._flow[key] += [index] * is_bad

    def _turn(self, of: LinkedOp) -> None:
        """Look at what the gradient begins with, the loss, as it begins."""
        if self._last is None:
            return
        self._last = None
        index = next((self._wrote[key] for key in of.results if key in self._wrote), None)
        output = None if index is None else self.records[index].output
        if index is not None and output is not None and output.kind and of.layer is None:
            self.sinks.append(Sink("loss", None, "loss", (index,), output.kind))

    def _describe(self, op: LinkedOp, record: OpRecord, result: Any) -> None:
        given = [self._given(op, label, x) for label, x in op.given]
        builder = Builder(self._arrays.measure, self._origin, self._tell)
        held = Given("result", result)
        look = builder.fresh(record, held, given)
        if not look:
            held.known = self._arrays.light(result)

        def wide(output: Summary) -> Any:
            if output.nan:
                return None
            dtype = "float32" if output.dtype in _NARROW else "float64"
            return self._arrays.on_host(op.rerun(dtype=dtype)[0])

        again = op.of is None and op.name != "astype"
        builder.describe(
            record, held, given, look=look, expected=op.expected, wide=wide if again else None
        )
        scores = next((x for label, x in op.inputs if label == "self"), None)
        if look and op.name in SOFTMAX and scores is not None:
            axes = op.params.get("dim", -1)
            axes = tuple(axes) if isinstance(axes, list) else axes
            add_masked_rows(record, self._arrays.on_host(scores), axes)

    def _given(self, op: LinkedOp, label: str, x: Any) -> Given:
        if not hasattr(x, "dtype"):
            return Given(label, number=x)
        key: Any = op.operands.get(label)
        if op.of is not None:
            if label.startswith("grad"):
                key = "gradient", op.of.results[int(label[4:] or 0)]
            else:
                key = op.of.results[0] if label == "result" else op.of.operands.get(label)
        return Given(label, x, self._arrays.light(x), key)

    def _origin(self, given: Given, _: OpRecord) -> Origin:
        key: Key = given.key or ("", "")
        if key[0] == "gradient":
            return Origin(self._made("backward", key[1]))
        made = self._made("forward", key)
        return Origin(made) if made else self._outside(key, given.array)

    def replay(self, notes: list[str], *, ends: bool = False) -> Replay:
        """Give what was seen.

        Args:
            notes: What was not.
            ends: Whether of the first run only the ends were read.
        """
        passed = [each for each in self.passed if each.layer is None or not ends]
        return Replay(self.records, self.sinks, list(dict.fromkeys(notes)), passed=passed)
