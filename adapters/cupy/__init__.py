"""Watch CuPy arrays: operations, scopes and hand-written gradients, with flags on the device."""

try:
    from cupy import ndarray as _  # noqa: F401
except ImportError as error:
    if error.name != "cupy":  # it is there, and something that it needs is not
        raise
    msg = 'anynan.cupy needs CuPy: pip install "anynan[cupy]"'
    raise ImportError(msg) from None

from anynan._base.context import scope
from anynan.cupy.tracking import check, errstate, track

__all__ = ["check", "errstate", "scope", "track"]
