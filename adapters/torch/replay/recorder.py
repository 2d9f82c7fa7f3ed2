"""Make records of operations with bad results, and follow these from storage to storage."""

import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterable
from itertools import islice
from traceback import walk_stack
from types import FrameType
from typing import Any

import numpy as np
import torch

from anynan._base.sources import is_anynans
from anynan._base.summary import Summary
from anynan._base.walks import walk
from anynan._diagnosis.lineage import External, OpRecord, Sink
from anynan._diagnosis.messages import OPERATION_BLIND
from anynan._diagnosis.recorder import BaseRecorder
from anynan._diagnosis.records import SOFTMAX, Given, Origin
from anynan.events import Phase
from anynan.torch.call.state import StopReplay
from anynan.torch.private import StorageWeakRef, storage_number
from anynan.torch.read.probes import READER, local, nonfinite
from anynan.torch.replay import operands
from anynan.torch.replay.operands import Operation

# Characters of what PyTorch says of an operation that could not be looked at.
_LONG = 160
_WRAPPERS = ("torch/_dynamo/eval_frame.py", "torch/_compile.py", "utils/_python_dispatch.py")
# So many frames may be between an operation and the function that prints a tensor.
_DEEP = 6


class StorageRecorder(BaseRecorder):
    """Make the records and sinks of a run. A storage's bad values are known by those that wrote it.

    Args:
        outside: Where the storages come from that are there before the run, by their number.

    Attributes:
        notes: What could not be looked at: one sentence, of the first.
        taken: Where the last operation took bad values, or an answer about them.
        stop: Tells of each sink whether the run ends there.
        strangers: Bad tensors that are no input, weight or buffer, weakly: the code holds them.
    """

    def __init__(self, outside: dict[int, tuple[External, str]]) -> None:
        # A method of this object's would close a cycle.
        notes: list[str] = []
        super().__init__(READER, functools.partial(_note_blind, notes))
        self.notes = notes
        self.outside = outside
        self.taken: Sink | None = None
        self.stop: Callable[[Sink], bool] | None = None
        self.strangers: list[weakref.ref[torch.Tensor]] = []
        # The weak reference keeps a number from being reused by another storage.
        self._bad: dict[int, tuple[StorageWeakRef, list[int]]] = {}
        self._uninitialised: dict[int, StorageWeakRef] = {}
        # Truths and whole numbers that were made of bad values.
        self._answers: dict[int, tuple[StorageWeakRef, tuple[int, ...]]] = {}

    def bad(self, op: Operation, layer: str | None) -> list[torch.Tensor]:
        """List the bad results of an operation, which has run in a layer."""
        results, written, bad = op.outputs, op.overwritten, []
        for x in results:
            ends = READER.span(x)
            if ends is None:
                continue
            if math.isfinite(ends[0]) and math.isfinite(ends[1]):
                if self._bad or self._uninitialised:
                    self._clear(x, written)
            elif op.shape.name.startswith(("empty", "new_empty")):
                self._uninitialised[storage_of(x)] = StorageWeakRef(x.untyped_storage())
            else:
                bad.append(x)
        if self._bad and not op.backward:
            self.take(op, layer, results)
            if not bad:
                self._note_hidden(op)
        return bad

    def see(self, op: Operation, bad: list[torch.Tensor]) -> None:
        """Make a record of an operation with bad results."""
        record = self.record(op, bad[0])
        for x in bad:
            own = any(x is w for w in op.overwritten)
            self.mark(x, record.index, fresh=not own)
            kind, name = self.outside.get(storage_of(x), ("", ""))
            if own and kind == "parameter":
                found = (record.output.kind if record.output else None) or "nan"
                layer = name.rpartition(".")[0]
                self.sink(Sink("parameter", layer, name, (record.index,), found))

    def take(self, op: Operation, layer: str | None, results: Iterable[torch.Tensor] = ()) -> None:
        """Note what the program takes that is bad, or a truth or a number that came of it.

        An exception right after it may be because of it.
        """
        if not self._bad or _prints():
            return
        found: list[int] = []
        for x in op.tensors():
            answer = self._answers.get(storage_of(x))
            found += self.parents(x) or (() if answer is None else answer[1])
        self.taken = None
        if found:
            output = self.records[found[0]].output
            kind = (None if output is None else output.kind) or "nan"
            self.taken = Sink("value", layer, op.shape.name, tuple(found), kind)
            for x in results:
                if not x.is_floating_point() and not x.is_complex():
                    key = StorageWeakRef(x.untyped_storage())
                    self._answers[storage_of(x)] = key, tuple(found)

    def _note_hidden(self, op: Operation) -> None:
        """Note under which operation the bad values of its operands went out of sight."""
        name, begin = op.shape.name, [i for x in op.tensors() for i in self.parents(x)]

        def before(i: int) -> list[int]:
            return [parent for item in self.records[i].operands for parent in item.parents]

        for i in walk(begin, before):
            record = self.records[i]
            if name not in (record.hidden or ()):
                record.hidden = (*(record.hidden or ()), name)

    def sink(self, sink: Sink) -> None:
        """Note where bad values arrived; ``stop`` may end the run there."""
        super().sink(sink)
        if self.stop is not None and self.stop(sink):
            raise StopReplay

    # What a record says.

    def _link(self, op: Operation, record: OpRecord) -> None:
        if op.of_node:
            record.forward, record.feeds = op.forward, tuple(op.feeds)
        elif op.backward:
            record.phase, record.direct = "forward" if op.again else "backward", not op.again
        if record.phase != "backward":
            record.hidden = ()

    def _taken(self, op: Operation) -> list[Given]:
        return [operands.given(name, x, op.before) for name, x in op.named()]

    def _listed(self, op: Operation, given: list[Given], *, look: bool) -> list[Given]:
        if not op.of_node:
            return given
        return operands.of_node(op.node, op.incoming, op.taken, given, look=look)

    def _wide(self, op: Operation, output: Summary) -> Any:
        if output.nan or op.overwritten or any(nonfinite(x) for x in op.tensors()):
            return None
        spans = [span for x in op.rerun(dtype=op.wider) if (span := READER.span(x)) is not None]
        return np.array(spans)

    def _count(self, op: Operation, record: OpRecord) -> None:
        if record.name in SOFTMAX:
            operands.add_masked_rows(record, op.named())
        elif record.name == "nll_loss" and record.phase != "backward":
            operands.add_ignored(record, op.arguments)
        elif record.name == "ctc_loss":
            operands.add_alignment(record, op.arguments)

    def _origin(self, given: Given, record: OpRecord) -> Origin:
        key, name = storage_of(given.key), given.name.removeprefix(operands.INNER)
        entry = self._bad.get(key)
        if entry is not None:
            return Origin(tuple(entry[1]))
        if record.name == "constant":  # made of numbers of the host's
            return Origin((), "constant")
        if key in self._uninitialised:
            return Origin((), "uninitialised", name)
        if key not in self.outside:
            self.strangers.append(getattr(given.key, "anynan_copy_of", weakref.ref(given.key)))
        return Origin((), *self.outside.get(key, ("unknown", name)))

    # Storages.

    def parents(self, x: torch.Tensor) -> tuple[int, ...]:
        """Give the records that wrote a tensor's bad values."""
        entry = self._bad.get(storage_of(x))
        return () if entry is None else tuple(entry[1])

    def _wrote_bad(self, _: Phase, key: torch.Tensor) -> tuple[int, ...]:
        return self.parents(key)

    def mark(self, x: torch.Tensor, index: int, *, fresh: bool) -> None:
        """Note that a record wrote a tensor's bad values, into a storage of its own or not."""
        key = storage_of(x)
        entry = self._bad.get(key)
        # A whole write hands on what it read through its own operands.
        if entry is None or fresh or _whole(x):
            self._bad[key] = (StorageWeakRef(x.untyped_storage()), [index])
        else:
            entry[1].append(index)
        self._uninitialised.pop(key, None)

    def _clear(self, x: torch.Tensor, written: Iterable[torch.Tensor]) -> None:
        key = storage_of(x)
        if key not in self._bad and key not in self._uninitialised:
            return
        if _whole(x) or not any(x is w for w in written):
            self._bad.pop(key, None)
            self._uninitialised.pop(key, None)

    def receive(self, x: torch.Tensor, parents: list[int], label: Any) -> None:
        """Note what a collective wrote: who made it bad, or where it came from."""
        key = storage_of(x)
        self._uninitialised.pop(key, None)
        self._bad.pop(key, None)
        if parents:
            self._bad[key] = (StorageWeakRef(x.untyped_storage()), parents)
        elif label is not None:
            self.outside[key] = label


def storage_of(x: torch.Tensor) -> int:
    """Give the number of what holds a tensor's values; a sparse one has no such thing."""
    held = local(x)
    return storage_number(held) if held.layout is torch.strided else -1


def _note_blind(notes: list[str], what: str) -> None:
    if not notes:
        error = (what.splitlines() or [what])[0][:_LONG]
        notes.append(OPERATION_BLIND(what="one operation", error=error))


def caller() -> FrameType | None:
    """Return the frame that called the operation, past the watcher's own frames."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.endswith(_WRAPPERS) or is_anynans(file)):
            return frame
        frame = frame.f_back
    return None


def _prints() -> bool:
    """Tell whether a tensor is made into text, as for the message of an exception."""
    frame = caller()
    near = () if frame is None else islice(walk_stack(frame), _DEEP)
    return any(each.f_code.co_filename.endswith("torch/_tensor_str.py") for each, _ in near)


def _whole(x: torch.Tensor) -> bool:
    return x.numel() * x.element_size() >= x.untyped_storage().nbytes()
