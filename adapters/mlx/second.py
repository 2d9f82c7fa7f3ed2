"""A step runs again: its bad operations as records, and where their values arrived."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from anynan._arrays.arguments import bound
from anynan._arrays.containers import leaves
from anynan._base.patches import Patches
from anynan._base.summary import Summary
from anynan._diagnosis.agreement import CheckedPoint
from anynan._diagnosis.lineage import OpRecord, Replay, Sink
from anynan._diagnosis.records import SOFTMAX, Builder, Given, Origin, add_masked_rows, makers
from anynan._diagnosis.rules import repair as rules
from anynan._diagnosis.rules.repair import BaseFixRunner, Repair, around
from anynan._diagnosis.trials import Attempt
from anynan._readings.readings import Reading
from anynan.arrays.records import light
from anynan.events import Phase
from anynan.mlx.layers import mapped
from anynan.mlx.reading import (
    EVALUATE,
    ends,
    finite,
    is_float,
    kind,
    measure,
    on_host,
    span,
    squares,
)
from anynan.mlx.state import Root
from anynan.mlx.tape import Key, Operation, Tape, arrays


class _StopError(Exception):
    """Leave a second run before the update."""


class SecondRun:
    """Run a step once more under a tape.

    Args:
        session: Whose step it is.
        root: How it began.
        reading: What was bad.
        repairs: What to repair in it.
    """

    def __init__(
        self, session: Any, root: Root, reading: Reading | None = None,
        repairs: Sequence[Repair] = (),
    ) -> None:  # fmt: skip
        self._session, self._root, self._reading = session, root, reading
        self.runner = FixRunner(repairs) if repairs else None
        self.tape = Tape(self.see, self.runner)
        self.records: list[OpRecord] = []
        self.sinks: list[Sink] = []
        self.passed: list[CheckedPoint] = []
        self._wrote: dict[Key, int] = {}
        # Which records gave a value's bad gradient, and which operations gave any of it.
        self._flow: dict[Key, list[int]] = defaultdict(list)
        self._feeds: dict[Key, dict[str, None]] = defaultdict(dict)
        self._calls: dict[str, int] = defaultdict(int)
        self._last: Operation | None = None
        self._loss: Any = None
        self._norms: list[Any] = []

    def run(self, *, of_model: bool) -> None:
        """Run it."""
        root, layers = self._root, self._session.layers
        with Patches() as patches, self.tape.running():
            for _, model in layers.roots():
                self._know(model)
                owner = type(model)
                if not patches.holds(owner, "update"):
                    patches.change(owner, "update", self._updating)
            with suppress(_StopError):
                root.context.copy().run(self._call, of_model=of_model)

    def _call(self, *, of_model: bool) -> None:
        root = self._root
        if of_model and root.cotangents:
            self._back(root)
            return
        result = root.fn(*root.args, **root.kwargs)
        if of_model:
            return
        with self.tape.quiet():
            for name, label, x in self._session.results(result):
                if name:
                    self._gradient(name, self._session.layers.name_of(None, name)[1], x)
                elif is_float(x) and x.size == 1:
                    self._loss = x
                    self._sink("loss", None, "loss" if label == "result" else label, x)
                else:
                    self._sink("forward", None, label, x)

    def _back(self, root: Root) -> None:
        """Run a model's own call, and the gradient that came into it."""
        model = self._session.layers.roots()[0][1]
        names, values = zip(*tree_flatten(model.trainable_parameters()), strict=True)
        outputs = list(root.cotangents)

        def call(*weights: Any) -> list[Any]:
            model.update(tree_unflatten(list(zip(names, weights, strict=True))))
            found: dict[str, Any] = {}
            out = root.fn(*root.args, **root.kwargs)
            mapped(out, "output", lambda x, label: found.setdefault(label, x))
            return [found[label] for label in outputs]

        _, slopes = mx.vjp(call, list(values), [root.cotangents[label] for label in outputs])
        with self.tape.quiet():
            for name, x in zip(names, slopes, strict=True):
                self._gradient(name, self._session.layers.name_of(model, name)[1], x)

    def _know(self, model: Any) -> None:
        for part in model.modules():
            path = self._session.layers.path(part)
            for weight in () if path is None else self._session.layers.of(part, path):
                self.tape.name_weight(weight.array, weight.name)

    def _updating(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def update(model: Any, *args: Any, **kwargs: Any) -> Any:
            result = real(model, *args, **kwargs)
            if self._session.layers.path(model) is not None:
                self._know(model)
            return result

        return update

    # What runs.

    def layer(self, run: Callable[..., Any], module: Any, path: str, args: Any, kwargs: Any) -> Any:
        """Run a layer, and look at what leaves it."""
        tape, layers = self.tape, self._session.layers
        call = self._calls[path]
        self._calls[path] += 1
        for weight in layers.of(module, path):
            tape.name_weight(weight.array, weight.name)
        local = self._session.local
        local.inside.append(id(module))
        tape.layers.append((path, call))
        try:
            out = run(*args, **kwargs)
        finally:
            tape.layers.pop()
            local.inside.pop()
        if path not in layers.chosen:
            return out
        with tape.quiet():
            return mapped(out, "output", partial(self._leave, path, call))

    def _leave(self, path: str, call: int, x: Any, label: str) -> Any:
        self._sink("forward", path, label, x, call)
        seen = mx.custom_function(_same)
        key = self.tape.key(x)

        def arrived(_: Any, cotangent: Any, __: Any) -> Any:
            with self.tape.quiet():
                tensor = label.replace("output", "grad", 1)
                self._sink("backward", path, tensor, cotangent, call, tuple(self._flow[key]))
            return cotangent

        seen.vjp(arrived)
        new = seen(x)
        self.tape.same(new, x)
        return new

    def _sink(
        self, phase: Phase, layer: str | None, label: str, x: Any, call: int = 0,
        parents: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        if not is_float(x) or not x.size:
            return
        try:
            low, high = span(*ends(x))
        except RuntimeError:  # inside of mx.vmap
            return
        self.passed.append(CheckedPoint(layer, phase, label, call, low, high))
        bad = kind(x)
        if bad is not None:
            found = self._parents(x) if parents is None else parents
            self.sinks.append(Sink(phase, layer, label, found, bad))

    def _gradient(self, name: str, layer: str, x: Any) -> None:
        bad = kind(x)
        self._norms.append(squares(x))
        if bad is not None:
            parents = tuple(self._flow["weight", name])
            self.sinks.append(Sink("backward", layer, name, parents, bad))

    def update(self, run: Callable[..., Any], gradients: Any, parameters: Any) -> Any:
        """Look at the gradients that an optimizer is given, and at what it makes of them."""
        session, tape = self._session, self.tape
        with tape.quiet():
            for (name, layer), x in session.gradients(gradients, parameters):
                self._gradient(name, layer, x)
        wanted = self._reading is not None and self._reading.phase == "parameter"
        if self.runner is None and not wanted:
            raise _StopError
        before, tape.phase = tape.phase, "optimizer"
        try:
            return run(gradients, parameters)
        finally:
            tape.phase = before

    # Records.

    def see(self, op: Operation) -> None:
        """Make a record of an operation with a bad result."""
        if op.of is None:
            self._last = op
        elif self._last is not None:
            self._end_forward(op.of)
        bad = [not finite(x) for x in op.outputs]
        if op.of is not None:
            for key in op.keys:
                self._feeds[key][op.name] = None
        if not any(bad):
            return
        index = len(self.records)
        record = OpRecord(
            index, op.name, op.raw, op.layer, op.phase, None, source=op.source,
            params=dict(op.params), call=op.call,
        )  # fmt: skip
        if op.of is not None:
            record.params |= makers(op.makers)
            record.feeds = tuple(dict.fromkeys(n for key in op.took for n in self._feeds[key]))
            of = (self._wrote.get(key) for key in op.took)
            record.forward = next((i for i in of if i is not None), None)
        self.records.append(record)
        self._describe(op, record, op.outputs[bad.index(True)])
        for key, is_bad in zip(op.took if op.of is None else op.keys, bad, strict=False):
            if is_bad and op.of is None:
                self._wrote[key] = index
            elif is_bad:
                self._flow[key].append(index)

    def _end_forward(self, op: Operation) -> None:
        """Look at what the gradient begins with: the loss."""
        self._last = None
        index = next((self._wrote[key] for key in op.took if key in self._wrote), None)
        output = None if index is None else self.records[index].output
        if output is not None and output.kind is not None and op.layer is None:
            self.sinks.append(Sink("loss", None, "loss", (index or 0,), output.kind))

    def _describe(self, op: Operation, record: OpRecord, result: Any) -> None:
        given = [self._given(op, label, x) for label, x in op.given]
        builder = Builder(measure, self._origin, self.tape.notes.append)
        held = Given("result", result)
        look = builder.fresh(record, held, given)
        if not look:
            held.known = light(result)

        def wide(output: Summary) -> Any:
            narrow = output.dtype in ("float16", "bfloat16")
            found = None if output.nan else op.rerun(dtype="float32" if narrow else "float64")
            return None if found is None else on_host(found[0])

        forward = wide if op.of is None and op.name != "astype" else None
        builder.describe(record, held, given, look=look, expected=op.expected, wide=forward)
        if look and op.name in SOFTMAX:
            axes = op.params.get("dim", -1)
            scores = next((on_host(x) for label, x in op.inputs if label == "self"), None)
            add_masked_rows(record, scores, tuple(axes) if isinstance(axes, list) else axes)

    def _given(self, op: Operation, label: str, x: Any) -> Given:
        if not isinstance(x, mx.array):
            return Given(label, number=x)
        grad = op.of is not None and label.startswith("grad")
        key = ("grad", int(label[4:] or 0)) if grad else self._key(op, label, x)
        if grad:
            key = ("flow", op.took[key[1]])
        return Given(label, x, light(x), key)

    def _key(self, op: Operation, label: str, x: Any) -> Key:
        if op.of is None:
            return self.tape.key(x)
        if label == "result":
            return op.took[0]
        # The arrays of a gradient are others than those of its forward operation.
        return op.of.named.get(label, ("array", id(x)))

    def _parents(self, x: Any) -> tuple[int, ...]:
        found = self._wrote.get(self.tape.key(x))
        return () if found is None else (found,)

    def _origin(self, given: Given, _: OpRecord) -> Origin:
        """Say where the bad values of an operand came from."""
        what, which = given.key
        if what == "flow":
            return Origin(tuple(self._flow[which]))
        if given.key in self._wrote:
            return Origin((self._wrote[given.key],))
        if what == "weight":
            trained = {w.name: w.trained for w in self._session.layers.weights()}
            return Origin((), "parameter" if trained.get(which, True) else "buffer", which)
        if what == "array":
            for label, x in self._inputs():
                if is_float(x) and _equal(x, given.array):
                    return Origin((), "input", label)
        return Origin((), "constant")

    def _inputs(self) -> list[tuple[str, Any]]:
        root = self._root
        given = bound(self._session.input_names, root.args, root.kwargs)
        return [pair for name, value in given for pair in leaves(value, name)]

    # What came of it.

    def replay(self) -> Replay:
        """Give what was seen."""
        notes = list(dict.fromkeys(self.tape.notes))
        passed = [each for each in self.passed if each.layer is None or not self._session.traced]
        return Replay(self.records, self.sinks, notes, passed=passed)

    def attempt(self) -> Attempt | None:
        """Give what was seen of a trial, None if the repairs did not take their place."""
        runner = self.runner
        if runner is None or not runner.whole or self.tape.notes:
            return None
        EVALUATE(self._norms)
        norm = sum(x.item() for x in self._norms) ** 0.5 if self._norms else None
        loss = None if self._loss is None else float(self._loss.item())
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

    def around(
        self, op: Operation, own: Callable[..., Any]
    ) -> tuple[Callable[..., Any], list[Repair]]:
        """Give what to run for an operation, and the repairs in that."""
        found = self.of(op.name, op.source, op.layer) if op.name in self.names else []
        if not found:
            return own, []

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

        return repaired, found

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
            if all(map(finite, incoming)):  # else they are another fault's
                slopes = [rules.neutral(self._words, x) for x in slopes]
            return slopes[0] if len(slopes) == 1 else tuple(slopes)

        function = mx.custom_function(made)
        function.vjp(back)
        return function(*(given[i] for i in at))

    def back(self, incoming: list[Any], slopes: list[Any]) -> None:
        """Look at the gradient of a repaired operation."""
        self.bad = self.bad or (all(map(finite, incoming)) and not all(map(finite, slopes)))


def _like(new: Any, was: Any) -> Any:
    new = mx.array(new) if not isinstance(new, mx.array) else new
    if new.shape != was.shape:
        new = mx.broadcast_to(new, was.shape)
    return new.astype(was.dtype)


def _equal(a: Any, b: Any) -> bool:
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and bool(mx.array_equal(a, b, equal_nan=True).item())
    )


def _same(x: Any) -> Any:
    return x
