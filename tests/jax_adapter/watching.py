"""How a test has a whole program watched."""

import jax

from anynan._everywhere import Found, watch_everything
from anynan.options import Options


def watched(**options):
    """Give what is found; go on to end it."""
    real = jax.jit, jax.pmap
    found = Found()
    end = watch_everything(Options(**options), found)
    assert jax.jit is not real[0]
    yield found
    end()
    assert (jax.jit, jax.pmap) == real
