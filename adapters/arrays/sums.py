"""A sum of squares: one number by which an array is known to be finite."""

import math
from typing import Any

import numpy as np

PRODUCT = 10_000  # elements: above, OpenBLAS wakes its pool of threads
FLOATS = (np.dtype(np.float64), np.dtype(np.float32))


def squares(x: Any) -> float:
    """Give the sum of an array's squares; Inf where one sum cannot tell that it is finite."""
    if x.size > PRODUCT and not (x.flags.forc and x.flags.aligned):
        return math.inf  # it would be copied
    flat = x.ravel("K")
    if flat.size <= PRODUCT:
        return float(flat.dot(flat))
    total = 0.0
    for start in range(0, flat.size, PRODUCT):
        piece = flat[start : start + PRODUCT]
        total += float(piece.dot(piece))
        if not total < math.inf:
            break
    return total
