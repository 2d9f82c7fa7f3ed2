"""What the hooks on outputs leave to the user's own code."""

import io
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import anynan
from tests.torch_adapter.cause_parts import Body
from tests.torch_adapter.training import Fault, bad, sgd


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), Fault(), nn.Linear(4, 2))


@pytest.mark.parametrize("read", ["immediate", "end"])
def test_a_gradient_is_read_after_the_users_own_hooks(read: Any) -> None:
    model = net()
    model[1].armed = "backward"
    tracker = anynan.torch.track(model, action="record", advanced=anynan.Advanced(read=read))
    hidden: torch.Tensor = model[0](torch.randn(3, 4))

    def repair(grad: torch.Tensor) -> torch.Tensor:
        return grad.nan_to_num(0.0, 0.0, 0.0)

    hidden.register_hook(lambda grad: grad * math.nan).remove()
    hidden.register_hook(repair)
    with anynan.expect(nan=True, posinf=True):  # the fault's own output and gradient
        model[2](model[1](hidden)).sum().backward()
    tracker.remove()
    assert not bad(tracker)
    assert model[0].weight.grad.isfinite().all()


def test_a_hook_that_a_layer_puts_on_its_own_output_is_kept() -> None:
    class Clipped(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            out.register_hook(lambda grad: grad.clamp(-1, 1))
            return out

    model = nn.Sequential(Clipped(4, 4), nn.Linear(4, 1))
    tracker = anynan.torch.track(model)
    optimizer = sgd(model)
    (model(torch.ones(2, 4)) * 1e3).sum().backward()
    optimizer.step()
    read = [r for r in tracker.history if r.phase == "backward" and not r.site.parameter]
    seen = {r.layer: r.absmax for r in read}
    assert seen[""] == seen["1"] == 1e3
    assert seen["0"] == 1


def test_saving_an_output_warns_of_no_hook() -> None:
    model = net()
    anynan.torch.track(model)
    out = model(torch.randn(3, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(model[0](torch.randn(3, 4)), io.BytesIO())
    out.sum().backward()


@pytest.mark.parametrize("level", ["step", "layer", "operation"])
def test_an_exception_passes_a_module_with_hooks_behind_anynans(level: Any) -> None:
    def refuse(x: torch.Tensor) -> torch.Tensor:
        if x.sum() < 0:
            raise KeyError("the program's own")
        return x

    model = nn.Sequential(Body(refuse), nn.Linear(2, 2))
    with anynan.torch.track(model, level=level):
        called = []
        later = model.register_forward_hook(lambda *_: called.append(1))
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(KeyError, match="the program's own"):
            model(-torch.ones(1, 2))
        later.remove()  # it is still where it was put
        model(torch.ones(1, 2))
    assert called == [1]
    assert not model._forward_hooks
