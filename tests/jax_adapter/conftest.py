"""The tests of this folder are about 32-bit programs, JAX's default."""

import jax
import pytest

from tests.jax_adapter.watching import watching


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


@pytest.fixture
def found():
    """Watch the whole test, and give what is found."""
    with watching() as found:
        yield found


@pytest.fixture
def library():
    """Give what compiles a function, as code of a library does."""
    text = """
def compiled(fn, **given): return jax.jit(fn, **given)
def solved(fn): return equinox.filter_jit(fn)
def sloped(fn): return jax.value_and_grad(fn)
def mapped(fn): return jax.vmap(fn)
def sampled(model, *given): return model(*given)
def checked(scale):
    if not bool(jax.numpy.isfinite(scale).all()): raise ValueError("invalid scale")
    return scale
"""
    file = jax.__file__.replace("jax/__init__.py", "solvers/solve.py")
    scope = {"__name__": "solvers.solve", "jax": jax, "equinox": pytest.importorskip("equinox")}
    exec(compile(text, file, "exec"), scope)
    return scope
