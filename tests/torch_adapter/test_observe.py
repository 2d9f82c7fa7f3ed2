"""One run, operation by operation: what is shown, and what is left."""

from typing import Any

import pytest
import torch

from anynan._trace.op import Op
from anynan.torch.observe import observe
from tests.torch_adapter.training import assert_same, everything


class Gated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
        self.counter = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counter += 1
        h = torch.nn.functional.dropout(self.norm(self.up(x)), 0.5)
        return torch.relu_(h) * x


class Training:
    def __init__(self) -> None:
        self.model = Gated()
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss

    def state(self) -> Any:
        return everything([self.model], [self.optimizer]) | {"own": self.model.counter}


def test_a_gradient_names_its_forward_operation_and_an_update_its_phase() -> None:
    ops: list[tuple[str, int, int | None, str]] = []
    see = lambda op: ops.append((op.name, op.number, op.forward, op.phase))  # noqa: E731
    observe(Training().step, (torch.randn(3, 4),), {}, see)
    (forward,) = [n for name, n, _, phase in ops if (name, phase) == ("linear", "forward")]
    gradients = {of for name, _, of, phase in ops if (name, phase) == ("linear", "backward")}
    assert gradients == {forward}
    assert [phase for name, *_, phase in ops if name == "addcdiv"] == ["optimizer"] * 4
    assert ("mean", "loss") in {(name, phase) for name, *_, phase in ops}


def test_a_training_step_is_left_as_it_was_bit_for_bit() -> None:
    training, x = Training(), torch.randn(3, 4)
    for _ in range(2):
        before, held = training.state(), [*training.model.parameters()]
        versions = [p._version for p in held]
        found = observe(training.step, (x,), {}, lambda op: None)
        assert (found.error, found.notes) == (None, [])
        assert_same(before, training.state())
        assert [p._version for p in held] == versions
        # What it gives does not depend on who looks; and once more with an optimizer's state.
        assert torch.equal(found.value.detach(), training.step(x).detach())


def test_an_exception_of_the_observers_is_raised_and_all_is_put_back() -> None:
    training, x = Training(), torch.randn(3, 4)
    before = training.state()

    def stop(op: Op) -> None:
        if op.phase == "optimizer":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        observe(training.step, (x,), {}, stop)
    assert_same(before, training.state())
