"""Run a Keras model in a narrow dtype, on whichever backend: its layers get a mixed policy."""

import importlib
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras

from anynan._apps.precision.plan import inside
from anynan._apps.precision.watch import How, Narrow
from anynan._trace.op import Observed, Observer
from anynan.keras.layers import refuse_unbuilt_in

_SIDES = {
    "tensorflow": "anynan.tensorflow.precision",
    "torch": "anynan.keras.torch_precision",
    "jax": "anynan.keras.jax_precision",
}
_CODE = """\
kept = {kept}

def choose(layer, path, wide=False):
    wide = wide or path in kept
    layer.dtype_policy = "float32" if wide else "mixed_{dtype}"
    for inner in layer._flatten_layers(include_self=False, recursive=False):
        choose(inner, f"{{path}}.{{inner.name}}" if path else inner.name, wide)

choose(model, "")
"""


def narrowed_of(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Narrow | None:
    """Give what runs a Keras model, or a step that uses one; None for all else."""
    refuse_unbuilt_in(target, (*args, *kwargs.values()))
    name = _SIDES.get(keras.backend.backend())
    module = None if name is None else importlib.import_module(name)
    found = None if module is None else module.narrowed_of(target, args, kwargs)
    if found is None:
        return None
    layers = {path: x for path, x in found.layers.items() if isinstance(x, keras.layers.Layer)}
    return _Mixed(found, layers) if layers else None


class _Mixed(Narrow):
    """Run a target in narrow dtypes, as its backend does, by the policies of its layers.

    Args:
        inner: Runs it on the backend.
        layers: Its layers, by path.
    """

    def __init__(self, inner: Any, layers: Mapping[str, Any]) -> None:
        super().__init__(*inner.call)
        self._inner, self._layers = inner, layers
        parts = ("replaces", "observe", "is_array", "host", "like", "cast", "bounded", "memory")
        for name in parts:
            setattr(self, name, getattr(inner, name))

    def run(
        self, observer: Observer, dtype: str, how: str, keep: Mapping[str, bool], *, own: bool
    ) -> Observed:
        """Run with the layers but those to keep computing in a dtype; variables stay float32."""
        del how  # there is but one way
        with self._policies(dtype, keep):
            seen: Observed = self._inner.alone(observer, dtype, own=own)
            return seen

    def given(self) -> list[tuple[str, str | None, Any]]:
        """List nothing: the layers cast what they are given, and that is seen."""
        return []

    def sizes(self) -> dict[str, int]:
        """Give the layers, with the elements of the weights in them."""
        return {
            path: sum(math.prod(x.shape) for x in layer.weights)
            for path, layer in self._layers.items()
        }

    def code(self, dtype: str, how: How, keep: Mapping[str, bool], scale: float) -> str:
        """Write the code that keeps layers in float32, and scales the loss."""
        return _CODE.format(kept=list(keep), dtype=dtype) + super().code(dtype, how, keep, scale)

    @contextmanager
    def _policies(self, dtype: str, keep: Collection[str]) -> Iterator[None]:
        before = [(layer, layer.dtype_policy) for layer in self._layers.values()]
        try:
            for path, layer in self._layers.items():
                if layer.compute_dtype == "float32" and inside(path, keep) is None:
                    layer.dtype_policy = f"mixed_{dtype}"
            yield
        finally:
            for layer, policy in before:
                layer.dtype_policy = policy
