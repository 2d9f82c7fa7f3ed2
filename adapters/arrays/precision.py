"""Run array code in a narrow dtype: its arguments are cast, and NumPy's own kernels run."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anynan._apps.precision.watch import Narrow
from anynan._arrays.access import namespace, to_host
from anynan.arrays.observe import observe, takes
from anynan.arrays.trackable import is_array


def narrowed_of(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Narrowed | None":
    """Give what runs a function of array code in narrow dtypes; None for all else."""
    return Narrowed(target, args, kwargs) if takes(target, args, kwargs) else None


class Narrowed(Narrow):
    """Run one function in narrow dtypes: it has no layers, and few kernels to skip."""

    framework = "array code"
    shows = staticmethod(observe)

    def host(self, x: Any) -> NDArray[Any] | None:
        """Give an array's numbers to NumPy; None if it has none with a fraction."""
        if not is_array(x):
            return None
        found = np.asarray(to_host(x))
        if found.dtype.kind == "V":
            return found.astype(np.float32)
        return found if found.dtype.kind in "fc" else None

    def cast(self, x: Any, dtype: str) -> Any:
        """Cast an array.

        Raises:
            ValueError: If NumPy does not know the dtype.
        """
        try:
            return x.astype(dtype)
        except TypeError as error:
            msg = f"NumPy does not know {dtype}: import ml_dtypes, which tells it, and run again"
            raise ValueError(msg) from error

    def like(self, numbers: NDArray[Any], x: Any) -> Any:
        """Make an array of the same library."""
        with np.errstate(all="ignore"):
            made = numbers.astype(x.dtype) if isinstance(x, np.ndarray | np.generic) else numbers
        return made if made is not numbers else namespace(x).asarray(numbers, dtype=x.dtype)
