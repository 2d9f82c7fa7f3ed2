"""Watch Keras models, on whichever backend Keras runs."""

from anynan._base.imports import need as _need

_need("keras", "Keras", "Layer")

from anynan.keras.monitor import Monitor
from anynan.keras.tracking import track
from anynan.tracker import old_untrack as untrack  # noqa: F401  until 0.2

__all__ = ["Monitor", "track"]
