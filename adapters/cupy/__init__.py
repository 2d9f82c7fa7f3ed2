"""Watch CuPy arrays: operations, scopes and hand-written gradients, with flags on the device."""

try:
    import cupy as _cupy
except ModuleNotFoundError as error:  # pragma: no cover - shown by a test in a subprocess
    if error.name != "cupy":  # it is there, and something that it needs is not
        raise
    msg = 'anynan.cupy needs CuPy: pip install "anynan[cupy]"'
    raise ImportError(msg) from None
if not hasattr(_cupy, "ndarray"):
    msg = 'anynan.cupy needs CuPy: pip install "anynan[cupy]"'
    raise ImportError(msg)

from anynan._arrays import registry as _registry
from anynan._base.context import scope
from anynan.cupy.slots import Reader as _Reader
from anynan.cupy.tracking import check, errstate, track

__all__ = ["check", "errstate", "scope", "track"]

_registry.register(_Reader())
