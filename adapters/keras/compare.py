"""One side of a comparison: a Keras model, on whichever backend Keras has."""

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from anynan._apps.compare.captures import Runner
from anynan._base.patches import Patches
from anynan.keras.layers import is_symbolic

_SIDES = {
    "tensorflow": "anynan.tensorflow.compare",
    "torch": "anynan.keras.torch_compare",
    "jax": "anynan.keras.jax_compare",
}


def side_of(target: Any) -> Runner | None:
    """Give the side of a Keras model; None for all else."""
    if not isinstance(target, keras.layers.Layer):
        return None
    name = _SIDES.get(keras.backend.backend())
    if name is None:
        return None
    side: Runner = importlib.import_module(name).KerasSide(target)
    return side


@contextmanager
def watching(
    layers: dict[str, Any], before: Callable[..., Any], after: Callable[..., Any]
) -> Iterator[None]:
    """Stand at the calls of layers.

    Args:
        layers: The layers by their paths.
        before: Called with path, layer, arguments and keywords; gives others, or None.
        after: Called with path, layer, arguments, keywords and what the layer made.
    """
    paths = {id(layer): path for path, layer in layers.items()}

    def watched(original: Any) -> Any:
        @functools.wraps(original)
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            path = paths.get(id(layer))
            if path is None or is_symbolic(args, kwargs):
                return original(layer, *args, **kwargs)
            changed = before(path, layer, args, kwargs)
            if changed is not None:
                _keep_masks((args, kwargs), changed)
                args, kwargs = changed
            out = original(layer, *args, **kwargs)
            after(path, layer, args, kwargs, out)
            return out

        return call

    with Patches() as patches:
        patches.change(keras.layers.Layer, "__call__", watched)
        yield


def _keep_masks(old: Any, new: Any) -> None:
    """Carry the masks over that Keras hangs on tensors."""
    for x, y in zip(keras.tree.flatten(old), keras.tree.flatten(new), strict=True):
        mask = getattr(x, "_keras_mask", None)
        if mask is not None and y is not x:
            y._keras_mask = mask


def same_draws(weights: list[Any]) -> list[tuple[Any, Any]]:
    """Give the states of random generators, each with what both sides begin with."""
    states = [weight.variable for weight in weights if weight.name.endswith(".state")]
    return [(x, np.array([0, i], np.uint32)) for i, x in enumerate(states) if x.shape == (2,)]
