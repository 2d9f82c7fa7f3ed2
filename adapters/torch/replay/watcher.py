"""Watch every operation of one run, below autograd, and record those with bad results.

The watcher sits at the dispatcher, so that it sees inside composite functions, custom
``autograd.Function``s, in-place and ``out=`` variants, and the backward pass. A backward node
is tied to the forward operation that made it by autograd's sequence number.
"""

import threading
from types import CodeType, FrameType
from typing import Any, Self, cast

import torch

from anynan._base import context
from anynan._base.sources import user_source
from anynan._diagnosis.lineage import External
from anynan._trace.op import Observer
from anynan.events import Source
from anynan.torch.private import DispatchMode, is_composite
from anynan.torch.private import node as _node
from anynan.torch.private import sequence as _sequence
from anynan.torch.private import task as _task
from anynan.torch.read.probes import READER
from anynan.torch.replay.fix_runner import FixRunner
from anynan.torch.replay.names import MOVING, node_name
from anynan.torch.replay.operands import Made, Operation, shape_of
from anynan.torch.replay.recorder import StorageRecorder, caller, storage_of
from anynan.torch.replay.saving import Catcher

# So many function transforms may be inside of each other.
_NESTED = 8


class Watcher(DispatchMode):
    """Show the operations of a run while entered: to its recorder, or to an observer.

    Attributes:
        recorder: Makes the records and sinks.
        layers: Stack of (layer path, call) that ``replay`` keeps.
    """

    def __init__(self, outside: dict[int, tuple[External, str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = StorageRecorder(outside)
        self.layers: list[tuple[str, int]] = []
        self.within: CodeType | None = None
        self.called: Source | None = None
        # Of the backward node that runs: what came in, and what its operations took apart from
        # that.
        self.incoming: tuple[Any, ...] = ()
        self.taken: list[torch.Tensor] = []
        self.consumers: dict[int, list[str]] = {}
        self._made: dict[int, Made] = {}
        self._first = _sequence()
        self._inside: int | None = None
        self._own: list[torch.Tensor] = []
        self.busy = False
        # Set by a replay: what it overwrites of the user's own tensors, to be put back.
        self.originals: dict[int, tuple[torch.Tensor, Any, Any]] | None = None
        # A replay may itself run inside a backward pass, in a gradient hook.
        self._base_task = _task()
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
        if torch.is_inference_mode_enabled() and is_composite(func):
            first = self._first
            with self:  # elsewhere autograd has taken it apart by now
                self._first = first
                return func.decompose(*args, **kwargs)
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
        op = Operation(func, shape, args, kwargs, seq, backward=backward)
        # Never into user code: nothing is known of an operation that cannot be looked at.
        try:
            op.overwritten = op.writes()
            if self.originals is not None:
                for x in op.overwritten:
                    self._preserve(x, self.originals)
            op.keep()
        except Exception as error:  # noqa: BLE001
            self.recorder.tell(f"{func}: {error}")
            return func(*args, **kwargs)
        try:
            op.out = func(*args, **kwargs)
        except Exception:
            self.recorder.take(op, self.place()[0])
            raise
        if backward:
            frame = op.frame = caller()
            op.native = frame is None or frame.f_code.co_name == "_engine_run_backward"
        if self.runner is not None and shape.name in self.runner.names and not op.native:
            self._mend(op, self.runner)
        if self.observer is not None:
            if func.namespace != "profiler":
                self._show(op, self.observer)
            return op.out
        try:
            self._look(op)
        except Exception as error:  # noqa: BLE001
            self.recorder.tell(f"{func}: {error}")
        return op.out

    def _mend(self, op: Operation, runner: FixRunner) -> None:
        """Put a repaired operation in the place of what the user's code ran."""
        found = runner.of(op.shape.name, self.line(op.frame), self.place()[0])
        if found:
            op.out = runner.mend(found, op, op.seq if self._makes_node(op.seq) else None)

    def _preserve(self, x: torch.Tensor, originals: dict[int, Any]) -> None:
        """Copy one of the user's own tensors before it is overwritten."""
        key = storage_of(x)
        known = self.recorder.outside.get(key, ("", ""))[0]
        if key not in originals and known in ("parameter", "input"):
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
        self.incoming, self.taken, self._own = (), [], []

    def mine(self) -> bool:
        """Tell whether what runs now belongs to this run, and not to another thread's."""
        return threading.get_ident() == self._thread or _task() in self.tasks

    def in_backward(self) -> bool:
        """Tell whether the replay's own backward pass is running."""
        return _task() != self._base_task

    def _node_of(self, op: Operation) -> Made | None:
        """Remember an operation for the node it made."""
        if self._makes_node(op.seq) and (not op.backward or torch.is_grad_enabled()):
            return self._remember(op.shape.name, op.seq, op.native, op.frame)
        return None

    def _show(self, op: Operation, observer: Observer) -> None:
        """Show an operation to the observer, and put in what it gives in the place of results."""
        made = self._node_of(op)
        self._tell(op, self._shown)
        self._shown += 1
        if made is not None:
            made.number = op.number
            if not op.native:
                op.source = made.source
        instead = observer(op)
        op.frame = None  # it holds what the program has there
        if instead is not None:
            op.out = op.replaced(instead)

    def _look(self, op: Operation) -> None:
        """Show an operation to the recorder, if a result of it is bad."""
        made = self._node_of(op)
        if made is not None and self.catcher is not None:
            self.catcher.made(made, op)
        if op.native:
            self._follow(op)
        bad = self.recorder.bad(op, self.place()[0])
        if not bad:
            return
        self._tell(op, len(self.recorder.records))
        self.recorder.see(op, bad)
        if made is not None and made.number is None:
            made.number = op.number

    def _tell(self, op: Operation, number: int) -> None:
        """Find out what an operation is called, and where it belongs."""
        op.number, op.name, op.raw = number, op.shape.name, str(op.func)
        op.kernel, op.written, op.line = op.name, bool(op.overwritten), self.line
        op.frame = op.frame or caller()
        node = op.node = _node() if op.backward else None
        made = op.made = None if node is None else self.made_by(node)
        op.layer, op.call = self.place()
        if op.native and node is not None:
            op.of_node = True
            op.name = node_name(node.name()) if made is None else made.name
            op.raw = f"{node.name()} ({op.func})"
            op.incoming, op.taken = self.incoming, self.taken
            op.feeds = self.consumers.get(node._sequence_nr(), ())
        if made is not None:
            op.layer, op.call, op.forward = made.layer, made.call, made.number
        op.expected = context.expectations() if made is None else made.expected
        op.phase = "backward" if op.backward else "forward"
        op.again = op.backward and torch.is_grad_enabled() and bool(self.layers)
        if self.updating:
            op.phase = "optimizer"
        elif not op.backward and op.layer is None:
            op.phase = "loss"

    def _follow(self, op: Operation) -> None:
        """Collect what a backward node works on, apart from its gradients and its own results.

        Under checkpointing a saved tensor can be unpacked only once, which the node has done.
        """
        node = _node()
        number = None if node is None else node._sequence_nr()
        if number != self._inside:
            self._inside, self.taken, self._own = number, [], []
        known = [*self.taken, *self._own, *self.incoming]
        for x in op.tensors():
            if not any(_same(x, y) for y in known):
                self.taken.append(x)
        self._own.extend(op.outputs)

    def _makes_node(self, seq: int) -> bool:
        """Tell whether the running operation took this number: the last one given out.

        An operation without a gradient takes none, and finds its predecessor's.
        """
        return seq >= self._first and seq not in self._made

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
        frame = frame or caller()
        return user_source(frame, framework="torch", stop=self.within, fallback=self.called)

    def place(self) -> tuple[str | None, int]:
        """Give the layer path and call that run now."""
        return self.layers[-1] if self.layers else (None, 0)

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
        if self.busy or self.observer is not None:
            return
        self.busy = True
        try:
            if self.runner is not None and phase == "loss" and READER.is_finite(x):
                ends = READER.span(x)
                self.runner.losses += [] if ends is None else [ends[0]]
            self.recorder.arrive(phase, layer, label, x, x, call)
        finally:
            self.busy = False


def _same(x: torch.Tensor, y: Any) -> bool:
    return x is y or (
        isinstance(y, torch.Tensor)
        and x.shape == y.shape
        and x.layout == y.layout == torch.strided
        and x.data_ptr() == y.data_ptr()
    )
