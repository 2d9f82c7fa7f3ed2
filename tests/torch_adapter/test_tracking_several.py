"""Several models, trackers and threads in one process."""

import functools
import warnings

import torch
from torch import nn

import anynan
from tests.torch_adapter.stepping import Net, batch, train
from tests.torch_adapter.training import bad


def test_a_tracked_step_with_a_tracked_model_reports_once() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = anynan.torch.track(model, action="record")

    @anynan.torch.track(action="record")
    def step() -> None:
        train(model, optimizer)

    step()
    model.fault.armed = "forward"
    step()
    assert len(bad(step)) + len(bad(inner)) == 1
    assert bad(step)[0].layer == "fault"
    model(batch())  # outside the step the inner tracker watches again
    assert len(bad(inner)) == 1


def test_patterns_need_not_match_in_every_model_of_a_step() -> None:
    one, two = Net(), Net()

    @anynan.torch.track(layers="one.f*")
    def step() -> None:
        two(batch())
        one(batch())

    step()
    assert {r.layer for r in step.history if r.phase == "forward"} == {"one.first", "one.fault"}


def test_a_step_meets_a_new_model_later() -> None:
    @anynan.torch.track(action="record")
    def step(model: nn.Module, x: torch.Tensor) -> None:
        model(x)

    for armed in (False, False, True):
        model = Net()
        model.fault.armed = "forward" if armed else None
        step(model, batch())
    (event,) = bad(step)
    assert event.layer.endswith("fault")
    assert event.step == 2


def test_models_are_found_in_arguments_and_partials() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return train(net, optimizer, x)

    given = anynan.torch.track(step, action="record")
    given(model, batch())
    model.fault.armed = "forward"
    given(model, batch())
    assert [event.layer for event in bad(given)] == ["fault"]
    given.remove()
    model.fault.armed = None
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.1)
    bound = anynan.torch.track(functools.partial(step, model), action="record")
    model.fault.armed = "forward"
    bound(batch())
    assert [event.layer for event in bad(bound)] == ["fault"]


# What is in reach of a logger.


def test_wrappers_do_not_show_in_paths() -> None:
    model = nn.DataParallel(Net())
    model.module.fault.armed = "forward"
    tracker = anynan.torch.track(model, action="record")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(batch())
    assert bad(tracker)[0].layer == "fault"


def test_a_replay_leaves_the_gradients_of_other_models_alone() -> None:
    other = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    seen = []

    class Log(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(other.weight.grad)
            return torch.log(x)

    model = torch.nn.Sequential(Log())
    tracker = anynan.torch.track(model, action="record")
    other(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model(torch.tensor([-1.0]))
    assert len(bad(tracker)) == 1
    assert len(seen) == 3  # the step, its replay, and one with the fix
    assert all(gradient is other.weight.grad for gradient in seen)
