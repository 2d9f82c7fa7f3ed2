"""Keras on JAX, in a process of its own: Keras chooses its backend when it is imported."""

import pytest

from tests.keras_backends.processes import run

pytestmark = [pytest.mark.tier(2), pytest.mark.multiprocess]


def test_on_jax():
    pytest.importorskip("jax")
    pytest.importorskip("keras")
    run("jax", "jax_checks.py")
