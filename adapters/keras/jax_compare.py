"""One side of a comparison: a Keras model on JAX."""

from typing import Any

import jax
import keras

from anynan._base.patches import Patches
from anynan.jax.compare import JaxSide
from anynan.jax.graphs.stacks import LAYER
from anynan.keras.layers import (
    is_symbolic,
    layers_of,
    refuse_unbuilt,
    same_draws,
    takes_training,
    weights_of,
)


class KerasSide(JaxSide):
    """Run a Keras model as a function of JAX, with the names of Keras."""

    backend = "keras on jax"
    can_widen = False  # its layers cast to a dtype of their own

    def __init__(self, model: Any) -> None:
        refuse_unbuilt(model)
        layers = layers_of(model)
        self.model, self.weights = model, weights_of(layers)
        self.paths = {id(layer): path for path, layer in layers.items()}
        super().__init__(self._call)

    def names(self) -> dict[int, str]:
        """Name the weights, by identity."""
        return {id(weight.variable._value): weight.name for weight in self.weights}

    def _call(self, *args: Any) -> Any:
        """Call the model, and write the paths of its layers into the trace."""
        model = self.model
        start = {id(state): value for state, value in same_draws(self.weights)}
        with Patches() as patches:
            patches.change(keras.layers.Layer, "__call__", self._scoped)
            out, _ = model.stateless_call(
                [x._value for x in model.trainable_variables],
                [start.get(id(x), x._value) for x in model.non_trainable_variables],
                *args,
                **({"training": False} if takes_training(model) else {}),
            )
        return out

    def _scoped(self, original: Any) -> Any:
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            path = self.paths.get(id(layer))
            if path is None or is_symbolic(args, kwargs):
                return original(layer, *args, **kwargs)
            with jax.named_scope(LAYER + path):
                return original(layer, *args, **kwargs)

        return call
