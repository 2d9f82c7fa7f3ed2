"""A hunt over MLX's models, losses and steps."""

from typing import Any

import pytest

import anynan

mx = pytest.importorskip("mlx.core")
from mlx import nn, optimizers  # noqa: E402


class Directions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(4, 3), nn.Dropout(0.1)

    def __call__(self, x: Any) -> Any:
        x = x / mx.linalg.norm(x, axis=1, keepdims=True)
        return self.inner(self.drop(x))


def _place(finding: Any) -> tuple[str, str]:
    operation = finding.event.operation
    return operation.name, operation.source.text


@pytest.mark.tier(2)
def test_a_model_is_moved_to_a_row_of_zeros() -> None:
    first = anynan.stress(Directions(), mx.random.normal((8, 4))).findings[0]
    assert first.words == "x: a row of zeros"
    assert _place(first)[0] == "divide"
    assert first.event.tried is not None


@pytest.mark.tier(2)
def test_a_training_step_is_what_it_was_after_a_hunt() -> None:
    net, optimizer = nn.Linear(3, 1), optimizers.Adam(0.1)
    gradients = nn.value_and_grad(net, lambda x: mx.sqrt(mx.square(net(x)).sum()))

    def step(x: Any) -> Any:
        loss, slopes = gradients(x)
        optimizer.update(net, slopes)
        return loss

    step(mx.ones((2, 3)))
    before, key = net.weight.tolist(), mx.random.state[0].tolist()
    report = anynan.stress(step, mx.random.normal((2, 3)))
    assert report.margins
    assert (net.weight.tolist(), optimizer.step.item()) == (before, 1)
    assert mx.random.state[0].tolist() != key  # the example was drawn, and nothing since
