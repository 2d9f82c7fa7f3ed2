"""Keras on PyTorch, in a process of its own: Keras chooses its backend when it is imported."""

import pytest

from tests.keras_backends.processes import run

pytestmark = [pytest.mark.tier(2), pytest.mark.multiprocess]


def test_on_torch():
    pytest.importorskip("torch")
    pytest.importorskip("keras")
    run("torch", "torch_checks.py")
