"""What a report of a PyTorch program says, where the words depend on what is tracked and how."""

import pytest
import torch
from torch import nn

import anynan


class Attention(nn.Module):
    """Mask what is below a threshold; with a high one, everything."""

    threshold = -100.0

    def forward(self, x):
        return torch.softmax(x.masked_fill(x < self.threshold, -torch.inf), -1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(4), Attention(), nn.Linear(4, 4)

    def forward(self, x):
        return self.mlp(self.attn(self.norm(x)))


def test_a_trail_in_accumulated_gradients_is_that_of_the_call_that_failed():
    model = nn.Sequential(nn.Linear(3, 4), Block(), Block(), nn.Linear(4, 1))
    anynan.torch.track(model)
    holds = torch.optim.SGD(model.parameters(), 0.1)  # its update would end the step
    with pytest.raises(anynan.NonFiniteError) as caught:
        for i in range(3):
            model[1].attn.threshold = 100.0 if i == 2 else -100.0
            model(torch.randn(2, 3)).sum().backward()
    del holds
    event = caught.value.event
    assert (event.layer, event.call, event.step) == ("1.attn", 2, 0)
    assert [name for name, _ in event.trail] == ["0", "1.norm", "1.attn"]
    assert event.trail[-1] == ("1.attn", None)


class Slope(nn.Module):
    def forward(self, x):
        return x + (x * 0).square().sum(-1, keepdim=True).sqrt()


def test_the_trail_of_a_backward_fault_comes_from_the_loss_and_ends_in_the_layer():
    model = nn.Sequential(nn.Linear(3, 4), Slope(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    anynan.torch.track(model)
    with pytest.raises(anynan.NonFiniteError) as caught:
        model(torch.randn(2, 3)).sum().backward()
    event = caught.value.event
    assert (event.layer, event.phase) == ("1", "backward")
    names = [name for name, _ in event.trail]
    assert names[-2:] == ["2", "1"]
    assert "0" not in names
    assert event.trail[-1][1] is None
    assert all(size is not None for _, size in event.trail[:-1])
