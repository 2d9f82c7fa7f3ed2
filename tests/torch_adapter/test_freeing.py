"""Tracking keeps nothing alive and leaves nothing in copies."""

import copy
import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import anynan
from anynan._steps.tracked import inside
from tests.flat import split
from tests.torch_adapter.training import live_tensors, sgd, small, stepping


@pytest.mark.parametrize(
    ("whole_step", "options"),
    [
        (False, {}),
        (False, {"read": "end", "parameters": True}),
        (False, {"stats": ("rms",)}),
        pytest.param(False, {"level": "operation"}, marks=pytest.mark.tier(2)),
        (True, {}),
        (True, {"read": "end"}),
        pytest.param(True, {"level": "operation", "parameters": True}, marks=pytest.mark.tier(2)),
    ],
    ids=str,
)
def test_fifty_steps_leak_no_tensor(whole_step: bool, options: Any) -> None:
    model = small()
    step: Any = stepping(model, torch.optim.AdamW(model.parameters()))
    tracker = anynan.torch.track(step if whole_step else model, **split(options))
    counts = []
    for i in range(50):
        (tracker if whole_step else step)(torch.randn(3, 4))
        if i in (4, 49):
            counts.append(live_tensors())
    assert counts[0] == counts[1]


def test_failing_steps_leak_no_tensor() -> None:
    model = small()
    step = stepping(model, torch.optim.AdamW(model.parameters()))
    anynan.torch.track(model, action="record")
    counts = []
    for i in range(16):
        model[2].armed = "forward" if i % 2 else None
        step(torch.randn(3, 4))
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.1)
        if i in (9, 15):
            counts.append(live_tensors())
    assert counts[0] == counts[1]


@pytest.mark.parametrize("detach", [True, False])
def test_a_hidden_state_carried_on_is_not_kept(detach: bool) -> None:
    cell = nn.GRUCell(3, 3)
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.01)
    tracker = anynan.torch.track(cell)
    hidden = torch.zeros(2, 3)
    states: list[weakref.ref[torch.Tensor]] = []
    for _ in range(10):
        hidden = cell(torch.randn(2, 3), hidden)
        if detach:
            hidden.sum().backward()
            optimizer.step()
            hidden = hidden.detach()
        states.append(weakref.ref(hidden))
    if not detach:
        hidden.sum().backward()
        optimizer.step()
    assert [ref() is not None for ref in states] == [False] * 9 + [True]
    assert not tracker.events


def test_a_loss_that_is_kept_keeps_no_batch() -> None:
    model = small()
    losses: list[torch.Tensor] = []  # with their graphs
    batches: list[weakref.ref[torch.Tensor]] = []
    step = stepping(model)
    anynan.torch.track(model)
    for _ in range(3):
        x = torch.randn(3, 4)
        batches.append(weakref.ref(x))
        losses.append(step(x))
    del x
    assert [ref() for ref in batches] == [None] * 3


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("options", [{}, {"read": "end"}], ids=str)
@pytest.mark.parametrize("until", ["attach", "forward", "update", "no_grad"])
def test_a_model_is_freed_at_once(options: Any, until: str) -> None:
    model = small()
    tracker = anynan.torch.track(model, **split(options))
    optimizer = sgd(model)
    if until != "attach":
        with torch.set_grad_enabled(until != "no_grad"):
            loss = model(torch.randn(3, 4)).sum()
        if until == "update":
            loss.backward()
            optimizer.step()
        del loss
    refs = [weakref.ref(model), weakref.ref(model[0].weight), weakref.ref(model[2])]
    del model, optimizer
    assert [ref() for ref in refs] == [None] * 3
    assert inside(tracker).fn is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracker.remove()


def test_a_copy_made_while_tracked_holds_no_hooks() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    model.register_forward_hook(own := lambda *_: None)
    anynan.torch.track(model)
    parts = copy.deepcopy(model).modules()
    hooks = [[*x._forward_hooks.values(), *x._forward_pre_hooks.values()] for x in parts]
    assert hooks == [[own], [], []]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_tracked_model_can_be_scripted_and_is_tracked_still() -> None:
    real = torch.jit.script
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with anynan.torch.track(model, action="record") as tracker:
        hooks = [list(x._forward_hooks) for x in model.modules()]
        assert torch.jit.script(model)(torch.ones(1, 2)).shape == (1, 2)
        assert [list(x._forward_hooks) for x in model.modules()] == hooks
        assert torch.jit.script(at_most_two)(torch.ones(1) * 3) == 2
        model(torch.full((1, 2), torch.nan))
    assert tracker.events
    assert torch.jit.script is real


def at_most_two(x: torch.Tensor) -> torch.Tensor:
    """Stand for a function that the user scripts."""
    return x.clamp(max=2.0)
