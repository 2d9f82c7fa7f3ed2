"""Watch every operation of one run, below autograd, and record those with bad results.

The watcher sits at the dispatcher, so that it sees inside composite functions, custom
``autograd.Function``s, in-place and ``out=`` variants, and the backward pass. A backward node
is tied to the forward operation that made it by autograd's sequence number.
"""

import math
import sys
import threading
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any, Self, cast

import torch

from anynan._base import context
from anynan._base.sources import is_anynans, user_source
from anynan._diagnosis.agreement import CheckedPoint
from anynan._diagnosis.lineage import External, OpRecord, Sink
from anynan._diagnosis.records import Builder, Given, Origin
from anynan._trace.op import Observer
from anynan.events import Source
from anynan.torch.call.state import StopReplay
from anynan.torch.private import DispatchMode, StorageWeakRef
from anynan.torch.private import node as _node
from anynan.torch.private import sequence as _sequence
from anynan.torch.private import task as _task
from anynan.torch.read.probes import local, plain, read_ends, readable
from anynan.torch.replay import operands
from anynan.torch.replay.fix_runner import FixRunner
from anynan.torch.replay.names import MOVING, node_name
from anynan.torch.replay.ran import OVERWRITING, Made, Ran, Shape, ShownOp, shape_of
from anynan.torch.replay.saving import Catcher

# So many frames may be between an operation and the function that prints a tensor.
_DEEP = 6
# Characters of what PyTorch says of an operation that could not be looked at.
_LONG = 160
# So many function transforms may be inside of each other.
_NESTED = 8
_WRAPPERS = ("torch/_dynamo/eval_frame.py", "torch/_compile.py", "utils/_python_dispatch.py")


