"""Run a model, a step or a function once, show each operation, and leave no trace.

Everything runs outside of graphs, also what ``tf.function`` made: there TensorFlow tells of each
operation as it runs.
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import op_callbacks, op_def_registry
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, ResourceVariable

from anynan._arrays.containers import leaves
from anynan._base.context import but, replay_context
from anynan._base.patches import Patches, owner_of
from anynan._diagnosis.messages import NOT_PUT_BACK
from anynan._steps.tracked import untracked
from anynan._trace.op import Observed, Observer, Op, RerunError
from anynan._trace.target import Target
from anynan.errors import reason
from anynan.events import Phase, Source
from anynan.options import Options
from anynan.tensorflow.graphs import lines, names
from anynan.tensorflow.read.layers import Layers
from anynan.tensorflow.read.probes import is_float, on_host
from anynan.tensorflow.replay.reached import Reached
from anynan.tensorflow.replay.taped import Line, Note, frames
from anynan.tensorflow.session.targets import is_keras, layers_in, parts_of

_WRITING = frozenset({
    "assign", "assign_add", "assign_sub", "scatter_add", "scatter_div", "scatter_max",
    "scatter_min", "scatter_mul", "scatter_nd_update", "scatter_sub", "scatter_update",
})  # fmt: skip
_QUIET = frozenset({"Const", "Placeholder", "NoOp", *names.PASSING})


def takes(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a target is TensorFlow's: a model, or what uses one or takes its tensors."""
    fn = untracked(target)
    if is_keras(fn):
        return _on_tensorflow()
    if isinstance(fn, tf.Module):
        return True
    given = leaves((args, dict(kwargs)), "", objects=True)
    tensors = any(isinstance(x, tf.Tensor | tf.Variable) for _, x in given)
    return callable(fn) and (tensors or bool(layers_in(fn) and _on_tensorflow()))


def _on_tensorflow() -> bool:
    keras = sys.modules.get("keras")
    return keras is None or keras.backend.backend() == "tensorflow"


class ShownOp(Op):
    """Show one operation.

    Args:
        run: What sees it.
        note: What ran.
        number: Its place in the run.
    """

    def __init__(self, run: "Run", note: Note, number: int) -> None:
        self._note, self.number = note, number
        self.raw, self.kernel = note.kind, names.operation(note.kind)
        self.name, self.forward = self.kernel, None
        self.layer, self.call = run.layers[-1] if run.layers else (None, 0)
        self.phase: Phase = run.phase
        if self.phase == "backward":
            self._belongs(run)
        elif self.phase == "forward" and self.layer is None:
            self.phase = "loss"

    def _belongs(self, run: "Run") -> None:
        function = lines.gradient_function(self._lines)
        kind = None if function is None else names.gradient_of(function)
        for op in reversed(run.seen.get(kind or "", ())):
            taken = {id(x) for x in (*op._note.inputs, *op._note.outputs)}
            if not taken.isdisjoint(map(id, self._note.inputs)):
                self.name, self.forward = op.name, op.number
                self.layer, self.call, self._lines = op.layer, op.call, op._lines
                return
        if kind is not None:
            self.name = next((op.name for op in run.seen.get(kind, ())), self.name)

    @cached_property
    def _lines(self) -> list[Line]:
        return self._note.trace()

    @cached_property
    def source(self) -> Source | None:
        """Give the user's line: of a gradient, that of its forward operation."""
        return lines.source(self._lines)

    @property
    def inputs(self) -> Sequence[tuple[str, Any]]:
        """Give the float tensors it works on."""
        floats = [x for x in self._note.inputs if is_float(x)]
        return [(names.operand(self._note.kind, i), x) for i, x in enumerate(floats)]

    @property
    def outputs(self) -> Sequence[Any]:
        """Give what it made."""
        return self._note.outputs[: names.RESULTS.get(self._note.kind)]

    @property
    def params(self) -> Mapping[str, Any]:
        """Give its plain arguments."""
        given = self._note.attributes
        pairs = zip(given[::2], given[1::2], strict=True)
        return {str(name): x for name, x in pairs if isinstance(x, int | float)}

    def rerun(
        self, inputs: Mapping[str, Any] | None = None, dtype: str | None = None
    ) -> Sequence[Any]:
        """Run it once more.

        Raises:
            RerunError: If it draws random numbers, or TensorFlow cannot run it so.
        """
        note, known = self._note, op_def_registry.get(self._note.kind)
        if known is None or known.is_stateful or note.kind in names.RANDOM:
            msg = f"{note.kind} draws random numbers, or has a state"
            raise RerunError(msg)
        new = {id(x): (inputs or {}).get(name, x) for name, x in self.inputs}

        def given(x: Any) -> Any:
            x = new.get(id(x), x)
            return tf.cast(x, dtype) if dtype and is_float(x) else x

        try:
            call = note.named([given(x) for x in note.inputs])
            if dtype and note.kind == "Cast":
                call["DstT"] = tf.as_dtype(dtype)
            function = getattr(tf.raw_ops, note.kind)
            if "reduction_indices" in call:
                call["axis"] = call.pop("reduction_indices")
            made = function(**call)
        except Exception as error:
            msg = f"{note.kind} cannot be run again: {reason(error)}"
            raise RerunError(msg) from error
        return list(made) if isinstance(made, tuple | list) else [made]


