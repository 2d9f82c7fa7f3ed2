"""A step runs again under a tape; a fix is tried in such a run."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from anynan._arrays.arguments import bound
from anynan._arrays.containers import leaves
from anynan._base.context import but
from anynan._base.patches import Patches
from anynan._calls.collector import collecting
from anynan._diagnosis.lineage import OpRecord, Replay
from anynan._diagnosis.recorder import Recorder
from anynan._diagnosis.records import Origin
from anynan._diagnosis.rules import repair as rules
from anynan._diagnosis.rules.repair import BaseFixRunner, Repair, around
from anynan._diagnosis.trials import Attempt
from anynan._readings.readings import Reading
from anynan._trace.op import Key
from anynan.mlx.bundle import call_of, host, take_call
from anynan.mlx.layers import Layers, mapped
from anynan.mlx.reading import EVALUATE, READER, is_float, squares
from anynan.mlx.state import Root
from anynan.mlx.tape import Operation, Tape, arrays


class _StopError(Exception):
    """Leave a second run before the update."""


class Run:
    """Run a step under a tape, with its layers and weights known.

    Args:
        layers: The layers of what runs.
        root: How it began.
        show: Sees each operation.
        repairs: Runs something else in an operation's place.

    Attributes:
        value: What it returned.
    """

    def __init__(
        self, layers: Layers, root: Root, show: Callable[[Any], Any], repairs: Any = None
    ) -> None:
        self.layers, self.root = layers, root
        self.tape = Tape(show, repairs)
        self.value: Any = None
        self._calls: dict[str, int] = defaultdict(int)
        self._inside: list[int] = []

    def run(self) -> None:
        """Run it."""
        with Patches() as patches, self.tape.running():
            for _, model in self.layers.roots():
                self._know(model)
                patches.change(type(model), "update", self._updating)
            with suppress(_StopError):
                self.root.context.copy().run(self.call)

    def call(self) -> None:
        """Call what it is a run of."""
        self.value = self.root.fn(*self.root.args, **self.root.kwargs)

    def layer(self, run: Callable[..., Any], module: Any, path: str, args: Any, kwargs: Any) -> Any:
        """Run a layer."""
        if id(module) in self._inside:
            return run(*args, **kwargs)
        tape, call = self.tape, self._calls[path]
        self._calls[path] += 1
        for weight in self.layers.of(module, path):
            tape.name_weight(weight.array, weight.name)
        self._inside.append(id(module))
        tape.layers.append((path, call))
        try:
            out = run(*args, **kwargs)
        finally:
            tape.layers.pop()
            self._inside.pop()
        return self.left(path, call, out)

    def left(self, path: str, call: int, out: Any) -> Any:
        """Look at what leaves a layer."""
        return out

    def update(self, run: Callable[..., Any], gradients: Any, parameters: Any) -> Any:
        """Run an optimizer's update."""
        with but(self.tape, phase="optimizer"):
            return run(gradients, parameters)

    def _know(self, model: Any) -> None:
        for part in model.modules():
            path = self.layers.path(part)
            for weight in () if path is None else self.layers.of(part, path):
                self.tape.name_weight(weight.array, weight.name)

    def _updating(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def update(model: Any, *args: Any, **kwargs: Any) -> Any:
            result = real(model, *args, **kwargs)
            if self.layers.path(model) is not None:
                self._know(model)
            return result

        return update


class SecondRun(Run):
    """Run a bad step once more, for its records.

    Args:
        session: Whose step it is.
        root: How it began.
        reading: What was bad.
        repairs: What to repair in it.
    """

    def __init__(
        self, session: Any, root: Root, reading: Reading | None, repairs: Sequence[Repair]
    ) -> None:
        self.runner = FixRunner(repairs) if repairs else None
        self._session, self._reading = session, reading
        notes: list[str] = []
        self._into = collecting.get()
        self._recorder = Recorder(READER, self._outside, notes.append, self._offered)
        super().__init__(session.layers, root, self._recorder.see, self.runner)
        self.tape.notes = notes
        self._losses: list[Any] = []
        self._norms: list[Any] = []

    def _offered(self, record: OpRecord, op: Operation) -> None:
        """Hand an operation to the bundle that wants it."""
        into = self._into
        if into is not None and into.wants(record):
            into.take(record, partial(call_of, op), host)

    def call(self) -> None:
        """Call it, or a model and the gradient that came into it, and look at what it gives."""
        session, seen = self._session, self._recorder
        if self._into is not None:
            with self.tape.quiet():
                take_call(self._into, self.root, session.input_names)
        if session.model is not None and self.root.cotangents:
            self._call_back(session.model)
            return
        super().call()
        with self.tape.quiet():
            found = () if session.model is not None else session.results(self.value)
            for name, phase, label, x in found:
                if name:
                    self._land(name, self.layers.name_of(None, name)[1], x)
                else:
                    if phase == "loss":
                        self._losses.append(x)
                    seen.arrive(phase, None, label, x, self._key(x))
            for weight in session.moved(self.root) if self._updates() else ():
                x = weight.array
                seen.arrive("optimizer", weight.layer, weight.label, x, self._key(x))

    def _updates(self) -> bool:
        """Tell whether what was bad is what an update made, and not what it was given."""
        return self._reading is not None and self._reading.phase in ("parameter", "optimizer")

    def _call_back(self, model: Any) -> None:
        root = self.root
        names, values = zip(*tree_flatten(model.trainable_parameters()), strict=True)

        def call(*weights: Any) -> list[Any]:
            model.update(tree_unflatten(list(zip(names, weights, strict=True))))
            found: dict[str, Any] = {}
            out = root.fn(*root.args, **root.kwargs)
            mapped(out, "output", lambda x, label: found.setdefault(label, x))
            return [found[label] for label in root.cotangents]

        _, slopes = mx.vjp(call, list(values), list(root.cotangents.values()))
        with self.tape.quiet():
            for name, x in zip(names, slopes, strict=True):
                self._land(*self.layers.name_of(model, name), x)

    def _key(self, x: Any) -> Key:
        return self.tape.key(x) if isinstance(x, mx.array) else ("array", id(x))

    def left(self, path: str, call: int, out: Any) -> Any:
        """Look at what leaves a layer, and at the gradient that comes back to it."""
        if path not in self.layers.chosen:
            return out
        with self.tape.quiet():
            return mapped(out, "output", partial(self._leave, path, call))

    def _leave(self, path: str, call: int, x: Any, label: str) -> Any:
        key, seen, quiet = self._key(x), self._recorder, self.tape.quiet
        seen.arrive("forward", path, label, x, key, call)

        def arrived(cotangent: Any) -> None:
            with quiet():
                tensor = label.replace("output", "grad", 1)
                seen.arrive("backward", path, tensor, cotangent, key, call)

        new = watched(x, arrived)
        self.tape.same(new, x)
        return new

    def _land(self, name: str, layer: str, x: Any) -> None:
        self._norms.append(squares(x))
        self._recorder.land(name, layer, x)

    def update(self, run: Callable[..., Any], gradients: Any, parameters: Any) -> Any:
        """Look at the gradients that an optimizer is given, and end before the update."""
        with self.tape.quiet():
            for (name, layer), x in self._session.gradients(gradients, parameters):
                self._land(name, layer, x)
        if self.runner is None and not self._updates():
            raise _StopError
        return super().update(run, gradients, parameters)

    def _outside(self, key: Key, x: Any) -> Origin:
        """Say where bad values came from that no operation made."""
        if key[0] == "weight":
            trained = {w.name: w.trained for w in self.layers.weights()}
            return Origin((), "parameter" if trained.get(key[1], True) else "buffer", key[1])
        root = self.root
        for name, value in bound(self._session.input_names, root.args, root.kwargs):
            for label, y in leaves(value, name):
                if is_float(y) and _equal(x, y):
                    return Origin((), "input", label)
        return Origin((), "constant")

    # What came of it.

    def replay(self) -> Replay:
        """Give what was seen."""
        return self._recorder.replay(self.tape.notes, ends=self._session.traced)

    def attempt(self) -> Attempt | None:
        """Give what was seen of a trial, None if the repairs did not take their place."""
        runner = self.runner
        if runner is None or not runner.whole or self.tape.notes:
            return None
        EVALUATE(self._norms)
        norm = sum(x.item() for x in self._norms) ** 0.5 if self._norms else None
        # Of several numbers it is not known which is the loss: the others may count what is right.
        loss = self._losses[0].item() if len(self._losses) == 1 else None
        return Attempt(self.replay(), "step", runner.bad, loss, norm)


class FixRunner(BaseFixRunner):
    """Run repaired operations in the place of those that made bad values.

    Attributes:
        bad: Whether the gradient of one was bad where none came in.
    """

    def __init__(self, repairs: Sequence[Repair]) -> None:
        super().__init__(repairs)
        self.bad = False
        self._words = rules.Namespace(mx)

    def around(self, op: Operation, own: Callable[..., Any]) -> Callable[..., Any]:
        """Give what to run for an operation."""
        found = self.of(op.name, op.source, op.layer) if op.name in self.names else []
        if not found:
            return own
        held = list(op.given)

        def repaired(given: dict[int, Any]) -> Any:
            operands = {label: given.get(id(x), x) for label, x in held}

            def inner(*new: Any) -> Any:
                pairs = zip(held, new, strict=False)
                return own({**given, **{id(x): y for (_, x), y in pairs}})

            def expression(item: Repair, inside: Any, *new: Any) -> Any:
                known = {**operands, **dict(zip(operands, new, strict=False))}
                return rules.run(item, self._words, inside, known, op.params)

            def filled(item: Repair, inside: Any, *new: Any) -> Any:
                known = [*new, *list(operands.values())[len(new) :]]
                return self._filled(item, inside, known)

            plain = own(given)
            new = self.made(found, around(found, inner, expression, filled))
            if new is None:
                return plain
            return _like(new, plain) if isinstance(plain, mx.array) else new

        return repaired

    def _filled(self, item: Repair, inside: Callable[..., Any], given: list[Any]) -> Any:
        """Put 0 in the place of what an operation makes bad, and of what its gradient does."""
        at = [i for i, x in enumerate(given) if is_float(x)]

        def own(*new: Any) -> Any:
            known = dict(zip(at, new, strict=True))
            return inside(*(known.get(i, x) for i, x in enumerate(given)))

        def made(*new: Any) -> Any:
            out = own(*new)
            return out if item.phase == "backward" else rules.neutral(self._words, out)

        def back(primals: Any, cotangents: Any, _: Any) -> Any:
            incoming = arrays(cotangents)
            _, slopes = mx.vjp(lambda *x: arrays(own(*x)), arrays(primals), incoming)
            if all(map(READER.is_finite, incoming)):  # else they are another fault's
                slopes = [rules.neutral(self._words, x) for x in slopes]
            return slopes[0] if len(slopes) == 1 else tuple(slopes)

        function = mx.custom_function(made)
        function.vjp(back)
        return function(*(given[i] for i in at))

    def back(self, op: Operation, incoming: list[Any], slopes: list[Any]) -> None:
        """Look at the gradient of an operation, if it was repaired."""
        if op.name in self.names and self.of(op.name, op.source, op.layer):
            finite = READER.is_finite
            self.bad = self.bad or (all(map(finite, incoming)) and not all(map(finite, slopes)))


def watched(x: Any, arrived: Callable[[Any], None]) -> Any:
    """Give an array that equals another, and tells of the gradient that comes to it."""

    def back(_: Any, cotangent: Any, __: Any) -> Any:
        arrived(cotangent)
        return cotangent

    same = mx.custom_function(_same)
    same.vjp(back)
    return same(x)


def _same(x: Any) -> Any:
    return x


def _like(new: Any, was: Any) -> Any:
    new = mx.array(new) if not isinstance(new, mx.array) else new
    return (new if new.shape == was.shape else mx.broadcast_to(new, was.shape)).astype(was.dtype)


def _equal(a: Any, b: Any) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(mx.array_equal(a, b, equal_nan=True).item())
