"""A model that is tracked alone: the loss is what its backward pass begins with."""

from typing import Any

import pytest
import torch
from torch import nn

import anynan
from tests.failing import failure
from tests.torch_adapter.cause_parts import Body
from tests.torch_adapter.training import same, sgd, snapshot


def net(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), *layers)


def bad(out: torch.Tensor) -> torch.Tensor:
    """Make a NaN that sends back a finite gradient."""
    return (-1 - out.square().mean()).log()


@pytest.mark.parametrize("level", ["step", "layer", "operation"])
@pytest.mark.parametrize("read", ["auto", "end"])
def test_a_bad_loss_with_a_finite_gradient_is_seen_before_the_update(read: Any, level: Any) -> None:
    model = net()
    optimizer, before = sgd(model), snapshot(model)
    with anynan.torch.track(model, advanced=anynan.Advanced(read=read), level=level):
        event = failure(lambda: (bad(model(torch.ones(3, 4))).backward(), optimizer.step()))
    assert (event.layer, event.phase, event.tensor, event.kind) == (None, "loss", "loss", "nan")
    assert (event.operation.name, event.cause.tag) == ("log", "log_of_negative")
    assert event.operation.source.text == "return (-1 - out.square().mean()).log()"
    assert event.notes == ()
    if level != "operation":
        assert (event.tried.outcome, event.tried.extent) == ("finite", "loss")
    assert same(before, model)


def losses(tracker: anynan.Tracker) -> list[Any]:
    return [(r.step, r.call, r.layer) for r in tracker.history if r.phase == "loss"]


def test_every_pass_of_a_step_has_its_own_and_what_a_layer_gave_is_not_read_twice() -> None:
    model = net()
    optimizer = sgd(model)
    with anynan.torch.track(model) as tracker:
        for _ in range(2):
            for _ in range(2):
                model(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()
    assert losses(tracker) == [(0, 0, None), (0, 1, None), (1, 0, None), (1, 1, None)]

    model = net(Body(lambda x: x.mean()))
    with anynan.torch.track(model) as tracker:
        model(torch.ones(3, 4)).backward()
    assert losses(tracker) == []


def test_of_two_models_one_tells_it() -> None:
    one, two = net(), net()
    with (
        anynan.torch.track(one, action="record") as first,
        anynan.torch.track(two, action="record") as second,
    ):
        bad(two(one(torch.ones(3, 4)))).backward()
    assert len(first.events) + len(second.events) == 1


def test_a_mask_that_the_model_gave_is_no_fault_of_its_own() -> None:
    model = net(Body(lambda x: torch.full_like(x, -torch.inf) + x))
    with anynan.torch.track(model):
        event = failure(lambda: model(torch.ones(3, 4)).softmax(-1).mean().backward())
    assert (event.phase, event.operation.name) == ("loss", "softmax")
    assert event.cause.tag == "softmax_fully_masked"


@pytest.mark.filterwarnings("ignore:Suspect")  # the -Inf that the model gives is told, too
@pytest.mark.parametrize("level", ["step", "layer", "operation"])
def test_a_log_of_zero_that_the_model_gave_is_named(level: Any) -> None:
    model = net(Body(lambda x: (x * 1e4).softmax(-1).log()))
    with anynan.torch.track(model, level=level):
        event = failure(lambda: model(torch.ones(3, 4)).mean().backward())
    assert (event.phase, event.operation.name, event.notes) == ("forward", "log", ())
    assert event.spread.surfaced == "the loss"