class Run:
    """See one run.

    Args:
        observer: Sees each operation.

    Attributes:
        layers: The layers that run, with the call of each, the innermost last.
        phase: The phase that runs.
        seen: The forward operations, by the name that their gradient's function has.
        failed: What the observer raised.
        drew: Whether an operation drew random numbers.
    """

    def __init__(self, observer: Observer) -> None:
        self.layers: list[tuple[str, int]] = []
        self.phase: Phase = "forward"
        self.seen: dict[str, list[ShownOp]] = {}
        self.failed: BaseException | None = None
        self.drew = False
        self._observer, self._count, self._busy = observer, 0, False
        self._calls: dict[str, int] = {}

    def note(
        self, kind: Any, inputs: Any, attributes: Any, outputs: Any, op_name: Any = None,
        graph: Any = None,
    ) -> None:  # fmt: skip
        """Show an operation that has run, as TensorFlow tells of it."""
        kind = kind.decode() if isinstance(kind, bytes) else kind
        if graph is not None or self._busy or self.failed is not None or kind in _QUIET:
            return
        self.drew = self.drew or kind in names.RANDOM
        self._busy = True
        try:
            note = Note(kind, tuple(inputs), tuple(attributes), tuple(outputs), frames(), None)
            op = ShownOp(self, note, self._count)
            self._count += 1
            if op.phase in ("forward", "loss"):
                self.seen.setdefault(names.plain(kind), []).append(op)
            if self._observer(op) is not None:
                msg = "TensorFlow takes no other results in the place of an operation's own"
                raise TypeError(msg)  # noqa: TRY301  the observer's fault is told as one
        except BaseException as error:
            self.failed = error
            raise
        finally:
            self._busy = False

    def layer(self, paths: dict[int, str], real: Callable[..., Any]) -> Callable[..., Any]:
        """Stand before the calls of a class of layers."""

        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            path = paths.get(id(layer))
            if path is None or (self.layers and self.layers[-1][0] == path):
                return real(layer, *args, **kwargs)
            number = self._calls[path] = self._calls.get(path, -1) + 1
            self.layers.append((path, number))
            try:
                return real(layer, *args, **kwargs)
            finally:
                self.layers.pop()

        return call

    def during(self, phase: Phase) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Stand before a function that runs in a phase of its own."""

        def make(real: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                with but(self, phase=phase):
                    return real(*args, **kwargs)

            return run

        return make


def layers_of(target: Any) -> dict[str, Any]:
    """Give the layers that a target runs, by path."""
    fn: Any = untracked(target)
    if is_keras(fn) or isinstance(fn, tf.Module):
        return parts_of(fn)
    found = layers_in(fn)
    owner = getattr(getattr(fn, "python_function", fn), "__self__", None)
    for name, value in getattr(owner, "__dict__", {}).items():
        if is_keras(value) or (isinstance(value, tf.Module) and callable(value)):
            parts = parts_of(value).items()
            found |= {(f"{name}.{path}" if path else name): part for path, part in parts}
    return found


def observe(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], observer: Observer,
    layers: dict[str, Any] | None = None,
) -> Observed:  # fmt: skip
    """Run a target once, show each operation, and leave no trace.

    Args:
        target: A model, a step or a function.
        args: What it is called with.
        kwargs: By name.
        observer: Sees each operation.
        layers: The layers that it runs, where its own names do not tell them.
    """
    found, run = Observed(), Run(observer)
    fn: Any = untracked(target)
    with ExitStack() as stack:
        lost = stack.enter_context(untouched(target, args, kwargs))
        stack.enter_context(_shown(run, layers_of(fn) if layers is None else layers))
        try:
            found.value = fn(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  the program's own: it is told, not raised
            found.error = error
    if run.failed is not None:
        raise run.failed
    if run.drew:
        lost.append("TensorFlow's random numbers")
    found.notes = [NOT_PUT_BACK(who="the run", what=what) for what in dict.fromkeys(lost)]
    return found


class TensorflowTarget(Target):
    """Reach the numbers of tensors, and the layers of a target.

    Attributes:
        layers: Its layers, by path.
    """

    takes = staticmethod(takes)

    def __init__(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__(target, args, kwargs)
        self.layers = layers_of(target)
        self.shows = partial(observe, layers=self.layers)

    def is_array(self, x: Any) -> bool:
        """Tell whether something is a tensor of numbers."""
        kind = x.dtype if isinstance(x, tf.Tensor) else tf.string
        return bool(kind.is_floating or kind.is_complex or kind.is_integer or kind.is_bool)

    def host(self, x: Any) -> np.ndarray[Any, Any]:
        """Bring a tensor to the host; a bfloat16 in float32."""
        return on_host(tf.cast(x, tf.float32) if tf.bfloat16 == x.dtype else x)

    def like(self, numbers: np.ndarray[Any, Any], x: Any) -> Any:
        """Make a tensor of the same dtype."""
        return tf.cast(tf.constant(numbers), x.dtype)

    def cast(self, x: Any, dtype: str) -> Any:
        """Cast a tensor."""
        return tf.cast(x, dtype)


@contextmanager
def untouched(
    target: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Iterator[list[str]]:
    """Put everything back that a target changes inside.

    Yields:
        Gets what could not be put back.
    """
    fn: Any = untracked(target)
    began = Reached(Layers(dict, None, Options())).begin(fn, args, dict(kwargs or {}))
    kept = {id(x): (x, value) for x, value in began.variables}
    draws: random.Random | None = getattr(context.context(), "_rng", None)
    lost: list[str] = []

    def keeping(real: Callable[..., Any]) -> Callable[..., Any]:
        def write(variable: Any, *values: Any, **options: Any) -> Any:
            if id(variable) not in kept:
                with tf.init_scope():  # a graph may be traced just now
                    kept[id(variable)] = variable, variable.read_value()
            return real(variable, *values, **options)

        return write

    with ExitStack() as stack:
        stack.enter_context(replay_context())
        stack.enter_context(began.second_run())
        state = None if draws is None else draws.getstate()
        patches = stack.enter_context(Patches())
        for owner in (BaseResourceVariable, ResourceVariable):
            for name in vars(owner).keys() & _WRITING:
                patches.change(owner, name, keeping)
        try:
            yield lost
        finally:
            patches.undo()
            for variable, value in kept.values():
                variable.assign(value)
            if draws is not None and state is not None:
                draws.setstate(state)
    lost += began.lost + began.left


@contextmanager
def _shown(run: Run, layers: dict[str, Any]) -> Iterator[None]:
    paths = {id(layer): path for path, layer in layers.items()}
    eager = tf.config.functions_run_eagerly()
    with Patches() as patches:
        for kind in {type(layer) for layer in layers.values()}:
            owner = owner_of(kind, "__call__")
            patches.change(owner, "__call__", lambda real: run.layer(paths, real))
        patches.change(tf.GradientTape, "gradient", run.during("backward"))
        keras: Any = sys.modules.get("keras")
        if keras is not None:
            patches.change(keras.optimizers.Optimizer, "apply", run.during("optimizer"))
        tf.config.run_functions_eagerly(True)
        op_callbacks.add_op_callback(run.note)
        try:
            yield
        finally:
            op_callbacks.remove_op_callback(run.note)
            tf.config.run_functions_eagerly(eager)
