"""Direct checks of TensorFlow's tensors and variables."""

from typing import Any

import tensorflow as tf

from anynan._arrays.probe import probe
from anynan._base.summary import Summary
from anynan.tensorflow.read import probes


class Reader:
    """Read eager tensors and variables for ``anynan.check`` and ``anynan.summarize``."""

    def owns(self, x: Any, /) -> bool:
        """Tell whether this is a tensor or a variable of TensorFlow's."""
        return isinstance(x, tf.Tensor | tf.Variable)

    def probe(self, x: Any, /) -> tuple[float, float] | None:
        """Give the smallest and the largest value.

        Raises:
            TypeError: If it is a tensor of a graph, which holds no values.
        """
        if not (x.dtype.is_floating or x.dtype.is_complex):
            return None
        return probe(_values(x))

    def summarize(self, x: Any, /) -> Summary:
        """Describe a tensor.

        Raises:
            TypeError: If it is a tensor of a graph, which holds no values.
        """
        return probes.measure(_values(x))


def _values(x: Any) -> Any:
    if not tf.inside_function() and hasattr(x, "numpy"):
        return x.numpy()
    msg = (
        "anynan.check and anynan.summarize read values, and a tensor inside of a tf.function has "
        "none yet: call them outside, or track the function"
    )
    raise TypeError(msg)
