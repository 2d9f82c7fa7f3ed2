"""Bundles of real failing steps in JAX."""

import pytest

import anynan
from tests.bundles import again, run_alone
from tests.flat import split

jax = pytest.importorskip("jax")
jnp = jax.numpy


def fail(folder, fn, *args, **options):
    with pytest.raises(anynan.NonFiniteError, match="saved in"):
        anynan.jax.track(fn, save=folder, **split(options))(*args)
    wide = jax.config.jax_enable_x64
    try:
        return again(folder)
    finally:
        jax.config.update("jax_enable_x64", wide)


@pytest.fixture
def x():
    return jnp.linspace(-1, 1, 6).reshape(2, 3)


def test_an_equation_by_its_primitive(tmp_path, x):
    script, outcome = fail(tmp_path / "b", lambda x: jnp.log(x), x)
    assert "jax.lax.log_p.bind(tensors[" in script
    assert outcome.text == "the same operation gives the same NaN here: 3 NaN, first at [0, 0]"
    assert outcome.printed == run_alone(tmp_path / "b")


def test_a_callback_is_not_run():
    from anynan._calls.calls import BundleError
    from anynan.jax.bundle import DIALECT

    for name in ("primitives.pure_callback_p", "lax.infeed_p", "lax.log", "os.system", "x.log_p"):
        with pytest.raises(BundleError, match="is not run"):
            DIALECT.function(name)
