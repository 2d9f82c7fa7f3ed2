"""A toy framework and its adapter, in NumPy: the core serves whatever keeps its contract.

A model is a list of named layers, a layer a list of named operations with a slope each; the
backward pass is written by hand. Nothing here is known to the core.
"""

import math
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

import anynan
from anynan._base.context import expectations, replay_context
from anynan._base.sources import describe
from anynan._base.summary import Summary
from anynan._diagnosis.evidence import BadParameter, ReplayError
from anynan._diagnosis.lineage import External, Operand, OpRecord, Replay, Sink
from anynan._readings.patterns import choose
from anynan._readings.readings import Reading
from anynan._readings.step import Step
from anynan._steps.adapter import BaseAdapter
from anynan._steps.tracked import Tracked, inside
from anynan.events import Phase, Source
from anynan.options import ADVANCED, Options
from anynan.tracker import Tracker, begin
from tests.flat import split

Array = NDArray[np.float64]
MAX = float(np.finfo(np.float64).max)

# name -> the value of (input, weight), and its slope of (input, value, weight).
OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "copy": (lambda x, _: x * 1.0, lambda x, _y, _w: np.ones_like(x)),
    "multiply": (lambda x, w: x * w, lambda x, _y, w: w * np.ones_like(x)),
    "exp": (lambda x, _: np.exp(x), lambda _x, y, _w: y),
    "log": (lambda x, _: np.log(x), lambda x, _y, _w: 1 / x),
    "sqrt": (lambda x, _: np.sqrt(x), lambda _x, y, _w: 0.5 / y),
    "subtract": (lambda x, _: x - x.max(), lambda x, _y, _w: np.ones_like(x)),
    "nan_to_num": (lambda x, _: np.nan_to_num(x), lambda x, _y, _w: 1.0 * np.isfinite(x)),
    "where": (lambda x, _: np.where(x < 0, -np.inf, x), lambda x, _y, _w: 1.0 * (x >= 0)),
    "masked_fill": (lambda x, _: np.where(x < 0, np.nan, x), lambda x, _y, _w: 1.0 * (x >= 0)),
    "full": (lambda x, _: np.where(x < 0, np.inf, x), lambda x, _y, _w: 1.0 * (x >= 0)),
    "mean": (lambda x, _: x.mean(), lambda x, _y, _w: np.full_like(x, 1 / x.size)),
}
EXTRA: dict[str, Callable[[Array], Any]] = {"mean": np.mean, "norm": np.linalg.norm}


# The framework.


@dataclass
class Layer:
    """Apply operations one after the other; ``multiply`` uses the weight."""

    path: str
    operations: tuple[str, ...]
    weight: Array | None = None
    grad: Array | None = None


@dataclass(frozen=True)
class Tape:
    """Remember one operation for the backward pass."""

    layer: Layer | None
    name: str
    x: Array
    y: Array
    first: bool = False
    last: bool = False


class Output:
    """What a model gives back: values, and the way back from them."""

    def __init__(self, model: "Model", value: Array, tape: list[Tape]) -> None:
        self.model, self.value, self.tape = model, value, tape

    def loss(self) -> "Output":
        y = _apply(None, "mean", self.value)
        return Output(self.model, y, [*self.tape, Tape(None, "mean", self.value, y)])

    def backward(self, scale: float = 1.0) -> None:
        grad: Array = np.full_like(self.value, scale)
        for done in reversed(self.tape):
            if done.last and done.layer is not None:
                self.model.tell("arrived", done.layer.path, grad)
            weight = None if done.layer is None else done.layer.weight
            if done.name == "multiply" and done.layer is not None:
                with np.errstate(all="ignore"):
                    new = np.asarray((grad * done.x).sum())
                done.layer.grad = new if done.layer.grad is None else done.layer.grad + new
                _record("multiply", done.layer, "backward", new, (("grad", grad),))
            with np.errstate(all="ignore"):
                before, slope = grad, OPERATIONS[done.name][1](done.x, done.y, weight)
                grad = grad * slope
            _record(done.name, done.layer, "backward", grad, (("grad", before), ("self", done.x)),
                    forward=done.y)  # fmt: skip


class Model:
    """Call layers in order, and tell those who watch."""

    def __init__(self, *layers: Layer) -> None:
        self.layers = layers
        self.watchers: list[Any] = []
        self.updates = 0

    def __call__(self, x: Any) -> Output:
        value = np.asarray(x, np.float64)
        self.tell("entered", "x", value)
        tape: list[Tape] = []
        for layer in self.layers:
            for i, name in enumerate(layer.operations):
                y = _apply(layer, name, value)
                tape.append(Tape(layer, name, value, y, i == 0, i == len(layer.operations) - 1))
                value = y
            self.tell("left", layer.path, value)
        return Output(self, value, tape)

    def tell(self, what: str, *details: Any) -> None:
        for watcher in list(self.watchers):
            getattr(watcher, what)(*details)

    def update(self, rate: float = 0.1) -> None:
        """Take one step of gradient descent, unless a watcher forbids it."""
        self.tell("before_update")
        if not any(watcher.forbids() for watcher in self.watchers):
            self.updates += 1
            for layer in self.layers:
                if layer.weight is not None and layer.grad is not None:
                    layer.weight = layer.weight - rate * layer.grad
            self.tell("after_update")
        for layer in self.layers:
            layer.grad = None


