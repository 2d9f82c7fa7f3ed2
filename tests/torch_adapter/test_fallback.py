"""What a report is made from where a second run does not show the fault."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn

import anynan
from anynan import Event
from anynan._steps.framework import EVERY_OPERATION
from anynan._steps.tracked import inside
from tests.failing import failure
from tests.flat import split
from tests.torch_adapter.cause_parts import Body
from tests.torch_adapter.training import WORDS, Fault, Net, bad, live_tensors, sgd, train


def named(event: Event) -> tuple[str | None, str, str | None]:
    return event.layer, event.phase, event.operation.name if event.operation else None


def only(tracked: str, model: nn.Module, step: Any, **options: Any) -> Event:
    """Track a model or its step for one call, and give the one bad event that is recorded."""
    target = model if tracked == "model" else step
    with anynan.torch.track(target, **split({"action": "record", **options})) as tracker:
        (step if tracked == "model" else tracker)(torch.ones(2, 2))
    (event,) = bad(tracker)
    return event


class Odd(nn.Module):
    """Take something from a queue, which nobody can put back: a second run differs."""

    def __init__(self, *functions: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.queue: SimpleQueue[Any] = SimpleQueue()
        for function in functions:
            self.queue.put(function)
        self.replays = list[bool]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.replays.append(anynan.replaying())
        x = self.linear(x)
        return x if self.queue.empty() else self.queue.get()(x)


def nan_forward(x: torch.Tensor) -> torch.Tensor:
    return (x * 0 - 1).log()


def nan_backward(x: torch.Tensor) -> torch.Tensor:
    return (x * 0).sqrt()


TOLD = {nan_forward: ("forward", "log"), nan_backward: ("backward", "sqrt")}


# level="operation" saw the first run.


@pytest.mark.parametrize("read", ["auto", "end"])
@pytest.mark.parametrize("tracked", ["model", "step"])
@pytest.mark.parametrize("fault", [nan_forward, nan_backward])
def test_level_operation_tells_of_the_run_it_saw(fault: Any, tracked: str, read: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Odd(fault))

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    event = only(tracked, model, step, level="operation", read=read)
    assert named(event) == ("1", *TOLD[fault])
    assert model[1].replays == [False]
    assert not event.notes


@pytest.mark.tier(2)
def test_level_operation_runs_compiled_code_again_which_it_cannot_see() -> None:
    compiled = torch.compile(nn.Sequential(nn.Linear(2, 2), Body(nan_forward)), backend="eager")
    event = only("model", compiled, lambda x: compiled(x).sum().backward(), level="operation")
    assert named(event) == ("1", "forward", "log")


# A step that cannot be run again: the model's own call can.


@pytest.mark.parametrize("read", ["auto", "end"])
@pytest.mark.parametrize("phase", WORDS)
def test_the_models_own_call_is_run_again_where_the_step_shows_nothing(phase, read) -> None:
    model = Net()
    model.fault.armed, model.fault.at = phase, True
    data: SimpleQueue[Any] = SimpleQueue()
    data.put(False)
    data.put(True)

    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):  # the fault is in the second call of two
            loss = model(x.repeat(1, 2), not data.empty() and data.get()).sum()
            loss.backward()
        return loss

    event = only("step", model, step, read=read)
    assert named(event) == ("fault", phase, WORDS[phase])
    assert event.call == 1
    assert any("the model's call alone" in note for note in event.notes)
    assert all(p.grad is not None for p in model.parameters())


def test_a_gradient_that_came_into_the_models_call_was_made_outside_of_it() -> None:
    model = nn.Linear(2, 2)
    data: SimpleQueue[Any] = SimpleQueue()
    data.put(0.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) * (1.0 if data.empty() else data.get())).square().sum().sqrt()
        loss.backward()
        return loss

    event = only("step", model, step)
    assert named(event) == (None, "loss", None)
    assert "track the training step" not in event.cause.fix


# An exception of the program's, because of a bad value.


def _check(x: torch.Tensor) -> torch.Tensor:
    assert torch.isfinite(x).all(), "not finite"
    return x


DEADLY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "multinomial": lambda x: torch.multinomial(x, 1),
    "distribution": lambda x: torch.distributions.Categorical(logits=x).sample(),
    "solver": lambda x: torch.linalg.eigh(x.mT @ x)[0],
    "assert": _check,
}


@pytest.mark.parametrize("action", ["raise", "record"])
@pytest.mark.parametrize("level", ["step", "layer", "operation"])
@pytest.mark.parametrize("way", DEADLY)
def test_an_exception_over_a_bad_value_takes_the_report_along(way, level, action) -> None:
    model = nn.Linear(2, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        return DEADLY[way](nan_forward(model(x)))

    with pytest.raises(Exception) as plain:
        step(torch.ones(3, 2))
    tracker = anynan.torch.track(step, level=level, action=action)
    with pytest.raises(Exception) as caught:
        tracker(torch.ones(3, 2))
    (event,) = bad(tracker)
    assert named(event) == (None, "loss", "log")
    name = type(plain.value).__name__
    assert event.spread.surfaced == f"the {name} that the program raised"
    if action == "raise":
        assert type(caught.value) is anynan.NonFiniteError
        assert type(caught.value.__cause__) is type(plain.value)
    else:
        assert type(caught.value) is type(plain.value)
        (note,) = caught.value.__notes__
        assert note.startswith("NaN first appeared")
        assert "log(-1.0)" in note


def test_rows_that_wait_are_read_when_an_exception_ends_the_step() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Odd(nan_forward))

    def step(x: torch.Tensor) -> torch.Tensor:
        if model(x).isnan().any():
            raise ValueError(7)
        return x

    tracker = anynan.torch.track(step, advanced=anynan.Advanced(read="end"), level="operation")
    with pytest.raises(anynan.NonFiniteError) as caught:
        tracker(torch.ones(2, 2))
    assert named(caught.value.event) == ("1", "forward", "log")
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("level", ["step", "layer", "operation"])
@pytest.mark.parametrize("error", [KeyError, StopIteration])
def test_an_exception_over_something_else_stays_what_it_is(error: Any, level: Any) -> None:
    model = nn.Linear(2, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(3).masked_fill(torch.arange(3) > 1, -torch.inf)
        y = torch.nan_to_num(nan_forward(model(x))) + model(x) + (mask == 0)
        y.sum().item()
        mask.max()
        raise error

    tracker = anynan.torch.track(step, level=level)
    with pytest.raises(error) as caught:
        tracker(torch.ones(3, 2))
    assert not getattr(caught.value, "__notes__", ())
    assert not bad(tracker)


# Where nothing can be run again: the loss before its gradients, and no layer for its inputs.


WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "loss": lambda y: (y * 0 - 1).log().sum() * y.sum(),
    "gradient of the loss": lambda y: (y * 0).square().sum().sqrt(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tracked", ["model", "step"])
def test_a_bad_loss_is_told_before_the_gradients_it_spoils(way: str, tracked: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = WAYS[way](model(x))
        loss.backward()
        return loss.detach()

    event = only(tracked, model, step, replay=False)
    assert (event.layer, event.phase, event.tensor) == (None, "loss", way)
    assert ("track the training step" in event.cause.fix) == (tracked == "model")


def test_a_layer_with_bad_inputs_is_not_the_origin_where_nothing_is_run_again() -> None:
    class Decoding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.decoder = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.decoder(nan_forward(self.fc(x)))

    model, advanced = Decoding(), anynan.Advanced(replay=False)
    event = only("model", model, model, replay=False)
    assert (event.layer, event.phase) == ("", "forward")
    assert "decoder.0 received a bad input" in event.cause.text
    assert "between fc and decoder.0, in the model's own code" in event.cause.text
    with anynan.torch.track(model, advanced=advanced, action="record") as tracker:
        for _ in range(2):  # the parts are called, and not the model
            model.decoder(nan_forward(model.fc(torch.ones(2, 2)))).sum()
    event = bad(tracker)[-1]
    assert (event.layer, event.phase) == (None, "loss")
    assert "between fc and decoder.0, outside what is watched" in event.cause.text
    assert "track the training step" in event.cause.fix


@pytest.mark.parametrize("level", ["layer", "operation"])
def test_a_gradient_is_named_in_the_part_that_made_it(level: Any) -> None:
    """What comes bad into a part may be of the making of the part that took what it gave."""
    root = Fault()
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "root": root, "last": nn.Linear(4, 1)})
    with anynan.torch.track(model, level=level, action="record") as tracker:
        for how in ("good", "backward", "loss"):
            root.armed = how
            loss = model["last"](root(model["first"](torch.ones(2, 4)))).sum()
            (loss * (0 * loss).sqrt() if how == "loss" else loss).backward()
    events = bad(tracker)
    assert [event.layer for event in events] == ["root", None]
    assert (*named(events[0]), events[0].kind) == ("root", "backward", "sqrt", "posinf")


# No optimizer of PyTorch's to wait for.


class Scale(nn.Module):
    """Give its weight an infinite gradient, and its input a finite one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.sqrt()


