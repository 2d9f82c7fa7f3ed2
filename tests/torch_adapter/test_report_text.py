"""What a report of a PyTorch program says, where the words depend on what is tracked and how."""

import pytest
import torch
from torch import nn

import anynan


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


def test_weights_that_change_while_no_layer_runs_are_still_told():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tracker = anynan.torch.track(lambda x: model(x).sum())
    model.weight.grad = torch.ones(1, 3)
    with pytest.warns(anynan.AnynanWarning, match="no watched layer was seen running"):
        optimizer.step()
    tracker.remove()


def test_the_operands_of_linear_have_their_names_in_the_order_in_which_it_is_written():
    layer = nn.Linear(3, 2)
    anynan.torch.track(layer)
    with pytest.raises(anynan.NonFiniteError) as caught:
        layer(torch.full((4, 3), torch.nan))
    operation = caught.value.event.operation
    assert operation.operands == ("x", "weight", "bias")
    assert [x.shape for x in operation.inputs] == [(4, 3), (3, 2), (2,)]
    rows = [x.split()[1] for x in str(caught.value).splitlines() if x.startswith("  input ")]
    assert rows == ["x:", "weight:", "bias:"]
    assert anynan.Event.from_json(caught.value.event.to_json()).operation == operation
