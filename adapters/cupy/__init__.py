"""Watch CuPy arrays: operations, scopes and hand-written gradients, with flags on the device."""

from anynan._base.imports import need as _need

_need("cupy", "CuPy", "ndarray")

from anynan._base.context import scope
from anynan.cupy.tracking import check, errstate, track

__all__ = ["check", "errstate", "scope", "track"]
