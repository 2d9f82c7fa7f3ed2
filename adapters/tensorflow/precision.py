"""Run a TensorFlow function in a narrow dtype: its arguments are cast, its variables are not."""

from typing import Any

import numpy as np

from anynan._apps.precision.watch import Narrow
from anynan._trace.op import Observed, Observer
from anynan.tensorflow.observe import TensorflowTarget


class Narrowed(TensorflowTarget, Narrow):
    """Run one target in narrow dtypes, in TensorFlow's own kernels."""

    framework = "TensorFlow without Keras"
    replaces = False

    def is_array(self, x: Any) -> bool:
        """Tell whether something is a tensor of numbers, or is one where TensorFlow takes it."""
        return isinstance(x, np.ndarray) or super().is_array(x)

    def alone(self, observer: Observer, dtype: str, *, own: bool) -> Observed:
        """Run as it is while its layers compute in a dtype."""
        del dtype, own
        return self.observe(observer)


narrowed_of = Narrowed.of
