"""Watch Keras models, on whichever backend Keras runs."""

try:
    import keras as _keras
except ModuleNotFoundError as error:  # pragma: no cover - shown by a test in a subprocess
    if error.name != "keras":  # it is there, and something that it needs is not
        raise
    msg = 'anynan.keras needs Keras: pip install "anynan[keras]"'
    raise ImportError(msg) from None
if not hasattr(_keras, "Layer"):
    msg = 'anynan.keras needs Keras: pip install "anynan[keras]"'
    raise ImportError(msg)

from anynan.keras.monitor import Monitor
from anynan.keras.tracking import track
from anynan.tracker import old_untrack as untrack  # noqa: F401  until 0.2

__all__ = ["Monitor", "track"]
