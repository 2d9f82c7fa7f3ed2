"""The tests of this folder are about 32-bit programs, JAX's default."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _narrow():
    """Put the switch back that other tests turn for the whole process."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture
def _compiled_quickly():
    """Have XLA leave its optimizations out: compiling takes most of the time of large programs."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
