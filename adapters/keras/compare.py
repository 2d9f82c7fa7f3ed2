"""One side of a comparison: call a Keras model eagerly, and keep what every layer gave."""

import functools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from anynan._compare.captures import Array, Capture, Nudge, Side, Taken, Wish
from anynan._files.formats import FORMATS
from anynan._reach.patches import Patches
from anynan.keras.layers import is_symbolic, layers_of, refuse_unbuilt, weights_of


def side_of(target: Any) -> Side | None:
    """Give the side of a Keras model; None for all else."""
    return KerasSide(target) if isinstance(target, keras.layers.Layer) else None


class KerasSide(Side):
    """Run a Keras model, on whichever backend Keras has."""

    backend = "keras"

    def __init__(self, model: Any) -> None:
        refuse_unbuilt(model)
        self.model = model
        self.layers = layers_of(model)
        self.weights = weights_of(self.layers)

    def run(self, batch: tuple[Any, ...], wish: Wish) -> Capture:
        """Run once, and put the weights back."""
        args = [
            keras.tree.map_structure(functools.partial(_brought, nudge=wish.nudge), x)
            for x in batch
        ]
        kept = self.weights if wish.weights else []
        weights = {weight.name: _host(weight.variable) for weight in kept}
        taken: list[Taken] = []
        dtypes: set[str] = set()
        with self._kept(wish.nudge), self._watching(taken, dtypes):
            self.model(*args, training=False)
        notes = ["the backward pass of a Keras model was not compared"] if wish.backward else []
        unit = max((FORMATS[name].unit for name in dtypes & FORMATS.keys()), default=0.0)
        return Capture("keras", taken, weights, unit, notes=notes, whole_gradients=False)

    @contextmanager
    def _kept(self, nudge: Nudge | None) -> Iterator[None]:
        """Put every variable back afterwards; move the weights meanwhile."""
        held = [(weight, keras.ops.copy(weight.variable)) for weight in self.weights]
        for weight, value in held:
            if nudge is not None and _is_float(weight.variable.dtype):
                factor = nudge.factor(weight.name, tuple(value.shape))
                weight.variable.assign(_host(value).astype(np.float64) * factor)
        try:
            yield
        finally:
            for weight, value in held:
                weight.variable.assign(value)

    @contextmanager
    def _watching(self, taken: list[Taken], dtypes: set[str]) -> Iterator[None]:
        paths = {id(layer): path for path, layer in self.layers.items()}
        calls: dict[str, int] = defaultdict(int)

        def watched(original: Any) -> Any:
            @functools.wraps(original)
            def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
                path = paths.get(id(layer))
                if path is None or is_symbolic(args, kwargs):
                    return original(layer, *args, **kwargs)
                number = calls[path]
                calls[path] += 1
                given = _floats((args, kwargs))
                out = original(layer, *args, **kwargs)
                made = _floats(out)
                dtypes.update(keras.backend.standardize_dtype(x.dtype) for x in made)
                taken.append(
                    Taken(
                        path, type(layer).__name__, number, "forward",
                        tuple(map(_host, given)), tuple(map(_host, made)),
                    )
                )  # fmt: skip
                return out

            return call

        with Patches() as patches:
            patches.change(keras.layers.Layer, "__call__", watched)
            yield


def _is_float(dtype: Any) -> bool:
    return "float" in keras.backend.standardize_dtype(dtype)


def _floats(tree: Any) -> list[Any]:
    return [x for x in keras.tree.flatten(tree) if keras.ops.is_tensor(x) and _is_float(x.dtype)]


def _brought(x: Any, nudge: Nudge | None) -> Any:
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        return x
    array = np.asarray(x.detach() if hasattr(x, "detach") else x)
    if nudge is not None and array.dtype.kind == "f":
        array = (array * nudge.factor(f"input {array.shape}", array.shape)).astype(array.dtype)
    return keras.ops.convert_to_tensor(array)


def _host(x: Any) -> Array:
    x = getattr(x, "value", x)
    x = x.detach().cpu() if hasattr(x, "detach") else x
    array = np.asarray(x.numpy() if hasattr(x, "numpy") else x)
    return array.copy() if array.dtype in (np.float32, np.float64) else array.astype(np.float32)
