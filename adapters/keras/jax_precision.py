"""Run a Keras model on JAX: traced with the names of Keras, once for each choice of policies."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import keras

from anynan._trace.op import Observed, Observer
from anynan.jax.observe import traced
from anynan.jax.precision import Kept
from anynan.jax.precision import Narrowed as JaxNarrowed
from anynan.keras.jax_compare import KerasSide
from anynan.keras.layers import layers_of


class Narrowed(JaxNarrowed):
    """Run one model in narrow dtypes."""

    @staticmethod
    def takes(target: Any, *_: Any) -> bool:
        """Tell whether a target is a Keras model."""
        return isinstance(target, keras.layers.Layer)

    def __init__(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._side, self.layers = KerasSide(target), layers_of(target)
        super().__init__(self._side._call, keras.tree.map_structure(_brought, args), kwargs)

    def alone(self, observer: Observer, dtype: str, *, own: bool) -> Observed:
        """Trace it anew, while its layers compute in a dtype, and evaluate that."""
        _, args, kwargs = self.call

        def fresh(*args: Any) -> Any:  # of what it knows JAX keeps the trace
            return self._side._call(*args)

        program, arrays = traced(fresh, args, kwargs)
        return Kept(program, observer, (), None if own else jnp.dtype(dtype)).observed(arrays)


def _brought(x: Any) -> Any:
    return jnp.asarray(x) if hasattr(x, "dtype") else x


narrowed_of = Narrowed.of