class Watcher(DispatchMode):
    """Record operations with bad results while entered.

    Attributes:
        records: Operations with a bad result, in execution order.
        sinks: Where bad values arrived.
        layers: Stack of (layer path, call) that ``replay`` keeps.
    """

    def __init__(self, outside: dict[int, tuple[External, str]], base: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: list[OpRecord] = []
        self.sinks: list[Sink] = []
        self.layers: list[tuple[str, int]] = []
        self.outside = outside
        self.base = base
        self.within: CodeType | None = None
        self.called: Source | None = None
        self.incoming: tuple[Any, ...] = ()
        self.consumers: dict[int, list[str]] = {}
        self.stop: Callable[[Sink], bool] | None = None
        self._made: dict[int, Made] = {}
        self._first = _sequence()
        self._inside: int | None = None
        self._taken: list[torch.Tensor] = []
        self._own: list[torch.Tensor] = []
        self._bad: dict[int, tuple[StorageWeakRef, list[int]]] = {}
        self._uninitialised: dict[int, StorageWeakRef] = {}
        # Truths and whole numbers that were made of bad values.
        self._answers: dict[int, tuple[StorageWeakRef, tuple[int, ...]]] = {}
        # Where the last operation took bad values, or an answer about them.
        self.taken: Sink | None = None
        self.busy = False
        # Set by a replay: what it overwrites of the user's own tensors, to be put back.
        self.originals: dict[int, tuple[torch.Tensor, Any, Any]] | None = None
        # A replay may itself run inside a backward pass, in a gradient hook.
        self._base_task = _task()
        # Places that were passed, to be compared with another run.
        self.passed: list[CheckedPoint] = []
        self._thread = threading.get_ident()
        # Set where operations are repaired.
        self.runner: FixRunner | None = None
        # Set where every operation is shown, and none is recorded.
        self.observer: Observer | None = None
        self.updating = False
        self._shown = 0
        # Set in a second run for a bundle.
        self.catcher: Catcher | None = None
        # Backward passes of this run: the engine may run them in threads of its own.
        self.tasks: set[int] = set()

    def __enter__(self) -> Self:
        """Begin to watch, or go on: what was made meanwhile is nobody's here."""
        self._first = _sequence()
        return cast(Self, super().__enter__())  # type: ignore[no-untyped-call]

    # Every operation.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # what follows on the shards of this rank comes by, too
        if self.busy or func.namespace in MOVING:  # see collectives.Sent
            return func(*args, **kwargs)
        self.busy = True
        try:
            return self._run(func, args, kwargs)
        finally:
            self.busy = False

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shape = shape_of(func)
        seq = _sequence() - 1
        backward = self.in_backward()
        if shape.view and not shape.written and shape.name != "constant":
            if not backward and self._makes_node(seq):
                self._remember(shape.name, seq, native=False, frame=None)
            return func(*args, **kwargs)
        # Never into user code: nothing is known of an operation that cannot be looked at.
        try:
            written = self._written(shape, args, kwargs)
            if self.originals is not None:
                for x in written:
                    self._preserve(x, self.originals)
            before = self._before(shape, args, kwargs, written)
        except Exception as error:  # noqa: BLE001
            self.blind(f"{func}: {error}")
            return func(*args, **kwargs)
        try:
            out = func(*args, **kwargs)
        except Exception:
            self._took(shape.name, args, kwargs, ())
            raise
        if self.runner is not None and shape.name in self.runner.names:
            out = self._mend(func, shape, args, kwargs, out, written, before, seq, backward)
        if self.observer is not None:
            if func.namespace == "profiler":
                return out
            return self._show(func, shape, args, kwargs, out, written, before, seq, backward)
        try:
            self._look(func, shape, args, kwargs, out, written, before, seq, backward)
        except Exception as error:  # noqa: BLE001
            self.blind(f"{func}: {error}")
        return out

    def _mend(
        self, func: Any, shape: Shape, args: Any, kwargs: Any, out: Any, written: list[Any],
        before: dict[int, torch.Tensor], seq: int, backward: bool,
    ) -> Any:  # fmt: skip
        """Put a repaired operation in the place of what the user's code ran."""
        frame = _caller() if backward else None
        if backward and (frame is None or frame.f_code.co_name == "_engine_run_backward"):
            return out
        assert self.runner is not None
        found = self.runner.of(shape.name, self.line(frame), self.place()[0])
        if not found:
            return out
        arguments = operands.plain_arguments(shape.argument_names, args, kwargs)
        number = seq if self._makes_node(seq) else None
        return self.runner.mend(found, func, arguments, out, written, before, number)

    def _preserve(self, x: torch.Tensor, originals: dict[int, Any]) -> None:
        """Copy one of the user's own tensors before it is overwritten."""
        key = _key(x)
        if key not in originals and self.outside.get(key, ("", ""))[0] in ("parameter", "input"):
            version = None
            if not x.is_inference():
                version = torch.autograd._unsafe_preserve_version_counter(x)  # type: ignore[attr-defined]
            originals[key] = x, version, x.untyped_storage().clone()

    def restore(self) -> None:
        """Put back what was overwritten, as if it had not been."""
        for x, version, content in (self.originals or {}).values():
            x.untyped_storage().copy_(content)
            if version is not None:
                version.__exit__()
        self.originals = None

    def forget(self) -> None:
        """Let go of the tensors of the last backward node: the run is over."""
        self.incoming, self._taken, self._own = (), [], []

    def mine(self) -> bool:
        """Tell whether what runs now belongs to this run, and not to another thread's."""
        return threading.get_ident() == self._thread or _task() in self.tasks

    def in_backward(self) -> bool:
        """Tell whether the replay's own backward pass is running."""
        return _task() != self._base_task

    def blind(self, what: str) -> None:
        """Note an operation that could not be looked at."""
        self.outside.setdefault(-1, ("unknown", (what.splitlines() or [what])[0][:_LONG]))

    def _begin(
        self, shape: Shape, seq: int, backward: bool
    ) -> tuple[Made | None, bool, FrameType | None]:
        """Remember an operation for the node it made; tell whether autograd itself ran it."""
        frame = _caller() if backward else None
        native = backward and (frame is None or frame.f_code.co_name == "_engine_run_backward")
        made = None
        if self._makes_node(seq) and (not backward or torch.is_grad_enabled()):
            made = self._remember(shape.name, seq, native, frame)
        return made, native, frame

    def _show(
        self, func: Any, shape: Shape, args: Any, kwargs: Any, out: Any, written: list[Any],
        before: dict[int, torch.Tensor], seq: int, backward: bool,
    ) -> Any:  # fmt: skip
        """Show an operation to the observer, and put in what it gives in the place of results."""
        assert self.observer is not None
        made, native, frame = self._begin(shape, seq, backward)
        ran = Ran(func, shape, args, kwargs, written, before, backward, native, frame)
        op = ShownOp(self, ran, out, self._shown, frame or _caller())
        self._shown += 1
        if made is not None:
            made.shown = op.number
        instead = self.observer(op)
        op.frame = None  # it holds what the program has there
        return out if instead is None else op.replaced(instead)

    def _look(
        self, func: Any, shape: Shape, args: Any, kwargs: Any, out: Any, written: list[Any],
        before: dict[int, torch.Tensor], seq: int, backward: bool,
    ) -> None:  # fmt: skip
        made, native, frame = self._begin(shape, seq, backward)
        results = [x for x in operands.flat(out) if not any(x is w for w in written)] + written
        if made is not None and self.catcher is not None:
            took = Ran(func, shape, args, kwargs, written, before, backward, native, frame)
            self.catcher.made(seq, made, took)
        if native:
            self._follow(args, kwargs, results)
        bad = []
        for x in results:
            ends = _ends(x)
            if ends is None:
                continue
            if math.isfinite(ends[0]) and math.isfinite(ends[1]):
                self._clear(x, written)
            elif shape.name.startswith(("empty", "new_empty")):
                self._uninitialised[_key(x)] = StorageWeakRef(x.untyped_storage())
            else:
                bad.append(x)
        if self._bad and not backward:
            self._took(shape.name, args, kwargs, results)
        if not bad:
            if self._bad and not backward:
                self._note_hidden(shape.name, args, kwargs)
            return
        ran = Ran(func, shape, args, kwargs, written, before, backward, native, frame)
        record = self._record(ran, bad[0])
        for x in bad:
            self._mark(x, record.index, fresh=not any(x is w for w in written))
            label = self.outside.get(_key(x))
            if label is not None and label[0] == "parameter" and any(x is w for w in written):
                self.sink(
                    Sink("parameter", label[1].rpartition(".")[0], label[1], (record.index,),
                         record.output.kind or "nan" if record.output else "nan")
                )  # fmt: skip
        if made is not None and made.record is None:
            made.record = record.index

    def _took(self, name: str, args: Any, kwargs: Any, results: Iterable[torch.Tensor]) -> None:
        """Note what the program takes that is bad, or a truth or a number that came of it.

        An exception right after it may be because of it.
        """
        if not self._bad or _prints():
            return
        found: list[int] = []
        for x in operands.flat([*args, *kwargs.values()]):
            answer = self._answers.get(_key(x))
            found += self.parents(x) or (() if answer is None else answer[1])
        self.taken = None
        if found:
            output = self.records[found[0]].output
            kind = (None if output is None else output.kind) or "nan"
            self.taken = Sink("value", self.place()[0], name, tuple(found), kind)
            for x in results:
                if not x.is_floating_point() and not x.is_complex():
                    key = StorageWeakRef(x.untyped_storage())
                    self._answers[_key(x)] = key, tuple(found)

    def _note_hidden(self, name: str, args: Any, kwargs: Any) -> None:
        """Note under which operation the bad values of its operands went out of sight."""
        todo = [
            index for x in operands.flat([*args, *kwargs.values()]) for index in self.parents(x)
        ]
        seen = set(todo)
        while todo:
            record = self.records[todo.pop()]
            if name not in (record.hidden or ()):
                record.hidden = (*(record.hidden or ()), name)
            new = {i for item in record.operands for i in item.parents} - seen
            seen |= new
            todo.extend(new)

    def _follow(self, args: Any, kwargs: Any, results: list[torch.Tensor]) -> None:
        """Collect what a backward node works on, apart from its gradients and its own results.

        Under checkpointing a saved tensor can be unpacked only once, which the node has done.
        """
        node = _node()
        number = None if node is None else node._sequence_nr()
        if number != self._inside:
            self._inside, self._taken, self._own = number, [], []
        known = [*self._taken, *self._own, *self.incoming]
        for x in operands.flat([*args, *kwargs.values()]):
            if not any(_same(x, y) for y in known):
                self._taken.append(x)
        self._own.extend(results)

    def _makes_node(self, seq: int) -> bool:
        """Tell whether the running operation took this number: the last one given out.

        An operation without a gradient takes none, and finds its predecessor's.
        """
        return seq >= self._first and seq not in self._made

    def _written(self, shape: Shape, args: Any, kwargs: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for i, name in zip(shape.written, shape.written_names, strict=True):
            value = args[i] if i < len(args) else kwargs.get(name)
            found.extend(operands.flat(value))
        return found

    def _before(
        self, shape: Shape, args: Any, kwargs: Any, written: list[Any]
    ) -> dict[int, torch.Tensor]:
        """Copy what is about to be overwritten: an operand's health is that from before."""
        if not written or shape.name in OVERWRITING:
            return {}
        return {id(x): x.detach().clone() for x in written if plain(x) is not None}

    def _remember(self, name: str, seq: int, native: bool, frame: FrameType | None) -> Made:
        node = _node() if native else None
        first = None if node is None else self.made_by(node)
        if first is not None:  # a gradient of a gradient belongs where the first one does
            made = Made(first.name, first.layer, first.call, first.source, first.expected)
        else:
            layer, call = self.place()
            made = Made(name, layer, call, self.line(frame), context.expectations())
        self._made[seq] = made
        return made

    def made_by(self, node: Any) -> Made | None:
        """Find what made a backward node.

        Each function transform that an operation is inside of gives it one more node, the
        outermost first, and it runs once, under the last one's number.
        """
        number = node._sequence_nr()
        made = self._made.get(number)
        if made is not None:
            return made
        around = range(number + 1, number + _NESTED)
        made = next((self._made[i] for i in around if i in self._made), None)
        return made if made is not None and made.name == node_name(node.name()) else None

    def line(self, frame: FrameType | None = None) -> Source | None:
        """Find the user's line, inside the call that is watched."""
        frame = frame or _caller()
        return user_source(frame, framework="torch", stop=self.within, fallback=self.called)

    def place(self) -> tuple[str | None, int]:
        """Give the layer path and call that run now."""
        return self.layers[-1] if self.layers else (self.base, 0)

    # Records.

    def _record(self, ran: Ran, out: torch.Tensor) -> OpRecord:
        node = _node() if ran.backward else None
        made = None if node is None else self.made_by(node)
        if not ran.backward:
            record = self._forward_record(ran)
        elif ran.native and node is not None:
            record = self._node_record(ran, node, made)
        else:
            record = self._inner_record(ran, made)
        result = Given("result", out, operands.light(out))
        named = ran.named()
        items = operands.given(named, ran.before)
        # Kept, it would close a cycle around the tensors that are held here.
        builder = Builder(operands.measure_bad, self._origin, self.blind)
        look = builder.fresh(record, result, items)
        if ran.native and node is not None:
            items = operands.of_node(node, self.incoming, self._taken, items, look=look)
        builder.describe(
            record, result, items, look=look,
            expected=made.expected if made is not None else context.expectations(),
            wide=ran.wide,
        )  # fmt: skip
        if look:
            operands.add_counts(record, named, ran.arguments)
        if record.phase != "backward":
            record.hidden = ()
        self.records.append(record)
        if self.catcher is not None:
            self.catcher.recorded(record, ran, node, self.incoming)
        return record

    def _forward_record(self, ran: Ran) -> OpRecord:
        layer, call = self.place()
        return OpRecord(
            len(self.records), ran.shape.name, str(ran.func), layer,
            "loss" if layer is None else "forward", None, source=self.line(),
            params=operands.params(ran.arguments), call=call,
        )  # fmt: skip

    def _node_record(self, ran: Ran, node: Any, made: Made | None) -> OpRecord:
        """Begin the record of what autograd runs: it belongs where its forward operation ran."""
        if made is None:
            made = Made(node_name(node.name()), *self.place(), None, None)
        return OpRecord(
            len(self.records), made.name, f"{node.name()} ({ran.func})", made.layer, "backward",
            None, source=made.source or self.line(ran.frame), params=operands.node_params(node),
            forward=made.record, feeds=tuple(self.consumers.get(node._sequence_nr(), ())),
            call=made.call,
        )  # fmt: skip

    def _inner_record(self, ran: Ran, made: Made | None) -> OpRecord:
        """Begin the record of what the user's own code runs in a backward pass."""
        layer, call = self.place() if made is None else (made.layer, made.call)
        # Recomputed under activation checkpointing, it is the forward pass once more.
        again = torch.is_grad_enabled() and bool(self.layers)
        return OpRecord(
            len(self.records), ran.shape.name, str(ran.func), layer,
            "forward" if again else "backward", None, source=self.line(ran.frame),
            params=operands.params(ran.arguments), direct=not again, call=call,
        )  # fmt: skip

    def _origin(self, given: Given, record: OpRecord) -> Origin:
        """Say who wrote an operand's bad values."""
        key, name = _key(given.key), given.name.removeprefix(operands.INNER)
        entry = self._bad.get(key)
        if entry is not None:
            return Origin(tuple(entry[1]))
        if record.name == "constant":  # made of numbers of the host's
            return Origin((), "constant")
        if key in self._uninitialised:
            return Origin((), "uninitialised", name)
        return Origin((), *self.outside.get(key, ("unknown", name)))

    # Storages.

    def parents(self, x: torch.Tensor) -> tuple[int, ...]:
        """Give the records that wrote a tensor's bad values."""
        entry = self._bad.get(_key(x))
        return () if entry is None else tuple(entry[1])

    def _mark(self, x: torch.Tensor, index: int, *, fresh: bool) -> None:
        key = _key(x)
        entry = self._bad.get(key)
        # A whole write hands on what it read through its own operands.
        if entry is None or fresh or _whole(x):
            # The weak reference keeps the key from being reused by another storage.
            self._bad[key] = (StorageWeakRef(x.untyped_storage()), [index])
        else:
            entry[1].append(index)
        self._uninitialised.pop(key, None)

    def _clear(self, x: torch.Tensor, written: list[Any]) -> None:
        key = _key(x)
        if key not in self._bad and key not in self._uninitialised:
            return
        if _whole(x) or not any(x is w for w in written):
            self._bad.pop(key, None)
            self._uninitialised.pop(key, None)

    def arrived(self, x: torch.Tensor, parents: list[int], label: Any) -> None:
        """Note what a collective wrote: who made it bad, or where it came from."""
        key = _key(x)
        self._uninitialised.pop(key, None)
        self._bad.pop(key, None)
        if parents:
            self._bad[key] = (StorageWeakRef(x.untyped_storage()), parents)
        elif label is not None:
            self.outside[key] = label

    # Sinks.

    def sink(self, sink: Sink) -> None:
        """Note where bad values arrived; ``stop`` may end the replay there."""
        self.sinks.append(sink)
        if self.stop is not None and self.stop(sink):
            raise StopReplay

    def check_sink(
        self, phase: Any, layer: str | None, label: str, x: Any, *, call: int | None = None
    ) -> None:
        """Look at a tensor that leaves a layer, and note a sink if it is bad.

        Args:
            phase: Phase of the reading.
            layer: Layer path, None outside every watched layer.
            label: Which tensor.
            x: The tensor.
            call: Which call of the layer, for a place that is read in a first run, too.
        """
        if self.busy:
            return
        self.busy = True
        try:
            ends = _ends(x)
            if ends is not None and call is not None:
                self.passed.append(CheckedPoint(layer, phase, label, call, *ends))
            if ends is None or (math.isfinite(ends[0]) and math.isfinite(ends[1])):
                if self.runner is not None and phase == "loss" and ends is not None:
                    self.runner.losses.append(ends[0])
                return
            kind = operands.light(x).kind or "nan"
            parents = self.parents(x)
        finally:
            self.busy = False
        self.sink(Sink(phase, layer, label, parents, kind))


def _prints() -> bool:
    """Tell whether a tensor is made into text, as for the message of an exception."""
    frame: FrameType | None = _caller()
    for _ in range(_DEEP):
        if frame is None:
            return False
        if frame.f_code.co_filename.endswith("torch/_tensor_str.py"):
            return True
        frame = frame.f_back
    return False


def _ends(x: Any) -> tuple[float, float] | None:
    if x._is_zerotensor():  # a derivative that is 0 everywhere: it has no memory
        return None
    values = readable(x)
    return None if values is None else read_ends(values)


def _same(x: torch.Tensor, y: Any) -> bool:
    return x is y or (
        isinstance(y, torch.Tensor)
        and x.shape == y.shape
        and x.layout == y.layout == torch.strided
        and x.data_ptr() == y.data_ptr()
    )


def _whole(x: torch.Tensor) -> bool:
    return x.numel() * x.element_size() >= x.untyped_storage().nbytes()


def _key(x: torch.Tensor) -> int:
    return int(local(x).untyped_storage()._cdata)


def _caller() -> FrameType | None:
    """Return the frame that called the operation, past the watcher's own frames."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.endswith(_WRAPPERS) or is_anynans(file)):
            return frame
        frame = frame.f_back
    return None
