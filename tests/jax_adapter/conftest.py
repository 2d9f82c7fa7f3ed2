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
def fully_optimized():
    """Compile as a program of a user's is compiled, which takes longer."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
