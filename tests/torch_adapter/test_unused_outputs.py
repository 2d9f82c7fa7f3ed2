"""Outputs without a gradient: what a model returns beside what the loss is made of."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anynan


class Parts(nn.Module):
    """Return several outputs of one layer."""

    def __init__(self, split: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.split = nn.Linear(4, 4), split

    def forward(self, x: Tensor) -> Any:
        return self.split(self.layer(x))


class Double(torch.autograd.Function):
    """Return two results, and no gradient where only the second is used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, _: Any) -> Tensor | None:
        return first


SPLITS: dict[str, Callable[[Tensor], Any]] = {
    "chunk": lambda h: h.chunk(2, -1),
    "unbind": lambda h: h.unbind(0),
    "std_mean": lambda h: torch.std_mean(h, -1),
    "function": Double.apply,
    "loss and logits": lambda h: (h.square().mean(), h),
}


@pytest.mark.parametrize("tracked", ["model", "step"])
@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("split", list(SPLITS))
def test_a_clean_model_trains_on_one_of_its_outputs(split: str, used: int, tracked: str) -> None:
    torch.manual_seed(0)
    model = Parts(SPLITS[split])
    x = torch.randn(2, 4)

    def step() -> None:
        model(x)[used].sum().backward()

    step()
    plain = model.layer.weight.grad
    model.zero_grad()
    if tracked == "model":
        tracker = anynan.torch.track(model)
        step()
    else:
        tracker = anynan.torch.track(step)
        tracker()
    tracker.flush()
    assert not tracker.events
    grad = model.layer.weight.grad
    assert grad is plain is None or torch.equal(grad, plain)


def test_a_bad_gradient_beside_an_unused_output_is_named() -> None:
    def split(h: Tensor) -> Any:
        return ((h * 0).norm(dim=-1, keepdim=True).pow(2).sqrt() + h).chunk(2, -1)

    model = Parts(split)
    anynan.torch.track(model)
    used, _ = model(torch.randn(2, 4))
    with pytest.raises(anynan.NonFiniteError) as caught:
        used.sum().backward()
    event = caught.value.event
    assert (event.phase, event.operation.name) == ("backward", "sqrt")