def _apply(layer: Layer | None, name: str, x: Array) -> Array:
    weight = None if layer is None else layer.weight
    with np.errstate(all="ignore"):
        y = np.asarray(OPERATIONS[name][0](x, weight))
    other = () if weight is None or name != "multiply" else (("other", weight),)
    _record(name, layer, "forward", y, (("self", x), *other))
    return y


# Its adapter.


class _StopError(Exception):
    """Leave a replay before the update."""


@dataclass
class _Recorder:
    outside: dict[int, tuple[External, str]]
    records: list[OpRecord] = field(default_factory=list)
    sinks: list[Sink] = field(default_factory=list)
    wrote: dict[int, int] = field(default_factory=dict)
    held: list[Array] = field(default_factory=list)

    def parents(self, x: Array) -> tuple[int, ...]:
        return (self.wrote[id(x)],) if id(x) in self.wrote else ()

    def sink(self, phase: Phase, layer: str | None, label: str, x: Array) -> None:
        kind = anynan.summarize(x).kind
        if kind is not None:
            self.sinks.append(Sink(phase, layer, label, self.parents(x), kind))


_recorder: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)


def _record(
    name: str, layer: Layer | None, phase: Phase, out: Array,
    operands: tuple[tuple[str, Array], ...], forward: Array | None = None,
) -> None:  # fmt: skip
    recorder = _recorder.get()
    if recorder is None or np.isfinite(out).all():
        return
    index = len(recorder.records)
    items = []
    for label, x in operands:
        summary = anynan.summarize(x)
        source, known = recorder.outside.get(id(x), (None, None))
        source = source if summary.bad else None
        items.append(Operand(label, summary, None, recorder.parents(x), source, known))
    where = phase if layer is not None or phase == "backward" else "loss"
    reason = (expectations() or {}).get(anynan.summarize(out).kind or "")
    recorder.records.append(
        OpRecord(
            index, name, f"toy.{name}", None if layer is None else layer.path, where,
            anynan.summarize(out), tuple(items), _line(), expected=reason,
            forward=None if forward is None else recorder.wrote.get(id(forward)),
        )
    )  # fmt: skip
    recorder.wrote[id(out)] = index
    recorder.held.append(out)


def _line() -> Source | None:
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return describe(frame, None)


class _Own(threading.local):
    """Hold what each thread has of its own."""

    def __init__(self) -> None:
        self.open = False
        self.replaying: _Recorder | None = None
        self.root: Any = None
        self.ended: list[Step] = []
        self.waiting: list[tuple[Step, float, float]] = []
        self.calls: dict[Any, int] = {}


