"""Direct checks of values inside a traced function."""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from anynan._base.summary import Summary
from anynan.jax.program.trace import tracing
from anynan.jax.read.probes import CHECKED

_NO_NUMBERS = (
    "inside a traced function an array holds no numbers to look at: call this outside of it, or "
    "track the function with anynan.jax.track, where anynan.check becomes a reading"
)


class Reader:
    """Turn a check inside a traced function into a reading of the enclosing tracker."""

    def owns(self, x: Any) -> bool:
        """Tell whether this is a value of a trace, which holds no numbers yet."""
        return isinstance(x, jax.core.Tracer)

    def probe(self, x: Any) -> None:
        """Mark the value to be read when the program runs."""
        if not tracing():
            raise TypeError(_NO_NUMBERS)
        checkpoint_name(x, CHECKED)

    def summarize(self, x: Any) -> Summary:
        """Refuse: there are no numbers to summarise."""
        raise TypeError(_NO_NUMBERS)
