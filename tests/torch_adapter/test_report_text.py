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


class Generator(nn.Sequential):
    pass


def failing(model):
    """Spoil what a tracked model is given, and return what is said."""
    with pytest.raises(anynan.NonFiniteError) as caught:
        model(torch.full((2, 3), -1.0))
    return caught.value


def logarithm():
    return type("Log", (nn.Module,), {"forward": lambda self, x: torch.log(x)})()


def test_with_two_tracked_models_a_report_says_which_it_is_about():
    generator = Generator(logarithm(), nn.Linear(3, 1))
    alone = anynan.torch.track(generator)
    assert "Generator" not in str(failing(generator))
    judge = nn.Sequential(logarithm(), nn.Linear(3, 1))
    with anynan.torch.track(judge):
        error = failing(generator)
        assert str(error).split("\n")[2:4] == ["  model   Generator", "  layer   0"]
        assert error.event.target == "model Generator"
        assert "  model   Sequential\n" in str(failing(judge))
        twin = nn.Sequential(logarithm())
        with anynan.torch.track(twin):
            assert failing(judge).event.target == "model Sequential 1"
            assert "  model   Sequential 2\n" in str(failing(twin))
    assert "Generator" not in str(failing(generator))
    alone.remove()


def test_a_tracked_function_beside_a_model_changes_nothing_in_its_report():
    model = nn.Sequential(logarithm())
    anynan.torch.track(model)
    anynan.torch.track(lambda x: x)
    assert "model   " not in str(failing(model))
