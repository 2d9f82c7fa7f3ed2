"""Keras on PyTorch, in a process of its own: Keras chooses its backend when it is imported."""

import pytest

from tests.keras_backends.processes import run

pytestmark = [pytest.mark.tier(2), pytest.mark.multiprocess]


def test_on_torch():
    pytest.importorskip("torch")
    pytest.importorskip("keras")
    run(
        "torch",
        "checks.py",
        "cost_checks.py",
        "torch_checks.py",
        "compare_checks.py",
        "precision_checks.py",
    )
