"""Magnitudes as two bytes each: what kind of value it was, or how large to about one percent."""

import base64
import binascii
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from anynan._readings.kinds import Kinds

UNREAD, NAN, POSINF, NEGINF, BOTH, ZERO = range(6)
FIRST = 6  # the code of the smallest magnitude, 2**LOWEST
LOWEST = -1074
STEPS = 31  # codes for each doubling
_KINDS = Kinds(UNREAD, NAN, POSINF, NEGINF, BOTH, ZERO)

_ENDS = {
    UNREAD: (1.0, 0.0),  # rows say so: lo above hi
    NAN: (np.nan, np.nan),
    POSINF: (0.0, np.inf),
    NEGINF: (-np.inf, 0.0),
    BOTH: (-np.inf, np.inf),
    ZERO: (0.0, 0.0),
}


def encode(lo: Sequence[float], hi: Sequence[float]) -> str:
    """Return the ends of readings as base64 of little-endian 16-bit codes.

    Example:
        >>> from anynan._jsonl.codes import decode, encode
        >>> encode([-1.0, float("nan")], [0.5, float("nan")])
        'FIIBAA=='
        >>> [round(float(x), 2) for x in decode('FIIBAA==')[1]]
        [1.0, nan]
    """
    low, high = np.asarray(lo, np.float64), np.asarray(hi, np.float64)
    with np.errstate(all="ignore"):
        size = np.maximum(np.abs(low), np.abs(high))
        bits = np.log2(size, where=np.isfinite(size) & (size > 0), out=np.zeros(size.shape))
    codes = (FIRST + np.rint((bits - LOWEST) * STEPS)).astype("<u2")
    _KINDS.put(codes, low, high)
    return base64.b64encode(codes.tobytes()).decode("ascii")


def decode(text: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return ends of which the larger magnitude is what was written, to about one percent.

    Raises:
        ValueError: If the text is no such code.
    """
    try:
        codes = np.frombuffer(base64.b64decode(text, validate=True), "<u2")
    except binascii.Error as error:
        raise ValueError(str(error)) from None
    high = np.exp2(np.minimum((codes.astype(np.float64) - FIRST) / STEPS + LOWEST, 1023.999))
    low = -high
    for code, (lo, hi) in _ENDS.items():
        held = codes == code
        low[held], high[held] = lo, hi
    return low, high
