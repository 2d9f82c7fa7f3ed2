"""Watch Keras models, on whichever backend Keras runs."""

try:
    import keras as _keras
except ModuleNotFoundError as error:  # pragma: no cover - shown by a test in a subprocess
    msg = 'anynan.keras needs Keras: pip install "anynan[keras]"'
    raise ImportError(msg) from error
if not hasattr(_keras, "Layer"):
    msg = 'anynan.keras needs Keras: pip install "anynan[keras]"'
    raise ImportError(msg)

from anynan.keras.monitor import Monitor
from anynan.keras.tracking import track, untrack

__all__ = ["Monitor", "track", "untrack"]
