"""Watch TensorFlow functions, modules and Keras models."""

try:
    import tensorflow as tf
except ModuleNotFoundError as error:  # pragma: no cover - shown by a test in a subprocess
    if error.name != "tensorflow":  # it is there, and something that it needs is not
        raise
    msg = 'anynan.tensorflow needs TensorFlow: pip install "anynan[tensorflow]"'
    raise ImportError(msg) from None
if not hasattr(tf, "GradientTape"):
    msg = 'anynan.tensorflow needs TensorFlow: pip install "anynan[tensorflow]"'
    raise ImportError(msg)

from anynan._arrays import registry as _registry
from anynan.tensorflow.reader import Reader as _Reader
from anynan.tensorflow.tracking import track
from anynan.tracker import old_untrack as untrack  # noqa: F401  until 0.2

__all__ = ["track"]

_registry.register(_Reader())
