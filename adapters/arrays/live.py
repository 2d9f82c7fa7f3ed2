"""The tape of arrays in host memory: a result is looked at as soon as it is there.

The operands are still at hand then, so what a bad result is made of is measured at once, in
place of a second run.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import anynan.arrays.records
from anynan._arrays.access import dtype_name
from anynan._arrays.probe import probe
from anynan._base.summary import Summary
from anynan._calls.collector import offer
from anynan._diagnosis.agreement import CheckedPoint
from anynan._diagnosis.lineage import OpRecord, Replay, Sink
from anynan._diagnosis.operands import blank, light
from anynan._diagnosis.recorder import BaseRecorder
from anynan._diagnosis.records import Given, Origin
from anynan._readings.policy import reading_kind
from anynan._readings.step import Step
from anynan.arrays.bundle import call_of, host
from anynan.arrays.errorlog import ErrorLog
from anynan.arrays.messages import OUT_OF_SIGHT
from anynan.arrays.names import is_number
from anynan.arrays.operations import ArrayOp
from anynan.arrays.records import is_finite
from anynan.arrays.tape import Tape, Watching
from anynan.arrays.tracked import CLEAN, UNKNOWN, TrackedArray, is_tracked
from anynan.events import Event, Kind, Phase

# Operations that can only pass values on.
CARRYING = frozenset(
    {
        "getitem", "reshape", "ravel", "transpose", "permute_dims", "squeeze", "expand_dims",
        "swapaxes", "moveaxis", "T", "mT", "broadcast_to", "matrix_transpose", "flip", "copy",
        "concat", "stack", "take", "roll", "tile", "repeat", "sort", "negative", "abs", "real",
        "imag", "conj", "diagonal", "flatten", "flat", "broadcast_arrays", "tril", "triu", "neg",
    }
)  # fmt: skip


_PLAIN = frozenset({"axis", "dim", "keepdims"})


# Their result depends on more than their operands, or is none of their own.
_UNREPEATED = frozenset({"getitem", "copy", "empty", "random", "normal", "uniform"})


class LiveTape(Tape, BaseRecorder):
    """Look at every result on the spot; raise where a bad value leaves its scope."""

    def __init__(self, session: Watching, rows: Step | None, log: ErrorLog | None = None) -> None:
        Tape.__init__(self, session, rows, log)
        BaseRecorder.__init__(self, anynan.arrays.records, self.notes.append, _offered)
        self._told: OpRecord | None = None  # by the log
        self._answers: dict[int, tuple[TrackedArray, tuple[int, ...]]] = {}
        self._last: tuple[int, ...] = ()

    def _clean(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        # A dtype may be too small, where= leaves memory unwritten, initial= may be anything.
        if self.leaky or name not in CARRYING or not _PLAIN.issuperset(kwargs):
            return False
        return all(self._is_clean(value) for value in (args[:1] if name == "getitem" else args))

    def _is_clean(self, value: Any) -> bool:
        if is_tracked(value):
            return value._node == CLEAN and not value._cell.writes
        if isinstance(value, list | tuple):
            return all(self._is_clean(item) for item in value)
        if isinstance(value, float):
            return value - value == 0
        return isinstance(value, int) or value is None

    def look(
        self, results: list[TrackedArray], show: Callable[[], ArrayOp], *, clean: bool,
        writes: TrackedArray | None,
    ) -> None:  # fmt: skip
        """Record an operation with a bad result."""
        bad = [x for x in results if not clean and not is_finite(x._raw)]
        if writes is not None and not any(x is writes for x in bad):
            self._cleared(writes)
        if bad:
            op = show()
            record = self.record(op, bad[0]._raw)
            op.over()
            for x in bad:
                self.wrote(x, record.index, op)
        elif self.records:
            self._answered(results)

    def _answered(self, results: list[TrackedArray]) -> None:
        """Remember truths and whole numbers that were made of bad values, or of such."""
        found = self._bad_among(self.taken)
        for x in results if found else ():
            if getattr(getattr(x._raw, "dtype", None), "kind", "") in "biu":
                self._answers[id(x)] = x, found

    def _bad_among(self, given: list[TrackedArray]) -> tuple[int, ...]:
        known = [self.parents(x) or self._answers.get(id(x), (x, ()))[1] for x in given]
        return tuple(dict.fromkeys(index for indices in known for index in indices))

    def close(self) -> None:
        """End the recording; what was given last is looked up before it goes."""
        self._last = self._bad_among(self.taken)
        self._answers.clear()
        super().close()

    def ended(self, error: BaseException) -> Replay | None:
        """Give what was seen up to an exception, and last what the program took that is bad."""
        seen = self.replay()
        seen.raised = error
        if self._last:
            output = self.records[self._last[0]].output
            kind = (None if output is None else output.kind) or "nan"
            seen.sinks.append(Sink("value", None, "", self._last, kind))
        return seen

    def _cleared(self, x: TrackedArray) -> None:
        x._node = CLEAN
        x._cell.writes.clear()

    def read(self, layer: str | None, phase: Phase, tensor: str, x: TrackedArray) -> None:
        """Write a row, and have it judged at once if it is out of its limits."""
        span = probe(x._raw)
        if span is None:
            return
        lo, hi = span
        kind = reading_kind(lo, hi)
        if kind is not None:
            if phase == "input":
                x._node = UNKNOWN
                x._cell.bad = True
                self.bad_inputs.add(id(x._raw))
            else:
                parents = self._made_by(x, kind)
                overwritten = not parents and x._cell.label is not None and not x._cell.bad
                self.sinks.append(Sink(phase, layer, tensor, parents, kind, overwritten))
                if not parents:
                    self.notes.append(OUT_OF_SIGHT(why=self.unseen(), guess=""))
        rows = self.rows
        if rows is None:
            self.passed.append(CheckedPoint(layer, phase, tensor, 0, lo, hi))
            return
        site = self.site(layer, phase, tensor, x._raw)
        order = self.add_row(site)
        rows.fill((lo,), (hi,))
        if not (-site.limit <= lo and hi <= site.limit):
            seen = self.replay() if kind is not None and self.session.options.replay else None
            self.session.tracker.judge.flag(rows, order, x._raw, replayed=seen)

    def _origin(self, given: Given, record: OpRecord) -> Origin:
        """Say where the bad values of an operand came from."""
        x = given.key
        if is_tracked(x):
            parents, known, came_bad = self.parents(x), x._cell.label, x._cell.bad
        else:
            known, came_bad = self.inputs.get(id(x)), id(x) in self.bad_inputs
            parents = () if known is not None else self.lost()
        if not parents and not came_bad and given.known is not None and given.known.kind:
            parents = self._out_of_sight(given.array, given.known.kind)
        if parents:
            return Origin(parents)
        found = self.from_outside(given.name, known, came_bad=came_bad)
        if id(given.array) in self.unwritten:
            return found._replace(source="uninitialised")
        return found

    def _link(self, op: ArrayOp, record: OpRecord) -> None:
        record.phase = "value"  # until it is known whether scopes are used

    def _taken(self, op: ArrayOp) -> list[Given]:
        return [self._given(op, label, x) for label, x in op.given]

    def _given(self, op: ArrayOp, label: str, x: Any) -> Given:
        if is_number(x):
            return Given(label, number=x)
        raw, writes = op.plain(x), op.writes
        if writes is not None and x is writes and raw is writes._raw:  # no copy was made of it
            return Given(label, None, self._kinds(writes), x)
        return Given(label, raw, light(raw), x)

    def _kinds(self, x: TrackedArray) -> Summary:
        """Say what an overwritten operand held, of which there is no copy."""
        known = [self.records[i].output for i in self.parents(x) if i < len(self.records)]
        kinds = {summary.kind for summary in known if summary is not None}
        return replace(
            blank(x._raw), nan=int("nan" in kinds), posinf=int("posinf" in kinds),
            neginf=int("neginf" in kinds),
        )  # fmt: skip

    def _wide(self, op: ArrayOp, output: Summary) -> Any:
        if output.nan or op.name in _UNREPEATED or not op.inputs:
            return None
        # bfloat16 ends where float32 does, so only float64 shows by how much it overflowed.
        narrow = all(dtype_name(x) == "float16" for _, x in op.inputs)
        return host(op.rerun(dtype="float32" if narrow else "float64")[0])

    def checked(self, event: Event, array: Any) -> None:
        """Note in a second run what a direct check found."""
        parents = self.parents(array) if is_tracked(array) else self.lost()
        self.sinks.append(Sink("value", event.layer, event.tensor, parents, event.kind))

    def history(self, x: TrackedArray) -> tuple[int, ...]:
        """Give the records that made this array bad."""
        ends = probe(x._raw)
        return self._made_by(x, None if ends is None else reading_kind(*ends))

    def lend(self, raw: Any) -> Any:
        """Put an array under watch that the function reaches past its arguments."""
        x = super().lend(raw)
        if is_tracked(x):
            x._cell.bad = not is_finite(raw)
        return x

    def unseen(self) -> str:
        """Say why a bad value has no operation that made it, and what NumPy says of that."""
        said, log = super().unseen(), self.log
        heard = log is not None and log.lines and self.leaky
        return f"{said}; NumPy's error log has: {log}" if heard else said

    def _made_by(self, x: TrackedArray, kind: Kind | None) -> tuple[int, ...]:
        return self.parents(x) or self.lost() or self._out_of_sight(x._raw, kind)

    def _out_of_sight(self, raw: Any, kind: Kind | None) -> tuple[int, ...]:
        """Blame the one error that NumPy noted while plain arrays were about."""
        log = self.log
        if log is None or not log.lines or not self.leaky or self.bad_inputs:
            return ()
        if kind is None or id(raw) in self.unwritten or self.session.was_there(raw):
            return ()
        told = log.told(-1, kind)  # before all others
        if told is None:
            self.notes.append(self.unseen())
            return ()
        self._told = told
        guess = ", which probably made it"
        self.notes.append(OUT_OF_SIGHT(why=self.unseen(), guess=guess))
        return (told.index,)

    def heard(self) -> bool:
        """Tell whether an operation made NaN or Inf, or NumPy noted so."""
        return bool(self.records or (self.log is not None and self.log.lines))

    def replay(self) -> Replay:
        """Give the records so far; they are placed now that it is known whether scopes are used."""
        for record in self.records:
            if record.phase == "value":
                record.layer, record.phase = self.placed(record.layer)
        notes = list(dict.fromkeys(self.notes))
        records = self.records if self._told is None else [self._told, *self.records]
        return Replay(list(records), list(self.sinks), notes, whole=True)


def _offered(record: OpRecord, op: ArrayOp) -> None:
    """Hand an operation to the bundle that wants it."""
    args, kwargs = op.arguments
    offer(record, partial(call_of, op.name, op.raw, record.output, args, kwargs), host)
