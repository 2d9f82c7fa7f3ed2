"""What fails inside a tracked step leaves a sane state."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import anynan
from anynan import NonFiniteError
from tests.flat import split
from tests.torch_adapter.stepping import small

# Never silently blind.


def test_layers_that_never_ran_are_listed() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts["used"](x)

    outer = Outer()
    tracker = anynan.torch.track(outer)
    with torch.no_grad():
        outer(torch.randn(1, 2))
    text = tracker.report()
    assert "parts.idle" in text
    assert "parts.used" not in text.partition("parts.idle")[2]


# Interruptions.


@pytest.mark.parametrize("read", ["immediate", "end"])
def test_removed_between_forward_and_backward(read: Any) -> None:
    model = small()
    tracker = anynan.torch.track(model, advanced=anynan.Advanced(read=read))
    model[2].armed = "backward"
    loss = model(torch.randn(3, 4)).sum()
    tracker.remove()
    loss.backward()  # its hooks are in the graph, and rest
    assert not tracker.events


def test_a_fused_path_that_hooks_turn_off_is_said_in_the_report() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with anynan.torch.track(layer) as tracker, torch.no_grad():
        layer(torch.ones(1, 3, 8))
        assert tracker.report().count("fused path") == 1
    with anynan.torch.track(nn.Linear(2, 2)) as tracker:
        assert "fused path" not in tracker.report()


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("tracked", ["model", "step"])
@pytest.mark.parametrize("options", [{}, {"parameters": True}, {"level": "operation"}], ids=str)
def test_lazy_modules(options: Any, tracked: str) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(1))

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    if tracked == "model":
        tracker = anynan.torch.track(model, **split(options))
    else:
        step = tracker = anynan.torch.track(step, **split(options))
    step(torch.randn(5, 3))
    tracker.flush()
    assert not tracker.events
    model[0].weight.data.fill_(math.nan)
    with pytest.raises(NonFiniteError, match=r"0\.weight"):
        step(torch.randn(5, 3))
