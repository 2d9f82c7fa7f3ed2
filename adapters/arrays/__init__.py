"""Watch array code: NumPy, the array API, Dask, and the libraries that are built on them."""

from anynan._base.context import scope
from anynan.arrays.tracking import namespace, track

__all__ = ["namespace", "scope", "track"]
