"""Which layers will overflow soon, if they go on growing as they do."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anynan._readings.history import History
from anynan._runs.past import past

WINDOW = 64  # readings that a line is laid through, and as many that it may be drawn on
NEAR = 6.0  # bits left, at most
_SURE = 2.0  # standard errors


@dataclass(frozen=True, slots=True)
class Forecast:
    """Say where an overflow is to be expected; a suspicion, never more.

    Attributes:
        layer: Layer path.
        phase: ``forward``, or ``parameter`` for a weight.
        parameter: The weight's name.
        dtype: What would overflow.
        steps: In about so many steps.
        bits: Left at the last one.
        rate: Bits used up in each.
    """

    layer: str | None
    phase: str
    parameter: str | None
    dtype: str
    steps: float
    bits: float
    rate: float


@np.errstate(all="ignore")
def forecasts(history: History) -> list[Forecast]:
    """Find what grows towards the end of its dtype, the soonest first.

    A line through the logarithm of the last ``WINDOW`` magnitudes is believed only where it
    rises beyond its own error, little is left, the end would come within as many steps again,
    and both halves rise: the first at half the pace at least, the second as fast as the first,
    each within its own error. Anything else (an outlier, a jump, growth that flattens out) is
    left unsaid.

    Args:
        history: The readings; layers whose magnitudes were not read are unknown.
    """
    seen = past(history, ("forward", "parameter"), WINDOW)
    if seen.steps.size < WINDOW or not len(seen.sites):
        return []
    sizes = seen.sizes
    tops = [np.nan if site.dtype_max is None else site.dtype_max for site in seen.sites]
    bits = np.log2(np.asarray(tops))[:, None] - np.log2(sizes)
    rows = np.flatnonzero(np.isfinite(bits).all(axis=1) & (bits[:, -1] <= 2 * NEAR))
    if not rows.size:
        return []
    rate, error, left = _line(seen.steps, -bits[rows])
    half = WINDOW // 2
    early, early_error, _ = _line(seen.steps[:half], -bits[rows, :half])
    late, late_error, _ = _line(seen.steps[half:], -bits[rows, half:])
    left = np.maximum(-left, 0.0)
    span = seen.steps[-1] - seen.steps[0] + 1
    ahead = left / rate
    believed = (
        (rate > _SURE * error)
        & (left <= NEAR)
        & (ahead <= span)
        & (early + _SURE * early_error >= rate / 2)
        & (late + _SURE * late_error >= np.maximum(early, rate / 2))
    )
    found = [
        Forecast(
            (site := seen.sites[int(rows[at])]).layer, site.phase, site.parameter, site.dtype,
            float(ahead[at]), float(left[at]), float(rate[at]),
        )
        for at in np.flatnonzero(believed)
    ]  # fmt: skip
    return sorted(found, key=lambda each: each.steps)


def _line(
    x: NDArray[np.float64], y: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Lay a line through each row: its slope, the slope's standard error, and where it ends."""
    away = x - x.mean()
    square = (away**2).sum()
    slope = (y * away).sum(axis=1) / square
    middle = y.mean(axis=1)
    rest = y - middle[:, None] - slope[:, None] * away
    error = np.sqrt((rest**2).sum(axis=1) / (x.size - 2) / square)
    return slope, error, middle + slope * away[-1]
