"""Rows that nobody read yet, skipped updates and bad updates."""

import copy
import gc
import subprocess
import sys
import textwrap
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import anynan
from anynan import AnynanWarning, NonFiniteError
from tests.torch_adapter.stepping import Net, loss_of, same, sgd, snapshot, train
from tests.torch_adapter.training import bad

# Rows nobody read.


def test_unread_rows_are_warned_about_when_the_model_goes() -> None:
    model = Net()
    model.fault.armed = "forward"
    anynan.torch.track(model, advanced=anynan.Advanced(read="end"))
    loss_of(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        del model
        gc.collect()
    assert any("NaN" in str(item.message) for item in said)


@pytest.mark.parametrize("read", ["end", 10])
def test_unread_rows_of_a_thread_that_ended(read: Any) -> None:
    model = Net()
    model.fault.armed = "forward"
    tracker = anynan.torch.track(model, advanced=anynan.Advanced(read=read))
    thread = threading.Thread(target=loss_of, args=(model,))
    thread.start()
    thread.join()
    assert not tracker.events
    with pytest.warns(AnynanWarning, match="fault"):
        tracker.remove()


@pytest.mark.tier(2)
def test_unread_rows_at_interpreter_exit() -> None:
    code = """
        import anynan, torch
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        tracker = anynan.torch.track(model, read=100)
        with torch.no_grad():
            model(torch.full((1, 2), torch.nan))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert "AnynanWarning: NaN came in with the batch of step 0" in done.stderr


def test_a_batch_that_the_user_drops_is_a_step_of_its_own() -> None:
    model = Net()
    optimizer = sgd(model)
    tracker = anynan.torch.track(model, action="record")
    for i in range(5):
        model.fault.armed = "forward" if i in (1, 2) else None
        loss = loss_of(model)
        if not loss.isfinite():
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert [(event.step, event.times) for event in bad(tracker)] == [(1, 2)]
    assert tracker.history.steps() == [0, 1, 2, 3, 4]


# Weights are never updated from bad gradients.


@pytest.mark.parametrize("read", ["immediate", "end"])
@pytest.mark.parametrize("armed", ["forward", "backward"])
def test_skip_leaves_weights_and_state_and_goes_on(read: Any, armed: str) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tracker = anynan.torch.track(model, action="skip", advanced=anynan.Advanced(read=read))
    for _ in range(2):
        train(model, optimizer)
    weights, state = snapshot(model), copy.deepcopy(optimizer.state_dict())
    model.fault.armed = armed
    with pytest.warns(AnynanWarning, match="the update of this step is dropped"):
        train(model, optimizer)
    assert same(weights, model)
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)
    train(model, optimizer)  # the second in a row is dropped without another word
    assert same(weights, model)
    model.fault.armed = None
    train(model, optimizer)
    assert not same(weights, model)
    assert all(p.isfinite().all() for p in model.parameters())
    assert [(event.step, event.times) for event in bad(tracker)] == [(2, 2)]
    assert tracker.history.steps() == [0, 1, 2, 3, 4]


# A bad update from finite gradients.


class Divide(torch.optim.Optimizer):
    """A hand-made update that divides by its own running average."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state.setdefault(p, {"average": torch.zeros_like(p)})
                    p.sub_(p.grad / state["average"])


@pytest.mark.parametrize("read", ["immediate", "end"])
@pytest.mark.parametrize("whole_step", [True, False])
def test_a_bad_update_names_parameter_gradient_and_state(read: Any, whole_step: bool) -> None:
    model = Net()
    optimizer = Divide(model.parameters())
    target: Any = (lambda: train(model, optimizer)) if whole_step else model
    tracker = anynan.torch.track(target, advanced=anynan.Advanced(read=read))
    run = tracker if whole_step else lambda: train(model, optimizer)
    with pytest.raises(NonFiniteError) as caught:
        for _ in range(2):
            run()
    event = caught.value.event
    assert (event.phase, event.step) == ("optimizer", 0)
    assert event.parameter.rpartition(".")[2] in ("weight", "bias")
    assert event.since == (0, 1)
    assert event.cause.tag == "optimizer_step_too_large"
    assert event.spread.surfaced is not None


def test_calls_without_gradients_are_no_iterations_of_a_training() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with anynan.torch.track(model, action="record") as tracker:
        for iteration in range(4):
            with torch.no_grad():
                for _ in range(3):
                    model(torch.rand(2, 4))
            loss = model(torch.rand(2, 4)).square().mean() / (iteration != 2)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        (event,) = tracker.events
        assert (event.step, event.training_step) == (11, 2)
        assert "iteration 2 (call 11)" in anynan.reports.render(event)
        assert anynan.Event.from_json(event.to_json()) == event
        assert "in 4 iterations and 12 calls without gradients" in tracker.report()


def test_a_program_that_takes_no_gradients_counts_its_calls() -> None:
    model = nn.Linear(4, 1)
    with anynan.torch.track(model, action="record") as tracker, torch.no_grad():
        for call in range(3):
            model(torch.full((2, 4), float("nan") if call == 2 else 1.0))
        (event,) = tracker.events
        assert (event.step, event.training_step) == (2, None)
        assert "in 3 steps" in tracker.report()
