"""One side of a comparison: a Keras model, on whichever backend Keras has."""

import importlib
from typing import Any

import keras

from anynan._apps.compare.captures import Runner

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
