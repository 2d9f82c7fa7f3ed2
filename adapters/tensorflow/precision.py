"""Run a TensorFlow function in a narrow dtype: its arguments are cast, its variables are not."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from anynan._apps.precision.watch import Narrow
from anynan._trace.op import Observed, Observer
from anynan.tensorflow.graphs.operations import is_float
from anynan.tensorflow.observe import layers_of, observe, takes
from anynan.tensorflow.read.probes import on_host


def narrowed_of(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Narrowed | None":
    """Give what runs a target of this framework in narrow dtypes; None for all else."""
    return Narrowed(target, args, kwargs) if takes(target, args, kwargs) else None


class Narrowed(Narrow):
    """Run one target in narrow dtypes, in TensorFlow's own kernels."""

    framework = "TensorFlow without Keras"
    replaces = False

    def __init__(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__(target, args, kwargs)
        self.layers = layers_of(target)
        self.shows = partial(observe, layers=self.layers)

    def alone(self, observer: Observer, dtype: str, *, own: bool) -> Observed:
        """Run as it is while its layers compute in a dtype."""
        del dtype, own
        return self.observe(observer)

    def host(self, x: Any) -> NDArray[Any] | None:
        """Give a tensor's numbers to NumPy; None if it has none with a fraction."""
        if isinstance(x, np.ndarray):
            return x if x.dtype.kind in "fc" else None
        if not isinstance(x, tf.Tensor) or not is_float(x):
            return None
        return on_host(tf.cast(x, tf.float32) if x.dtype == tf.bfloat16 else x)

    def like(self, numbers: NDArray[Any], x: Any) -> Any:
        """Make a tensor of the same dtype."""
        return tf.cast(tf.constant(numbers), x.dtype)

    def cast(self, x: Any, dtype: str) -> Any:
        """Cast a tensor."""
        return tf.cast(x, dtype)