def by_hand(model: nn.Module, loss: torch.Tensor, way: str) -> None:
    weights = list(model.parameters())
    if way == "autograd.grad":
        gradients: Any = torch.autograd.grad(loss, weights)
    else:
        loss.backward()
        gradients = [p.grad for p in weights]
    with torch.no_grad():
        for p, grad in zip(weights, gradients, strict=True):
            p -= 0.1 * grad
    if way != "autograd.grad":
        model.zero_grad(set_to_none=way == "set to None")


@pytest.mark.parametrize("read", ["auto", "end"])
@pytest.mark.parametrize("way", ["set to None", "zeroed", "autograd.grad"])
def test_gradients_that_no_optimizer_takes_are_judged(way: str, read: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Scale())
    before = model[1].weight.detach().clone()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        by_hand(model, loss, way)
        return loss.detach()

    tracker = anynan.torch.track(step, advanced=anynan.Advanced(read=read))
    event = failure(tracker, torch.ones(2, 2))
    assert (event.layer, event.phase, event.parameter) == ("1", "backward", "1.weight")
    if read == "end":  # read when the weights were no longer those of the first run
        assert any("weights had been updated" in note for note in event.notes)
    else:
        assert event.operation.name == "sqrt"
        assert torch.equal(model[1].weight, before)
    tracker.remove()
    assert not model[1].weight._backward_hooks


