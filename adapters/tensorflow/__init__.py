"""Watch TensorFlow functions, modules and Keras models."""

from anynan._base.imports import need as _need

_need("tensorflow", "TensorFlow", "GradientTape")

from anynan._arrays import registry as _registry
from anynan.tensorflow.reader import Reader as _Reader
from anynan.tensorflow.tracking import track
from anynan.tracker import old_untrack as untrack  # noqa: F401  until 0.2

__all__ = ["track"]

_registry.register(_Reader())
