"""The first bad batch, for data, steps and states of every form."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anynan
from anynan import AnynanWarning, NonFiniteError
from anynan._steps.tracked import inside
from anynan.torch import first_bad_batch
from anynan.torch.update import updates
from tests.flat import split
from tests.torch_adapter.training import assert_same
from tests.torch_adapter.trainings import SPOILED, Training, batches, every_interval

pytestmark = pytest.mark.tier(2)


def test_a_pending_graph_survives() -> None:
    run = Training()
    loss = run.model(batches(None)[0]).sum()
    first_bad_batch(run.step, batches())
    loss.backward()
    assert run.model.first.weight.grad is not None


def test_weights_outside_of_a_module() -> None:
    w = torch.ones(4, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        loss = torch.log((x @ w).sum().abs() - (x[0, 0] == 7) * 1000)
        (grad,) = torch.autograd.grad(loss, w)
        with torch.no_grad():
            w.sub_(grad)
        return loss

    for every in (1, 4):
        with pytest.warns(AnynanWarning, match="no module was found"):
            found = first_bad_batch(step, batches(), every=every)
        assert (found.index, found.event.phase) == (SPOILED, "loss")
        assert torch.equal(w, torch.ones(4))


class Meter:
    """Something of the user's, with a state."""

    def __init__(self, *, broken: bool = False) -> None:
        self.total, self.broken = 0.0, broken

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.broken:
            msg = "no key 'mean'"
            raise KeyError(msg)
        self.total = state["total"]


@pytest.mark.parametrize("broken", [False, True])
def test_other_objects_with_a_state(*, broken: bool) -> None:
    run, meter = Training(), Meter(broken=broken)

    def step(x: Tensor) -> None:
        meter.total += run.step(x).item()

    if broken:
        with pytest.warns(AnynanWarning, match=r"could not restore Meter \(KeyError"):
            first_bad_batch(step, batches())
        assert meter.total
    else:
        first_bad_batch(step, batches())
        assert meter.total == 0


# Steps and batches of every kind.


def test_no_more_batches_are_taken_than_needed() -> None:
    taken = []

    def stream() -> Iterator[Tensor]:
        for i, x in enumerate(batches()):
            taken.append(i)
            yield x

    found = first_bad_batch(Training().step, stream())
    assert found is not None
    assert taken == list(range(SPOILED + 1))


def partial(run: Training) -> Any:
    def step(model: nn.Module, optimizer: Any, x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return functools.partial(step, run.model, run.optimizer)


def tracker_in_a_function(run: Training) -> Any:
    tracker = anynan.torch.track(run.step, action="record")
    return lambda x: tracker(x)


FORMS: dict[str, Callable[[Training], Any]] = {
    "method": lambda run: run.step,
    "function": lambda run: lambda x: run.step(x),
    "partial": partial,
    "tracker": lambda run: anynan.torch.track(run.step, action="record"),
    "tracker in a function": tracker_in_a_function,
    "of a tracked model": lambda run: (anynan.torch.track(run.model), run.step)[1],
}


@every_interval
@pytest.mark.parametrize("form", FORMS)
def test_steps_of_every_form(form: str, every: int) -> None:
    run = Training()
    step = FORMS[form](run)
    trackers = [each.tracker for each in updates.watching()]
    before = run.state()
    found = first_bad_batch(step, batches(), every=every)
    assert found.index == SPOILED
    assert found.event.layer.endswith("marked.fault")
    assert_same(before, run.state())
    for tracker in trackers:
        assert not tracker.events
        assert not inside(tracker).paused
        assert not len(tracker.history)
    for x in batches(None)[:2]:
        step(x)
    for tracker in trackers:
        tracker.flush()
        assert tracker.history.steps()[0] == 0


def test_a_model_out_of_sight_is_given_as_state() -> None:
    class Slotted:
        __slots__ = ("run",)

        def __init__(self, run: Training) -> None:
            self.run = run

        def __call__(self, x: Tensor) -> Tensor:
            return self.run.step(x)

    run = Training()
    with pytest.raises(ValueError, match=r"state=\[model, optimizer\]"):
        first_bad_batch(Slotted(run), batches())
    before = run.state()
    for every in (1, 4):
        found = first_bad_batch(
            Slotted(run), batches(), every=every, state=[run.model, run.average]
        )
        assert (found.index, found.event.layer) == (SPOILED, "state.0.marked.fault")
        assert_same(before["weights"], run.state()["weights"])


def test_a_weight_that_is_bad_already() -> None:
    run = Training()
    with torch.no_grad():
        run.model.first.weight[0, 0] = torch.nan
    for every in (1, 4):
        with pytest.raises(NonFiniteError, match="first.weight"):
            first_bad_batch(run.step, batches(), every=every)


# Errors.


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"step": nn.Linear(2, 2)}, TypeError, "a function that trains on one batch, not Linear"),
        ({"step": nn.Linear}, TypeError, "not Linear"),
        ({"step": 3}, TypeError, "not int"),
        ({"batches": 3}, TypeError, "iterable of batches, not int"),
        ({"batches": {"x": 1}}, TypeError, "not dict"),
        ({"batches": "abc"}, TypeError, "not str"),
        ({"every": 0}, ValueError, "every=0"),
        ({"every": True}, ValueError, "every=True"),
        ({"every": 1.5}, ValueError, r"every=1\.5"),
        ({"action": "warn"}, TypeError, "sets action= by itself"),
        ({"read": "end"}, TypeError, "sets read= by itself"),
        ({"histroy": 3}, TypeError, "no option 'histroy'"),
        ({"state": [3]}, TypeError, "state_dict and load_state_dict, not 3"),
    ],
)
def test_errors(wrong: dict[str, Any], error: type[Exception], words: str) -> None:
    given: dict[str, Any] = {"step": Training().step, "batches": batches(), **wrong}
    with pytest.raises(error, match=words):
        first_bad_batch(given.pop("step"), given.pop("batches"), **split(given))


def test_a_tracker_of_a_model_is_no_step() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="this tracker watches a model"):
        first_bad_batch(anynan.torch.track(model), batches())


def test_when_watching_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYNAN", "off")
    with pytest.raises(ValueError, match="ANYNAN=off"):
        first_bad_batch(Training().step, batches())


@pytest.mark.parametrize("every", [1, 3])
def test_state_that_is_inf_by_design_is_no_finding(every: int) -> None:
    model = torch.nn.Linear(2, 1)
    model.register_buffer("best", torch.tensor(torch.inf))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    good = [torch.rand(2, 2) for _ in range(5)]
    assert anynan.torch.first_bad_batch(step, good, every=every) is None
    found = anynan.torch.first_bad_batch(step, [*good, torch.full((2, 2), torch.nan)], every=every)
    assert (found.index, found.event.phase) == (5, "input")
