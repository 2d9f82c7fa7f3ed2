"""Where a step ends, when it is read, and what is never updated from a bad one."""

import gc
import math
import threading
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import anynan
from anynan import AnynanWarning, NonFiniteError
from tests.failing import failure
from tests.flat import split
from tests.torch_adapter.training import Net, loss_of, same, sgd, small, snapshot, train


@pytest.mark.parametrize("read", ["immediate", "end"])
def test_a_step_ends_when_the_optimizer_steps(read: Any) -> None:
    model = Net()
    optimizer = sgd(model)
    tracker = anynan.torch.track(model, advanced=anynan.Advanced(read=read))
    for _ in range(3):
        train(model, optimizer)
    assert tracker.history.steps() == [0, 1, 2]
    for step in range(3):
        read_then = [r for r in tracker.history if r.step == step]
        assert [r.phase for r in read_then].count("input") == 1
        weights = {r.site.parameter for r in read_then}
        assert {"first.weight", "first.bias", "last.weight", "last.bias"} <= weights


def test_optimizers_that_step_in_the_backward_pass() -> None:
    model = Net()
    for p in model.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)
        p.register_post_accumulate_grad_hook(lambda p, own=optimizer: own.step() or own.zero_grad())
    tracker = anynan.torch.track(model)
    for _ in range(3):
        loss_of(model).backward()
    tracker.flush()
    assert tracker.history.steps() == [0, 1]
    backward = {r.layer for r in tracker.history if (r.step, r.phase) == (1, "backward")}
    assert backward == {"first", "fault", "last", ""}
    model.fault.armed, before = "backward", model.first.weight.detach().clone()
    event = failure(lambda: loss_of(model).backward())
    assert (event.layer, event.step, event.operation.name) == ("fault", 3, "sqrt")
    assert torch.equal(before, model.first.weight)


def test_somebody_elses_scaler_is_no_excuse() -> None:
    scaler, other, model = torch.amp.GradScaler("cpu", init_scale=2.0), Net(), Net()
    scaler.scale(loss_of(other)).backward()
    scaler.step(sgd(other))  # a scaler that is alive, and in use elsewhere
    scaler.update()
    model.fault.armed = "backward"
    optimizer, before = sgd(model), snapshot(model)
    anynan.torch.track(model)
    assert failure(train, model, optimizer).phase == "backward"
    assert same(before, model) and scaler.is_enabled()


def test_unread_rows_are_warned_about_when_the_model_goes() -> None:
    model = Net()
    model.fault.armed = "forward"
    anynan.torch.track(model, advanced=anynan.Advanced(read="end"))
    loss_of(model)
    with pytest.warns(AnynanWarning, match="NaN"):
        del model
        gc.collect()


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


def test_calls_without_gradients_are_no_iterations_of_a_training() -> None:
    model = nn.Linear(4, 1)
    optimizer = sgd(model)
    with anynan.torch.track(model, action="record") as tracker:
        for iteration in range(4):
            with torch.no_grad():
                for _ in range(3):
                    model(torch.rand(2, 4))
            (model(torch.rand(2, 4)).square().mean() / (iteration != 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
        (event,) = tracker.events
        assert (event.step, event.training_step) == (11, 2)
        assert "iteration 2 (call 11)" in anynan.reports.render(event)
        assert anynan.Event.from_json(event.to_json()) == event
        assert "in 4 iterations and 12 calls without gradients" in tracker.report()


def test_removed_between_forward_and_backward() -> None:
    model = small()
    tracker = anynan.torch.track(model)
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

    with anynan.torch.track(model if tracked == "model" else step, **split(options)) as tracker:
        run = step if tracked == "model" else tracker
        run(torch.randn(5, 3))
        tracker.flush()
        assert not tracker.events
        model[0].weight.data.fill_(math.nan)
        with pytest.raises(NonFiniteError, match=r"0\.weight"):
            run(torch.randn(5, 3))


def test_layers_that_never_ran_are_listed() -> None:
    model = nn.Sequential(OrderedDict(used=nn.Linear(2, 2)))
    model.used.idle = nn.Linear(2, 2)
    with anynan.torch.track(model) as tracker, torch.no_grad():
        model(torch.randn(1, 2))
        text = tracker.report()
    assert "used.idle" in text and "used" not in text.partition("used.idle")[2]
