"""How a test has a whole program watched."""

from contextlib import contextmanager

import jax

from anynan._everywhere import Found, watch_everything
from anynan.options import Options


@contextmanager
def watching(action="record"):
    """Give what is found; nothing of JAX's stays changed."""
    real = jax.jit, jax.pmap
    found = Found()
    end = watch_everything(Options(action=action, level="step"), found)
    assert jax.jit is not real[0]
    try:
        yield found
    finally:
        end()
    assert (jax.jit, jax.pmap) == real
