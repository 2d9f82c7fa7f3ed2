"""One side of a comparison: a Keras model on TensorFlow, called eagerly."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from anynan._apps.compare.captures import (
    Array,
    Capture,
    Perturbation,
    Runner,
    RunRequest,
    cotangent,
)
from anynan._apps.compare.layers import LayerCapture, line
from anynan._base.patches import Patches
from anynan._files.formats import FORMATS
from anynan.keras.layers import layers_of, refuse_unbuilt, same_draws, watching, weights_of

# Functions whose result jumps where their operand moves by a rounding unit, in the field's words.
_CHOOSING = {
    "topk": ((tf.math, "top_k"), (tf.nn, "top_k")),
    "argmax": ((tf, "argmax"), (tf.math, "argmax")),
    "argmin": ((tf, "argmin"), (tf.math, "argmin")),
    "sort": ((tf, "argsort"),),
}
_DRAWING = {
    "normal": ((tf.random, "stateless_normal"), (tf.random, "normal")),
    "uniform": ((tf.random, "stateless_uniform"), (tf.random, "uniform")),
    "truncated_normal": (
        (tf.random, "stateless_truncated_normal"), (tf.random, "truncated_normal"),
    ),
    "categorical": ((tf.random, "stateless_categorical"), (tf.random, "categorical")),
    "gamma": ((tf.random, "stateless_gamma"), (tf.random, "gamma")),
    "dropout": ((tf.nn.experimental, "stateless_dropout"), (tf.nn, "dropout")),
}  # fmt: skip
# Their gradient jumps where an operand passes a limit.
_GATES = ((tf.nn, "relu"), (tf.nn, "relu6"), (tf.nn, "leaky_relu"), (tf, "clip_by_value"),
          (tf, "maximum"), (tf, "minimum"), (tf, "abs"))  # fmt: skip


def side_of(target: Any) -> Runner | None:
    """Give nothing: the Keras adapter is asked for its models."""
    return None


class KerasSide(Runner):
    """Run a Keras model, with the gradients that a tape gives."""

    backend = "keras on tensorflow"

    def __init__(self, model: Any) -> None:
        refuse_unbuilt(model)
        self.model = model
        self.layers = layers_of(model)
        self.weights = weights_of(self.layers)

    def run(self, batch: tuple[Any, ...], wish: RunRequest) -> Capture:
        """Run once, and put the weights back."""
        number = iter(range(1 << 30))
        args = tuple(
            keras.tree.map_structure(lambda x: _brought(x, wish, number), x) for x in batch
        )
        weights = {w.name: _host(w.variable) for w in self.weights} if wish.weights else {}
        taking = _Taking(wish)
        with ExitStack() as stack:
            stack.enter_context(self._kept(wish.nudge))
            stack.enter_context(watching(self.layers, taking.before, taking.after))
            stack.enter_context(taking.choosing())
            if wish.backward:
                taking.tape = stack.enter_context(tf.GradientTape(persistent=False))
                taking.tape.watch(_floats(args))
            out = self.model(*args, training=False)
            loss = _objective(out) if wish.backward else None
        if loss is not None:
            taking.differentiate(loss, self.weights)
        unit = max((FORMATS[x].unit for x in taking.dtypes & FORMATS.keys()), default=0.0)
        return Capture(self.backend, taking.taken, weights, unit, taking.choices)

    @contextmanager
    def _kept(self, nudge: Perturbation | None) -> Iterator[None]:
        """Put every variable back afterwards; move the weights meanwhile."""
        held = [(weight, tf.identity(weight.variable.value)) for weight in self.weights]
        for weight, value in held:
            if nudge is not None and weight.variable.dtype in FORMATS:
                factor = nudge.factor(weight.name, tuple(value.shape))
                weight.variable.assign(_host(value).astype(np.float64) * factor)
        for state, start in same_draws(self.weights):
            state.assign(start)
        try:
            yield
        finally:
            for weight, value in held:
                weight.variable.assign(value)


class _Taking(LayerCapture):
    """Collect what layers are given and make, and what is chosen on the way."""

    def __init__(self, wish: RunRequest) -> None:
        super().__init__(wish, _host, partial(line, "keras"))
        self.tape: Any = None
        self.dtypes: set[str] = set()
        self.inside = 0

    def before(self, path: str, layer: Any, args: Any, kwargs: Any) -> Any:
        """Begin a call; a gradient of its own: that of a residual stream has more in it."""
        changed = None
        if self.tape is not None:
            changed = args, kwargs = keras.tree.map_structure(
                lambda x: tf.identity(x) if _is_float(x) else x, (args, kwargs)
            )
        self.enter(path, type(layer).__name__, _floats((args, kwargs)))
        return changed

    def after(self, path: str, layer: Any, args: Any, kwargs: Any, out: Any) -> None:
        """End a call."""
        found = _floats(out)
        self.dtypes.update(x.dtype.name for x in found)
        self.leave(found)

    def differentiate(self, loss: Any, weights: list[Any]) -> None:
        """Take the gradients of what layers were given and made, and of their weights."""
        tensors = {id(x): x for call in self.ended for x in (*call.into, *call.out_of)}
        own = [(w.layer, w.variable.value) for w in weights if not w.buffer]
        wanted = [*tensors.values(), *(x for _, x in own)]
        found = self.tape.gradient(loss, wanted)
        dense = [x if x is None else tf.convert_to_tensor(x) for x in found]
        self.go_back(zip(wanted, dense, strict=True), own)

    # What is chosen.

    @contextmanager
    def choosing(self) -> Iterator[None]:
        """Stand at the functions that choose, that draw, and at those with gates."""
        with Patches() as patches:
            for name, places in (*_CHOOSING.items(), *_DRAWING.items()):
                for owner, function in places:
                    patches.change(owner, function, partial(self._stood, name))
            if self.wish.backward:
                for owner, function in _GATES:
                    patches.change(owner, function, self._gated)
            yield

    def _stood(self, name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.inside += 1  # dropout draws, too
            try:
                out = real(*args, **kwargs)
            finally:
                self.inside -= 1
            if self.inside or not tf.executing_eagerly():
                return out
            return self._chosen(name, args, kwargs, out)

        return call

    def _chosen(self, name: str, args: Any, kwargs: Any, out: Any) -> Any:
        picked = out[1] if name == "topk" else out
        x = args[0] if args else kwargs.get("input", kwargs.get("x"))
        if name == "dropout":
            picked = (out != 0) | (x == 0)
        mine = np.array(picked)
        like = self.held_to(name, mine)
        if like is not None:
            if name == "dropout":
                rate = kwargs.get("rate", args[1] if len(args) > 1 else 0.0)
                out = x * tf.cast(like, x.dtype) / (1 - rate)
            elif name == "topk":
                indices = tf.cast(like, out[1].dtype)
                values = tf.gather(x, indices, batch_dims=len(x.shape) - 1)
                out = type(out)(values, indices)
            else:
                out = tf.cast(like, out.dtype)
        self.choose(name, mine, like, drawn=name in _DRAWING)
        return out

    def _gated(self, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            out = real(*args, **kwargs)
            x: Any = args[0] if args else None
            if tf.executing_eagerly() and _is_float(x) and x.shape and x.shape == out.shape:
                picked = tf.sign(x) if real.__name__ == "abs" else (out == x) & (out != 0)
                self.choose(real.__name__, np.array(picked), gate=True)
            return out

        return call


def _objective(out: Any) -> Any:
    """Give the loss, or one number that depends on every element of every output."""
    floats = _floats(out)
    if len(floats) == 1 and floats[0].shape.num_elements() == 1:
        return tf.reshape(floats[0], ())
    wide = [tf.cast(x, tf.float64) * cotangent(tuple(x.shape), i) for i, x in enumerate(floats)]
    return sum(map(tf.reduce_sum, wide)) if wide else None


def _floats(tree: Any) -> list[Any]:
    return [x for x in keras.tree.flatten(tree) if _is_float(x)]


def _is_float(x: Any) -> bool:
    return bool(tf.is_tensor(x) and x.dtype.is_floating)


def _brought(x: Any, wish: RunRequest, number: Iterator[int]) -> Any:
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        return x
    array = np.asarray(x.detach() if hasattr(x, "detach") else x)
    if wish.nudge is not None and array.dtype.kind == "f":
        factor = wish.nudge.factor(f"input {next(number)}", array.shape)
        array = (array * factor).astype(array.dtype)
    return keras.ops.convert_to_tensor(array)


def _host(x: Any) -> Array:
    array = np.asarray(getattr(x, "value", x))
    return array.copy() if array.dtype in (np.float32, np.float64) else array.astype(np.float32)
