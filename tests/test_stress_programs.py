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


def logistic_cost(xp: Any, x: Any) -> Any:
    h = 1 / (1 + xp.exp(-xp.clip(x @ W[:, :1], -80, 80)))
    return -(Y[:, :1] * xp.log(h) + (1 - Y[:, :1]) * xp.log(1 - h)).mean()


def logistic_cost_mended(xp: Any, x: Any) -> Any:
    h = xp.clip(1 / (1 + xp.exp(-xp.clip(x @ W[:, :1], -80, 80))), SMALL, 1 - SMALL)
    return -(Y[:, :1] * xp.log(h) + (1 - Y[:, :1]) * xp.log(1 - h)).mean()


def free_energy(xp: Any, v: Any) -> Any:
    hidden = xp.log(1 + xp.exp(v @ W)).sum(axis=1)
    return (v.sum(axis=1) + hidden).mean()  # how far below 0 the energy is


def free_energy_mended(xp: Any, v: Any) -> Any:
    hidden = xp.logaddexp(0, v @ W).sum(axis=1)
    return (v.sum(axis=1) + hidden).mean()  # how far below 0 the energy is


def tanh_by_hand(xp: Any, x: Any) -> Any:
    up, down = xp.exp(x), xp.exp(-x)
    return ((up - down) / (up + down)).mean()


def tanh_mended(xp: Any, x: Any) -> Any:
    return xp.tanh(x).mean()


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


def standardised(xp: Any, x: Any) -> Any:
    spread = xp.sqrt(((x - x.mean()) ** 2).mean())
    return (x - x.mean()) / spread


def standardised_mended(xp: Any, x: Any) -> Any:
    spread = xp.sqrt(((x - x.mean()) ** 2).mean())
    return (x - x.mean()) / (spread + SMALL)


def divergence(xp: Any, p: Any) -> Any:
    return (Y * xp.log((Y + SMALL) / p)).sum(axis=1).mean()


def divergence_mended(xp: Any, p: Any) -> Any:
    return (Y * xp.log((Y + SMALL) / xp.maximum(p, SMALL))).sum(axis=1).mean()


def reconstruction(xp: Any, x: Any) -> Any:
    z = 0.5 * (xp.tanh(x @ W @ W.T) + 1)
    return -(P[:, :1] * xp.log(z) + (1 - P[:, :1]) * xp.log(1 - z)).sum(axis=1).mean()


def reconstruction_mended(xp: Any, x: Any) -> Any:
    z = xp.clip(0.5 * (xp.tanh(x @ W @ W.T) + 1), SMALL, 1 - SMALL)
    return -(P[:, :1] * xp.log(z) + (1 - P[:, :1]) * xp.log(1 - z)).sum(axis=1).mean()


def distance_weights(xp: Any, x: Any) -> Any:
    apart = ((x[1:] - x[:-1]) ** 2).sum(axis=1)
    return (1 / apart).sum()


def distance_weights_mended(xp: Any, x: Any) -> Any:
    apart = ((x[1:] - x[:-1]) ** 2).sum(axis=1)
    return (1 / (apart + SMALL)).sum()


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
    Program(logistic_cost, logistic_cost_mended, X, (-60, 60), ("log",), "xp.log(h)"),
    Program(free_energy, free_energy_mended, X, (-200, 200), ("exp",), "xp.exp(v @ W)"),
    Program(tanh_by_hand, tanh_mended, X, (-200, 200), ("exp",), "xp.exp(-x)"),
    Program(directions, directions_mended, X, (-2, 2), ("divide",), "x / length"),
    Program(entropy, entropy_mended, P, (0, 1), ("log",), "xp.log(p)"),
    Program(standardised, standardised_mended, X, (-2, 2), ("divide",), "/ spread"),
    Program(divergence, divergence_mended, P, (0, 1), ("divide",), "/ p"),
    Program(reconstruction, reconstruction_mended, X, (-60, 60), ("log",), "xp.log(z)"),
    Program(distance_weights, distance_weights_mended, X, (-3, 3), ("divide",), "1 / apart"),
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