class ToyAdapter(BaseAdapter):
    """Keep the contract of ``anynan._steps.adapter.BaseAdapter`` for the toy framework."""

    backend = "toy"

    def __init__(self, model: Model, tracker: Tracked) -> None:
        super().__init__(tracker)
        options = self.options
        self.model = model
        self.scale: float | None = None
        self.replays = 0
        self.refusal = ""  # why a replay cannot be done
        layers = {layer.path: layer for layer in model.layers}
        self._chosen = choose({"": model, **layers}, options.layers, options.exclude)
        self._local = _Own()

    # What the core asks for.

    def attach(self) -> None:
        self.model.watchers.append(self)
        self.attached()

    def detach(self) -> None:
        self.model.watchers = [item for item in self.model.watchers if item is not self]

    def watched(self) -> list[str]:
        return [path for path in self._chosen if path]

    def set_paused(self, paused: bool) -> None:
        if paused:
            self.read()
            self.detach()
        else:
            self.model.watchers.append(self)

    def read(self) -> None:
        self._fetch()
        ended, self._local.ended = self._local.ended, []
        for rows in ended:
            self.tracker.judge.settle(rows)
        if self._local.open:
            self.tracker.judge.review(self.tracker.judge.rows())

    def finish(self) -> None:
        rows = self.tracker.judge.close_step()
        if rows is not None:
            self._local.ended.append(rows)
        self._local.open = False
        self.read()

    def replay(self, reading: Reading) -> Replay:
        self.replays += 1
        if self.refusal:
            raise ReplayError(self.refusal)
        fn, args, kwargs = self._local.root
        outside: dict[int, tuple[External, str]] = {
            id(layer.weight): ("parameter", f"{layer.path}.weight")
            for layer in self.model.layers
            if layer.weight is not None
        }
        outside.update({id(x): ("input", "x") for x in args if isinstance(x, np.ndarray)})
        recorder = _Recorder(outside)
        grads = [layer.grad for layer in self.model.layers]
        token, self._local.replaying = _recorder.set(recorder), recorder
        try:
            with replay_context():
                result = fn(*args, **kwargs)
                if isinstance(result, Output):
                    recorder.sink("loss", None, "loss", result.value)
        except _StopError:
            pass
        finally:
            _recorder.reset(token)
            self._local.replaying = None
            for layer, grad in zip(self.model.layers, grads, strict=True):
                layer.grad = grad
        return Replay(recorder.records, recorder.sinks)

    def measure(self, value: Any) -> Summary:
        return anynan.summarize(value)

    def bad_parameters(self) -> list[BadParameter]:
        return [
            BadParameter(f"{layer.path}.weight", layer.path, anynan.summarize(layer.weight),
                         gradient=None if layer.grad is None else anynan.summarize(layer.grad))
            for layer in self.model.layers
            if layer.weight is not None and not np.isfinite(layer.weight).all()
        ]  # fmt: skip

    def loss_scale(self) -> float | None:
        return self.scale

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._local.open:
            return fn(*args, **kwargs)
        args = tuple(np.asarray(x, np.float64) if isinstance(x, list) else x for x in args)
        self._local.root = (fn, args, kwargs)
        self._local.open = True
        self.tracker.judge.rows()
        try:
            result = fn(*args, **kwargs)
            if isinstance(result, Output):
                self._write("loss", None, "loss", result.value)
        finally:
            self._local.open = False
            rows = self.tracker.judge.close_step()
            if rows is not None:
                self._local.ended.append(rows)
                every = self.options.read
                if not isinstance(every, int) or not (rows.number + 1) % every:
                    self.read()
        return result

    # What the framework tells.

    def entered(self, name: str, x: Array) -> None:
        if not self._local.replaying:
            self._local.calls = {}
            self._write("input", "", name, x)

    def left(self, path: str, y: Array) -> None:
        self._told("forward", path, "output", y)

    def arrived(self, path: str, grad: Array) -> None:
        if self._local.replaying or self.options.backward:
            self._told("backward", path, "grad", grad)

    def _told(self, phase: Phase, path: str, tensor: str, x: Array) -> None:
        if self._local.replaying:
            self._local.replaying.sink(phase, path, tensor, x)
        elif path in self._chosen:
            self._write(phase, path, tensor, x)

    def before_update(self) -> None:
        recorder = self._local.replaying
        norms = []
        for layer in self.model.layers:
            if layer.grad is None:
                continue
            name = f"{layer.path}.weight"
            if recorder is not None:
                recorder.sink("backward", layer.path, name, layer.grad)
            else:
                self._write("backward", layer.path, "grad of weight", layer.grad, parameter=name)
                norms.append(float(abs(layer.grad)))
        if recorder is not None:
            raise _StopError
        if not isinstance(self.options.read, int):
            self._fetch()
            self.tracker.judge.review(self.tracker.judge.rows())
        self.tracker.judge.guard(self.tracker.judge.rows(), math.hypot(*norms))

    def forbids(self) -> bool:
        rows = self.tracker.judge.rows()
        # A loss scaler skips the update of a step whose gradients overflowed.
        return rows.skip or rows.pending is not None

    def after_update(self) -> None:
        rows = self.tracker.judge.rows()
        if rows.failed is None:
            self.tracker.judge.updated(rows.number)

    # Inside.

    def _write(
        self, phase: Phase, layer: str | None, tensor: str, x: Array, *,
        parameter: str | None = None,
    ) -> None:  # fmt: skip
        rows = self.tracker.judge.rows()
        place = (layer, phase, tensor, "float64", MAX)
        site = self.tracker.judge.monitor.site(*place, parameter=parameter)
        calls, key = self._local.calls, (layer, phase, tensor)
        calls[key] = calls.get(key, -1) + 1
        order = rows.reserve(site, calls[key])
        expected = expectations()
        if expected is not None:
            rows.expect([order], expected)
        if self.options.extra:
            rows.add_stats(order, (float(EXTRA[stat](x)) for stat in self.options.extra))
        # "The device" holds the two ends until the read.
        self._local.waiting.append((rows, float(np.min(x)), float(np.max(x))))
        if self.options.read in ("auto", "immediate"):
            self._fetch()
            lo, hi = rows.lo[order], rows.hi[order]
            if not (-site.limit <= lo and hi <= site.limit):
                self.tracker.judge.flag(rows, order, x)

    def _fetch(self) -> None:
        waiting, self._local.waiting = self._local.waiting, []
        for rows, lo, hi in waiting:
            rows.fill((lo,), (hi,))


def track(target: Any, *, model: Model, **options: Any) -> Any:
    """Track a step function of the toy framework."""
    chosen = Options.checked(split(options), ADVANCED, "the toy framework")
    tracker = Tracked(target, chosen, getattr(target, "__name__", "step"))
    return begin(tracker, ToyAdapter(model, tracker))


def adapter_of(tracker: Tracker) -> ToyAdapter:
    """Give the adapter behind a tracker that is still watching."""
    return cast(ToyAdapter, inside(tracker).judge.adapter)
