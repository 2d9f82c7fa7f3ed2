"""Losses as people write them, over NumPy and over JAX: the hunt finds the defect of each.

They are of the kinds that public programs are known for: logarithms and exponentials by hand, and
divisions by what may be 0. Each is found by operation and line, and not with its fix in place.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import anynan

RANDOM = np.random.default_rng(0)
W = RANDOM.normal(size=(4, 3)).astype(np.float32)
Y = np.eye(3, dtype=np.float32)[[0, 1, 2, 0, 1]]
X = RANDOM.normal(size=(5, 4)).astype(np.float32)
SMALL = np.float32(1e-6)
Loss = Callable[[Any, Any], Any]


def cross_entropy(xp: Any, x: Any) -> Any:
    e = xp.exp(x @ W - (x @ W).max(axis=1, keepdims=True))
    p = e / e.sum(axis=1, keepdims=True)
    return -(Y * xp.log(p)).sum(axis=1).mean()


def cross_entropy_mended(xp: Any, x: Any) -> Any:
    z = x @ W - (x @ W).max(axis=1, keepdims=True)
    return -(Y * (z - xp.log(xp.exp(z).sum(axis=1, keepdims=True)))).sum(axis=1).mean()


def softmax_by_hand(xp: Any, x: Any) -> Any:
    e = xp.exp(x)
    return e / e.sum(axis=1, keepdims=True)


def softmax_mended(xp: Any, x: Any) -> Any:
    e = xp.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def directions(xp: Any, x: Any) -> Any:
    length = xp.sqrt((x * x).sum(axis=1, keepdims=True))
    return x / length


def directions_mended(xp: Any, x: Any) -> Any:
    length = xp.sqrt((x * x).sum(axis=1, keepdims=True))
    return x / xp.maximum(length, SMALL)


# With its fix: what it is called with, what can come in, the operation at fault and its code.
PROGRAMS: list[tuple[Loss, Loss, Any, tuple[float, float], str, str]] = [
    (cross_entropy, cross_entropy_mended, X, (-60, 60), "log", "xp.log(p)"),
    (softmax_by_hand, softmax_mended, X, (-200, 200), "exp", "xp.exp(x)"),
    (directions, directions_mended, X, (-2, 2), "divide", "x / length"),
]
KINDS = [pytest.param("numpy"), pytest.param("jax", marks=pytest.mark.tier(2))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda x: x[0].__name__)
def test_a_defect_is_found_by_operation_and_line_and_not_with_its_fix(
    program: tuple[Any, ...], kind: str
) -> None:
    bad, mended, example, domain, name, code = program
    xp: Any = np
    if kind == "jax":
        xp = pytest.importorskip("jax.numpy")

    def found(loss: Loss) -> list[Any]:
        report = anynan.stress(lambda x: loss(xp, x), xp.asarray(example), domain=domain)
        return [each.event.operation for each in report.findings if each.group == "inside"]

    assert any(x.name == name and code in x.source.text for x in found(bad))
    assert found(mended) == []