def test_an_optimizer_that_comes_late_takes_the_hooks_off_the_weights() -> None:
    model = nn.Linear(2, 2)
    late = cache(lambda: sgd(model))
    tracker = anynan.torch.track(lambda x: train(model, late(), x))
    tracker(torch.ones(2, 2))
    tracker(torch.ones(2, 2))
    assert not model.weight._backward_hooks
    assert not tracker.events


# The level rises by itself.


@pytest.mark.parametrize("tracked", ["model", "step"])
def test_the_level_rises_until_what_was_not_reproduced_is_named(tracked: str) -> None:
    values: SimpleQueue[float] = SimpleQueue()
    levels: list[str] = []

    class Draw(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            levels.append("replay" if anynan.replaying() else inside(tracker).judge.level)
            return x if values.empty() else x * 0 + torch.tensor(values.get()).log()

    model = nn.Sequential(nn.Linear(2, 2), Draw())

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x).sum()

    tracker: Any = anynan.torch.track(model if tracked == "model" else step, action="record")
    run = step if tracked == "model" else tracker
    for bad_now in (False, True, False, True, False):
        if bad_now:
            values.put(-1.0)
        run(torch.ones(2, 2))
    first, second = bad(tracker)
    assert first.operation is None
    assert any("every operation of the next" in note for note in first.notes)
    assert named(second) == ("1", "forward", "log")
    (note,) = second.notes
    assert note == "found because every operation was watched from step 2 on [watched-found]"
    seen = [level for level in levels if level != "replay"]
    assert seen == ["layer", "layer", "operation", "operation", "layer"]
    assert len(tracker.events) == 2  # and nothing else of what the watcher saw


def test_the_level_falls_again_where_nothing_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    two = replace(EVERY_OPERATION, steps=2)
    monkeypatch.setattr("anynan.torch.session.session.EVERY_OPERATION", two)
    model = nn.Sequential(nn.Linear(2, 2), Odd(nan_forward))
    tracker = anynan.torch.track(lambda x: model(x).sum(), action="record")
    for level in ("operation", "operation", "layer"):
        tracker(torch.ones(2, 2))
        assert inside(tracker).judge.level == level
    assert any("did not come back in 2 steps" in remark for remark in tracker.notes)


# A model that the program drops while its loss is still to be run backward.


class Root(nn.Module):
    def __init__(self, *, holds: bool = False) -> None:
        super().__init__()
        self.linear, self.holds = nn.Linear(2, 2), holds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = (self.linear(x) * 0).sum(-1).sqrt()
        if self.holds:
            self.out = out
        return out


@pytest.mark.parametrize("level", ["layer", "step", "operation"])
def test_a_model_that_was_dropped_before_its_backward_pass_has_its_operation(level: Any) -> None:
    def begin() -> Any:
        model = Root()
        tracker = anynan.torch.track(model, action="record", level=level)
        return model(torch.ones(2, 2)).sum(), sgd(model), tracker, weakref.ref(model)

    loss, optimizer, tracker, model = begin()
    loss.backward()
    optimizer.step()
    assert named(*bad(tracker)) == ("", "backward", "sqrt")
    gc.collect()
    assert model() is None  # the loss, and so its graph, is still there
    del loss


@pytest.mark.parametrize("holds", [False, True])
def test_a_dropped_model_goes_with_its_graph(holds: bool) -> None:
    def begin() -> Any:
        model = Root(holds=holds)
        anynan.torch.track(model)
        out = model(torch.ones(2, 2))
        return None if holds else out, weakref.ref(model), weakref.ref(out)

    before = live_tensors()
    out, model, made = begin()
    assert holds or model() is not None
    del out
    assert holds or (model() is None and made() is None)  # at once, without the collector
    assert live_tensors() == before
    assert model() is None
