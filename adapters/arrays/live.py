"""The tape of arrays in host memory: a result is looked at as soon as it is there.

The operands are still at hand then, so what a bad result is made of is measured at once, in
place of a second run.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from anynan._arrays.access import device_name, dtype_name, on_host
from anynan._arrays.probe import is_clean, probe
from anynan._base import context
from anynan._base.sources import user_source
from anynan._base.summary import Summary
from anynan._calls.collector import collecting
from anynan._diagnosis.agreement import CheckedPoint
from anynan._diagnosis.lineage import Operand, OpRecord, Replay, Sink
from anynan._diagnosis.messages import OPERATION_BLIND
from anynan._diagnosis.records import SOFTMAX, Builder, Given, Origin, add_masked_rows
from anynan._readings.policy import reading_kind
from anynan._readings.step import Step
from anynan.arrays.bundle import call_of, host
from anynan.arrays.errorlog import ErrorLog
from anynan.arrays.messages import OUT_OF_SIGHT
from anynan.arrays.names import is_number, named, params
from anynan.arrays.records import light, measured, wide
from anynan.arrays.tape import Tape, Watching
from anynan.arrays.trackable import is_array
from anynan.arrays.tracked import CLEAN, UNKNOWN, TrackedArray, is_tracked, strip
from anynan.errors import reason
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


class LiveTape(Tape):
    """Look at every result on the spot; raise where a bad value leaves its scope.

    Attributes:
        records: Operations with bad results.
        sinks: Where bad values arrived.
        passed: What left its scope in a second run.
    """

    def __init__(self, session: Watching, rows: Step | None, log: ErrorLog | None = None) -> None:
        super().__init__(session, rows, log)
        self.records: list[OpRecord] = []
        self.sinks: list[Sink] = []
        self.passed: list[CheckedPoint] = []
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
        self, name: str, raw: str, function: Callable[..., Any], args: tuple[Any, ...],
        kwargs: dict[str, Any], results: list[TrackedArray], *, clean: bool,
        before: Any = None, writes: TrackedArray | None = None,
    ) -> None:  # fmt: skip
        """Record an operation with a bad result."""
        bad = [x for x in results if not clean and not is_finite(x._raw)]
        if writes is not None and not any(x is writes for x in bad):
            self._cleared(writes)
        if not bad:
            if self.records:
                self._answered(results)
            return
        index = len(self.records)
        raw = self.named(raw, bad[0])
        layer = context.scope_path()
        try:
            record = _make_record(
                self, index, name, raw, function, args, kwargs, bad[0], before=before,
                writes=writes,
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001  the name and the line are known all the same
            known = [x for x in (*args, *kwargs.values()) if is_tracked(x)]
            items = tuple(Operand("", None, parents=self.parents(x)) for x in known)
            record = OpRecord(index, name, raw, None, "value", light(bad[0]._raw), items)
            what = f"the operands of {name}"
            self.notes.append(OPERATION_BLIND(what=what, error=reason(error)))
        record.layer = None if layer == self.base else layer
        record.source = user_source(framework=type(bad[0]._raw).__module__.partition(".")[0])
        expected = context.expectations()
        if expected and record.output is not None:
            record.expected = expected.get(record.output.kind or "")
        self.records.append(record)
        into = collecting.get()
        if into is not None and into.wants(record):
            plain = [strip(x, []) if x is not writes else before for x in args]
            options = {key: strip(x, []) for key, x in kwargs.items()}
            found = record.output
            into.take(record, lambda o: call_of(name, raw, found, plain, options, o), host)
        for x in bad:
            if x is writes:
                # A whole write hands on what it read through its own operands.
                if name == "setitem":
                    x._cell.writes.append(index)
                else:
                    x._node = index
                    x._cell.writes[:] = [index]
            else:
                x._node = index

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

    def origin(self, given: Given, _record: OpRecord) -> Origin:
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

    def checked(self, event: Event, array: Any) -> None:
        """Note in a second run what a direct check found."""
        parents = self.parents(array) if is_tracked(array) else self.lost()
        self.sinks.append(Sink("value", event.layer, event.tensor, parents, event.kind))

    def history(self, x: TrackedArray) -> tuple[int, ...]:
        """Give the records that made this array bad."""
        span = probe(x._raw)
        return self._made_by(x, None if span is None else reading_kind(*span))

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


# Their result depends on more than their operands, or is none of their own.
_UNREPEATED = frozenset({"setitem", "getitem", "copy", "empty", "random", "normal", "uniform"})


def _make_record(
    tape: LiveTape, index: int, name: str, raw: str, function: Callable[..., Any],
    args: tuple[Any, ...], kwargs: dict[str, Any], bad: TrackedArray, *, before: Any,
    writes: TrackedArray | None,
) -> OpRecord:  # fmt: skip
    """Describe an operation with a bad result; layer, line and reason are the caller's.

    Args:
        tape: The tape of this call.
        index: Number of the record.
        name: Canonical name.
        raw: The library's name.
        function: What was called.
        args: Positional arguments, tracked arrays among them.
        kwargs: Arguments by name.
        bad: The result that is bad.
        before: Copy of what was overwritten, None where there is none.
        writes: The array that was written to.
    """
    record = OpRecord(index, name, raw, None, "value", None, params=params(name, args, kwargs))
    result = Given("result", bad._raw, None, bad)
    given = [
        _given(tape, label, value, writes, before)
        for label, value in named(name, args, {k: v for k, v in kwargs.items() if k != "key"})
        if _counts(value)
    ]
    builder = Builder(measured, tape.origin, tape.notes.append)
    look = builder.fresh(record, result, given)
    if not look:
        result.known = light(bad._raw)

    def wider(output: Summary) -> float | None:
        if output.nan or writes is not None or name in _UNREPEATED:
            return None
        return wide(function, args, kwargs)

    builder.describe(record, result, given, look=look, wide=wider)
    if look and name in SOFTMAX:
        _add_masked_rows(record, args)
    return record


def _counts(value: Any) -> bool:
    return is_tracked(value) or is_array(value) or is_number(value)


def _given(
    tape: LiveTape, label: str, value: Any, writes: TrackedArray | None, before: Any
) -> Given:
    if is_number(value):
        return Given(label, number=value)
    if writes is None or value is not writes:
        raw = value._raw if is_tracked(value) else value
        return Given(label, raw, light(raw), value)
    known = _kinds(tape, value) if before is None else light(before)
    return Given(label, before, known, value)


def _kinds(tape: LiveTape, x: TrackedArray) -> Summary:
    """Say what an overwritten operand held, of which there is no copy."""
    shape = tuple(np.shape(x._raw))
    blank = Summary(shape, dtype_name(x._raw), device_name(x._raw), math.prod(shape))
    known = [tape.records[i].output for i in tape.parents(x) if i < len(tape.records)]
    kinds = {summary.kind for summary in known if summary is not None}
    return replace(
        blank, nan=int("nan" in kinds), posinf=int("posinf" in kinds),
        neginf=int("neginf" in kinds),
    )  # fmt: skip


def _add_masked_rows(record: OpRecord, args: tuple[Any, ...]) -> None:
    axis = record.params.get("dim", args[1] if len(args) > 1 else -1)
    x = args[0]._raw if args and is_tracked(args[0]) else None
    if x is not None and isinstance(axis, int):
        add_masked_rows(record, on_host(x), axis)


def is_finite(raw: Any) -> bool:
    """Tell whether an array is finite."""
    if is_clean(raw):
        return True
    kind = getattr(getattr(raw, "dtype", None), "kind", "f")
    if kind in "biu":
        return True
    try:
        span = probe(raw)
    except TypeError:
        return True
    return span is None or reading_kind(*span) is None
