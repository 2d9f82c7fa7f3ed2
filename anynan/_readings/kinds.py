"""What kind of value each reading of a step holds, for tables of codes."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Kinds(NamedTuple):
    """Name the codes of what is no magnitude: no reading, the bad kinds, zero."""

    unread: int
    nan: int
    posinf: int
    neginf: int
    both: int
    zero: int

    def put(self, codes: NDArray[Any], low: NDArray[np.float64], high: NDArray[np.float64]) -> None:
        """Write these codes where they hold.

        Args:
            codes: Of the magnitudes, shape (n,); written to.
            low: Smallest values, as rows have them.
            high: Largest values.
        """
        codes[(low == 0) & (high == 0)] = self.zero
        codes[high == np.inf] = self.posinf
        codes[low == -np.inf] = self.neginf
        codes[(low == -np.inf) & (high == np.inf)] = self.both
        codes[low > high] = self.unread
        codes[np.isnan(low) | np.isnan(high)] = self.nan
