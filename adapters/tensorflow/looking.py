"""Look again at what a sum does not tell: under XLA a NaN, and Infs of both signs."""

from typing import TYPE_CHECKING, Any

import numpy as np

from anynan._diagnosis.evidence import ReplayError
from anynan.tensorflow.traces import Block

if TYPE_CHECKING:
    from anynan.tensorflow.session import Session


def look_again(session: "Session", block: Block, values: Any) -> None:
    """Read exactly what a block says is NaN, and put it in if it is Infs of both signs.

    Where those are only placed, as limits that nothing reaches, they are no failure. What was
    seen to be a NaN is believed from then on.
    """
    nan = np.flatnonzero(np.isnan(values[:, 2])).tolist()
    doubted = [i for i in nan if i not in block.confirmed]
    step = session.state().step
    if not doubted or step is None or not session.options.replay:
        return
    from anynan.tensorflow.replay import look

    try:
        found = look(session, step, block, doubted)
    except ReplayError:
        block.confirmed.update(doubted)
        return
    for i, row in zip(doubted, found, strict=True):
        # What only XLA makes does not show here, and stays what it is.
        if np.isinf(row[:2]).any() and not np.isnan(row).any():
            values[i] = row
        else:
            block.confirmed.add(i)
