"""What happens around an optimizer's update of tracked weights."""

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from anynan._base.context import but
from anynan._base.identity import SetByIdentity
from anynan._base.sources import is_library
from anynan._base.summary import Summary
from anynan._diagnosis.evidence import BadParameter
from anynan._readings.step import Step
from anynan.tensorflow.read import probes, readings
from anynan.tensorflow.read.frames import Frame, here, is_loop, tensors
from anynan.tensorflow.read.probes import SCOPE
from anynan.tensorflow.read.weights import raw, read
from anynan.tensorflow.replay import taped
from anynan.tensorflow.replay.steps import Held, Part
from anynan.tensorflow.session.steps import Steps


class Updates(Part):
    """Know the optimizers of tracked weights, and let no update through that is not wanted.

    Args:
        held: What all parts of a session work on.
        steps: Ends a step where an update does.

    Attributes:
        scaler: The loss scaler, None if there is none.
    """

    def __init__(self, held: Held, steps: Steps) -> None:
        super().__init__(held)
        self._weights, self._steps = held.layers.weights, steps
        self._optimizers: SetByIdentity[Any] = SetByIdentity()
        self.scaler: weakref.ref[Any] | None = None

    def apply(
        self, run: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None
    ) -> Any:
        """Update the weights; where bad gradients are not wanted, under a condition."""
        state, known = self._state, trainable_variables
        known = optimizer._trainable_variables if known is None else list(known)
        if not any(self._weights.name(v) for v in known):
            return run(grads, trainable_variables)
        code = getattr(getattr(type(optimizer), "update_step", None), "__code__", None)
        own = code is not None and not is_library(code.co_filename)
        if own:
            self._weights.states = [raw(v) for v in optimizer.variables]
        with but(state, own=own, applying=state.applying + 1):
            return self._apply(run, optimizer, list(grads), known)

    def apply_scaled(
        self, run: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the update of a loss scaler, which drops bad ones itself."""
        self.scaler = weakref.ref(optimizer)
        with but(self._state, scaling=self._state.scaling + 1):
            return run(*args, **kwargs)

    def _apply(self, run: Callable[..., Any], optimizer: Any, grads: Any, known: Any) -> Any:
        state, graph = self._state, here()
        self._optimizers.add(optimizer)
        if graph is None:
            if state.replaying:
                return None
            if not state.scaling:
                self._take(zip(known, grads, strict=True))
                self._steps.taken()
            if self._steps.rows().skip:
                return None
            with nullcontext() if state.own else taped.off():
                out = run(grads, known)
            state.updated = True
            if state.open and not state.depth and not state.held:
                self._steps.end()
            return out
        scope = tf.get_current_name_scope()
        base = f"{scope}/{optimizer.name}" if scope else optimizer.name
        self._traces.of(graph).updates.add(base)
        spread = tf.distribute.get_strategy().num_replicas_in_sync > 1
        given = [] if state.scaling else [self._taken(graph, zip(known, grads, strict=True))]
        # A loss scaler drops bad updates itself, and replicas may not meet inside of a condition.
        if not self._held.gated or state.scaling or spread or state.replaying:
            return run(grads, known)
        if not optimizer.built:
            optimizer.build(known)
        checked = [x for grad in grads for _, x in tensors(grad, "")]
        if not checked:
            return run(grads, known)
        with tf.name_scope(SCOPE):
            fine = self._fine(graph, checked, *given)
        state.gradients = None

        def update() -> Any:
            run(grads, known)
            return tf.constant(True)

        tf.cond(fine, update, lambda: tf.constant(False))
        return None

    def constrain(self, run: Callable[..., Any], variable: Any, *args: Any, **kwargs: Any) -> Any:
        """Read what a constraint makes of a weight once its update is written."""
        graph, bound = here(), getattr(variable, "constraint", None) is not None
        if bound and self._state.applying and graph is not None and not is_loop(graph):
            self._taken(graph, [(variable, _value(args, kwargs))])
        return run(*args, **kwargs)

    def assign(self, run: Callable[..., Any], variable: Any, *args: Any, **kwargs: Any) -> Any:
        """Let a program's own update of a weight through, where its gradients allow it."""
        state, graph, frame = self._state, here(), self._state.gradients
        name, given = self._weights.name(variable), [(variable, _value(args, kwargs))]
        ours = name is not None and not self._weights.is_buffer(name) and variable.dtype.is_floating
        if not ours or (state.applying and not state.own):
            return run(*args, **kwargs)
        if graph is None and not state.replaying:
            if self._held.gated and state.backward and self._steps.rows().skip:
                return variable
            between = taped.running() and not (state.open or state.depth or state.held)
            if state.backward or between:
                self._collect(state.taken, given, {id(x) for x in state.slopes})
            if state.tapes:  # the tape may read it at once
                self._steps.wrote()
            (state.written if state.backward else state.by_hand).add(name)
            state.updated = state.updated or state.backward
            return run(*args, **kwargs)
        if graph is None or is_loop(graph) or not self._buffers.alone:
            return run(*args, **kwargs)
        read, again = self._taken(graph, given), state.applying or state.replaying
        if frame is None or frame.graph is not graph or again or not self._held.gated:
            return run(*args, **kwargs)
        with tf.name_scope(SCOPE) as scope:
            if frame.fine is None:
                frame.fine = self._fine(graph, frame.slopes())
            fine = tf.logical_and(frame.fine, self._fine(graph, read.tensors, read))
            self._traces.of(graph).updates.add(scope.rstrip("/"))

            def update() -> Any:
                run(*args, **kwargs)
                return tf.constant(True)

            tf.cond(fine, update, lambda: tf.constant(False))
        return variable

    def _taken(self, graph: Any, pairs: Iterable[tuple[Any, Any]]) -> Frame:
        """Read what weights are updated with, where it is not what the tape gave."""
        frame, last = self._state.collect(graph), self._state.gradients
        known: set[int] = set()
        while last is not None:
            known, last = known | {id(x) for x in last.tensors}, last.before
        self._collect(frame, pairs, known)
        self._steps.write(frame, backward=False)
        return frame

    def _take(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Keep what weights are updated with outside of graphs: the step reads it once."""
        if self._state.open and not self._state.replaying:
            self._collect(self._state.taken, pairs, {id(x) for x in self._state.slopes})

    def _collect(self, frame: Frame, pairs: Iterable[tuple[Any, Any]], known: set[int]) -> None:
        for variable, value in pairs:
            name = self._weights.name(variable)
            if name is None:
                continue
            for _, x in tensors(value, ""):
                if isinstance(x, tf.Tensor) and id(x) not in known:
                    layer = self._weights.layer(name)
                    frame.take(x, layer, "optimizer", name.rpartition(".")[2], name)

    def _fine(self, graph: Any, checked: list[Any], *given: Frame) -> Any:
        """Tell, as a tensor, whether gradients are finite; what was read is not read again."""
        found = []
        last = self._state.gradients
        for frame in (*given, *([] if last is None or last.graph is not graph else [last])):
            if frame.rows is None:
                continue
            ours = {id(x) for x in checked}
            places = [i for i, x in enumerate(frame.tensors) if id(x) in ours]
            if places:
                found.append(readings.all_fine(tf.gather(frame.rows, places)))
            known = {id(x) for x in frame.tensors}
            checked = [x for x in checked if id(x) not in known]
        if checked:
            found.append(readings.all_fine(self._buffers.look(checked, xla=self._state.xla)))
        return tf.reduce_all(found)

    def scales(self) -> bool:
        """Tell whether what is differentiated is a multiple of the program's loss."""
        known = [self.scaler and self.scaler(), *self._optimizers]
        return any(getattr(x, "loss_scale_factor", None) or x is known[0] for x in known if x)

    def loss_scale(self) -> float | None:
        """Give the loss scale in force."""
        scaler = None if self.scaler is None else self.scaler()
        if scaler is None or not scaler.built:
            return None
        return float(np.asarray(scaler.dynamic_scale))

    def bad_parameters(self) -> list[BadParameter]:
        """List the weights and buffers that are bad, with what the optimizers keep for them.

        What the step itself made of them explains none of its readings: where they were kept they
        are judged as they were before it.
        """
        rows = self._steps.rows() if self._state.after else None
        found = []
        for item in self._weights.bad(self._began()):
            if item.name in self._written():
                continue
            held, settings = self._kept_for(self._weights.variable(item.name))
            gradient = None if rows is None else _gradient(rows, item)
            mine = item.name not in self._state.by_hand
            found.append(replace(item, held=mine, state=held, gradient=gradient, settings=settings))
        return found

    def is_bad(self, name: str) -> bool:
        """Tell whether one weight or buffer is bad, as ``bad_parameters`` does of all."""
        return name not in self._written() and self._weights.is_bad(name, self._began())

    def _written(self) -> set[str | None]:
        """Name the weights that the step wrote by hand: it made them what they are."""
        return set() if self._state.after else self._state.written

    def _began(self) -> list[tuple[Any, Any]]:
        state = self._state
        return [] if state.after or state.step is None else state.step.kept

    def _kept_for(self, weight: Any) -> tuple[dict[str, Summary], dict[str, float]]:
        """Give what optimizers keep for a weight, measured, and their settings, by name."""
        from anynan.keras.layers import moments_of, settings_of  # the optimizers are Keras's

        found: dict[str, Summary] = {}
        settings: dict[str, float] = {}
        for optimizer in self._optimizers:
            mine = next((v for v in optimizer._trainable_variables if raw(v) is weight), None)
            if mine is None:
                continue
            settings |= settings_of(optimizer)
            for name, variable in moments_of(optimizer, mine):
                held = raw(variable)
                if held is not None:
                    found[name] = probes.measure(read(held))
        return found, settings


def _value(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give what a variable is written with."""
    return args[0] if args else kwargs.get("value", kwargs.get("delta"))


def _gradient(rows: Step, item: BadParameter) -> Summary | None:
    """Give what this step read of a weight's gradient: its ends."""
    for order, site in enumerate(rows.sites):
        if site.parameter == item.name and site.phase == "backward":
            lo, hi = rows.lo[order], rows.hi[order]
            return replace(
                item.summary, nan=0, posinf=0, neginf=0, zero=0, subnormal=0, min=lo, max=hi,
                absmax=max(abs(lo), abs(hi)), mean=None, rms=None, first_bad=None,
            )  # fmt: skip
    return None
