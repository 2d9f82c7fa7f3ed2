"""Keras on JAX, in a process of its own: Keras chooses its backend when it is imported."""

import pytest

from tests.keras_backends.processes import run

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("checks", ["checks.py", "jax_checks.py", "compare_checks.py"])
def test_on_jax(checks):
    pytest.importorskip("jax")
    pytest.importorskip("keras")
    run("jax", checks)
