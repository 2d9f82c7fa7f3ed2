"""Losses as people write them, over NumPy and over JAX: the hunt finds the defect of each.

They are of the kinds that public programs are known for: logarithms and exponentials by hand, and
divisions by what may be 0. Each is found by operation and line, and not with its fix in place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import anynan

RANDOM = np.random.default_rng(0)
W = RANDOM.normal(size=(4, 3)).astype(np.float32)
Y = np.eye(3, dtype=np.float32)[[0, 1, 2, 0, 1]]
X = RANDOM.normal(size=(5, 4)).astype(np.float32)
P = RANDOM.random((5, 3)).astype(np.float32)
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


def entropy(xp: Any, p: Any) -> Any:
    return -(p * xp.log(p)).sum(axis=1).mean()


def entropy_mended(xp: Any, p: Any) -> Any:
    return -(p * xp.log(xp.maximum(p, SMALL))).sum(axis=1).mean()


def divergence(xp: Any, p: Any) -> Any:
    return (Y * xp.log((Y + SMALL) / p)).sum(axis=1).mean()


def divergence_mended(xp: Any, p: Any) -> Any:
    return (Y * xp.log((Y + SMALL) / xp.maximum(p, SMALL))).sum(axis=1).mean()


@dataclass
class Program:
    """Hold a program: what it is called with, and where its defect is."""

    bad: Loss
    mended: Loss
    example: Any
    domain: tuple[float, float]
    operations: tuple[str, ...]
    code: str


PROGRAMS = [
    Program(cross_entropy, cross_entropy_mended, X, (-60, 60), ("log",), "xp.log(p)"),
    Program(softmax_by_hand, softmax_mended, X, (-200, 200), ("exp",), "xp.exp(x)"),
    Program(directions, directions_mended, X, (-2, 2), ("divide",), "x / length"),
    Program(entropy, entropy_mended, P, (0, 1), ("log",), "xp.log(p)"),
    Program(divergence, divergence_mended, P, (0, 1), ("divide",), "/ p"),
]
KINDS = [pytest.param("numpy"), pytest.param("jax", marks=pytest.mark.tier(2))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda x: x.bad.__name__)
def test_a_defect_is_found_by_operation_and_line_and_not_with_its_fix(
    program: Program, kind: str
) -> None:
    xp: Any = np
    if kind == "jax":
        pytest.importorskip("jax")
        import jax.numpy as xp
    x = xp.asarray(program.example)

    def found(loss: Loss) -> list[Any]:
        report = anynan.stress(lambda x: loss(xp, x), x, domain=program.domain)
        return [each for each in report.findings if each.group == "inside"]

    operations = [each.event.operation for each in found(program.bad)]
    assert any(x.name in program.operations and program.code in x.source.text for x in operations)
    assert found(program.mended) == []
