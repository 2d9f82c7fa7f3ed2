"""The search for the first bad batch: what it finds, and that it leaves no trace."""

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import anynan
from anynan import AnynanWarning, NonFiniteError
from anynan._steps.tracked import inside
from anynan.torch import BadBatch, first_bad_batch
from anynan.torch.update import updates
from tests.flat import split
from tests.torch_adapter.training import Fault, assert_same, everything, seed, stepping, train

pytestmark = pytest.mark.tier(2)


every_interval = pytest.mark.parametrize("every", [1, 4])
SPOILED = 6


class Net(nn.Module):
    def __init__(self, how: str = "forward") -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.2)
        self.fault, self.last = Fault(), nn.Linear(4, 2)
        self.fault.armed, self.fault.at = how, 1
        self.calls = 0
        self.kept: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.kept.append(self.calls)
        h = self.drop(self.norm(self.first(x)).tanh())
        return self.last(self.fault(h, int(x[0, 0] == 7)))  # the batch that goes bad


class Training:
    """A training run with everything that has a state."""

    def __init__(self, how: str = "forward", optimizer: Any = None) -> None:
        seed()
        self.model = Net(how)
        make = optimizer or functools.partial(torch.optim.AdamW, lr=0.01)
        self.optimizer = make(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=0.1, total_steps=500
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self.average = AveragedModel(self.model)
        self.generator = torch.Generator().manual_seed(1)
        self.numpy = np.random.default_rng(1)
        self.python = random.Random(1)

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        noise = torch.rand(1, generator=self.generator).item() + self.numpy.random()
        noise += self.python.random() + random.random() + float(np.random.rand())  # noqa: NPY002
        loss: Tensor = self.model(x).square().mean() * noise
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.average.update_parameters(self.model)
        return loss

    def state(self) -> dict[str, Any]:
        keepers = [self.optimizer, self.schedule, self.scaler]
        return {
            **everything([self.model, self.average], keepers),
            "generators": (self.generator.get_state(), self.numpy.bit_generator.state),
            "attributes": (self.model.calls, list(self.model.kept), self.python.getstate()),
            "optimizer attributes": sorted(vars(self.optimizer)),
        }

    def identities(self) -> list[int]:
        held: list[Any] = [self.optimizer.state, *self.optimizer.param_groups]
        for p in self.model.parameters():
            held += [p, p.grad, p.data_ptr(), self.optimizer.state.get(p)]
        return [item if isinstance(item, int) else id(item) for item in held]


def batches(spoiled: int | None = SPOILED, count: int = 9) -> list[Tensor]:
    made = list(torch.randn(count, 3, 4, generator=torch.Generator().manual_seed(0)))
    if spoiled is not None:
        made[spoiled][0, 0] = 7
    return made


@pytest.mark.parametrize("every", [1, 5, 100])
@pytest.mark.parametrize(("how", "word"), [("forward", "log"), ("backward", "sqrt")])
def test_the_batch_and_the_operation(every: int, how: str, word: str) -> None:
    # Without a scaler: it would skip the update of a bad gradient.
    run = Training(how)
    run.scaler = torch.amp.GradScaler("cpu", enabled=False)
    data = batches()
    found = first_bad_batch(run.step, data, every=every)
    assert isinstance(found, BadBatch)
    event = found.event
    assert found.index == event.step == SPOILED
    assert found.batch is data[SPOILED]
    assert (event.layer, event.phase, event.operation.name) == ("model.fault", how, word)
    assert str(found).startswith(f"batch {SPOILED} is the first bad one\n\n")
    assert f"pass of step {SPOILED}" in str(found)


# Its loss scaler skips the very first update.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@every_interval
@pytest.mark.parametrize("spoiled", [0, 1, 8])
def test_a_batch_that_is_bad_itself(every: int, spoiled: int) -> None:
    run = Training()
    data = batches(None)
    data[spoiled][1, 2] = torch.nan
    found = first_bad_batch(run.step, data, every=every)
    assert (found.index, found.event.phase) == (spoiled, "input")
    assert found.event.summary.first_bad == (1, 2)


@every_interval
def test_a_batch_whose_update_overflows(every: int) -> None:
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e10)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    data = [torch.full((1, 4), 1e-12), torch.full((1, 4), 1e-11), torch.full((1, 4), 1e30)]
    found = first_bad_batch(step, data * 2, every=every)
    assert (found.index, found.event.phase, found.event.parameter) == (2, "optimizer", "weight")


@every_interval
def test_a_batch_that_spoils_the_optimizers_state_only(every: int) -> None:
    model = nn.Sequential(nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: Tensor) -> Tensor:
        loss = train(model, optimizer, x)
        if x[0, 0] == 7:
            optimizer.state[model[0].bias]["exp_avg"].div_(0).sub_(torch.inf)
        return loss

    found = first_bad_batch(step, batches(), every=every)
    event = found.event
    assert (found.index, event.phase, event.parameter) == (SPOILED, "optimizer", "0.bias")
    assert any("looking at the state" in note for note in event.notes)
    assert "exp_avg" in str(found)


@every_interval
def test_the_steps_own_check_is_a_find(every: int) -> None:
    run = Training()

    def step(x: Tensor) -> None:
        if not run.step(x).isfinite():
            raise RuntimeError("the loss is not finite")

    found = first_bad_batch(step, batches(), every=every)
    assert (found.index, found.event.layer) == (SPOILED, "run.model.fault")


@every_interval
def test_an_error_of_the_step_itself(every: int) -> None:
    run = Training()

    def step(x: Tensor) -> None:
        if x[0, 0] == 7:
            raise ValueError("a shape does not fit")
        run.step(x)

    before = run.state()
    with pytest.raises(ValueError, match="does not fit") as caught:
        first_bad_batch(step, batches(), every=every)
    assert caught.value.__notes__ == [f"in batch {SPOILED} of first_bad_batch"]
    assert_same(before, run.state())


def test_what_happens_once_is_said_to_be_a_guess() -> None:
    model = nn.Linear(4, 2)
    turns = iter(range(100))

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).sum()
        return loss.log() if next(turns) == 4 else loss

    with torch.no_grad(), pytest.warns(AnynanWarning, match="the iterator turns"):
        model.weight.fill_(-1.0)
        model.bias.fill_(-100.0)
        found = first_bad_batch(step, batches(None), every=3)
    assert 3 <= found.index <= 5
    assert found.event.phase == "loss"
    assert any("did not happen again" in note for note in found.event.notes)


def test_a_batch_that_the_step_writes_into_is_said() -> None:
    run = Training()

    def step(x: Tensor) -> Tensor:
        x.mul_(1.0)
        return run.step(x)

    found = first_bad_batch(step, batches(), every=4)
    assert found.index == SPOILED
    assert any("writes into its batch" in note for note in found.event.notes)


def test_no_batch_is_taken_or_run_again_after_the_bad_one() -> None:
    run = Training()
    taken: list[int] = []
    ran: list[int] = []

    def stream() -> Iterator[Tensor]:
        for i, x in enumerate(batches(40, 64)):
            taken.append(i)
            x[0, 1] = i
            yield x

    def step(x: Tensor) -> Tensor:
        ran.append(int(x[0, 1]))
        return run.step(x)

    for every, ended in ((1, 41), (64, 64)):
        found = first_bad_batch(step, stream(), every=every)
        assert found.index == 40
        assert taken == list(range(ended))
        # What the report's own second run adds to the list is taken back.
        assert ran == [*range(ended), *(range(41) if every > 1 else ())]
        taken.clear()
        ran.clear()


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("spoiled", [None, SPOILED])
@pytest.mark.parametrize("trained", [0, 3], ids=["new", "trained"])
@pytest.mark.parametrize(
    "optimizer",
    [
        None,
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        functools.partial(torch.optim.Adam, lr=torch.tensor(0.1), amsgrad=True, foreach=False),
    ],
    ids=["AdamW", "SGD", "Adam"],
)
def test_everything_is_left_as_found(every, spoiled, trained, optimizer) -> None:
    run = Training(optimizer=optimizer)
    for x in batches(None)[:trained]:
        run.step(x)
    run.model.first.eval()
    before, held = run.state(), run.identities()
    versions = [p._version for p in run.model.parameters()]
    found = first_bad_batch(run.step, batches(spoiled), every=every)
    assert first_bad_batch(run.step, [], every=every) is None
    assert (found is None) == (spoiled is None)
    assert_same(before, run.state())
    assert held == run.identities()
    assert versions == [p._version for p in run.model.parameters()]
    assert not updates._handles
    # And training goes on as if there had been no search.
    losses = [run.step(x).detach() for x in batches(None)]
    plain = Training(optimizer=optimizer)
    for x in batches(None)[:trained]:
        plain.step(x)
    plain.model.first.eval()
    assert_same(losses, [plain.step(x).detach() for x in batches(None)])
    assert_same(plain.state(), run.state())


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
            raise KeyError("mean")
        self.total = state["total"]


@pytest.mark.parametrize("broken", [False, True])
def test_other_objects_with_a_state(*, broken: bool) -> None:
    run, meter = Training(), Meter(broken=broken)

    def step(x: Tensor) -> None:
        meter.total += run.step(x).item()

    said = pytest.warns(AnynanWarning, match=r"could not restore Meter \(KeyError")
    with said if broken else nullcontext():
        first_bad_batch(step, batches())
    assert bool(meter.total) == broken


def in_a_function(step: Any) -> Any:
    return lambda x: step(x)


def tracked(run: Training) -> Any:
    return anynan.torch.track(run.step, action="record")


FORMS: dict[str, Callable[[Training], Any]] = {
    "method": lambda run: run.step,
    "function": lambda run: in_a_function(run.step),
    "partial": lambda run: functools.partial(train, run.model, run.optimizer),
    "tracker": tracked,
    "tracker in a function": lambda run: in_a_function(tracked(run)),
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
    assert found.event.layer.endswith("fault")
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
        state = [run.model, run.average]
        found = first_bad_batch(Slotted(run), batches(), every=every, state=state)
        assert (found.index, found.event.layer) == (SPOILED, "state.0.fault")
        assert_same(before["weights"], run.state()["weights"])


def test_a_weight_that_is_bad_already() -> None:
    run = Training()
    with torch.no_grad():
        run.model.first.weight[0, 0] = torch.nan
    for every in (1, 4):
        with pytest.raises(NonFiniteError, match="first.weight"):
            first_bad_batch(run.step, batches(), every=every)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"step": nn.Linear(2, 2)}, TypeError, "a function that trains on one batch, not Linear"),
        ({"step": 3}, TypeError, "not int"),
        ({"batches": 3}, TypeError, "iterable of batches, not int"),
        ({"batches": {"x": 1}}, TypeError, "not dict"),
        ({"every": 0}, ValueError, "every=0"),
        ({"every": True}, ValueError, "every=True"),
        ({"action": "warn"}, TypeError, "sets action= by itself"),
        ({"evry": 2}, TypeError, "first_bad_batch.*'evry'; the options are every, state, "),
        ({"state": [3]}, TypeError, "state_dict and load_state_dict, not 3"),
    ],
)
def test_errors(wrong: dict[str, Any], error: type[Exception], words: str) -> None:
    given: dict[str, Any] = {"step": Training().step, "batches": batches(), **wrong}
    with pytest.raises(error, match=words):
        first_bad_batch(given.pop("step"), given.pop("batches"), **split(given))


def test_a_tracker_of_a_model_is_no_step_nor_is_any_where_watching_is_off(monkeypatch) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="this tracker watches a model"):
        first_bad_batch(anynan.torch.track(model), batches())
    monkeypatch.setenv("ANYNAN", "off")
    with pytest.raises(ValueError, match="ANYNAN=off"):
        first_bad_batch(Training().step, batches())


@every_interval
def test_state_that_is_inf_by_design_is_no_finding(every: int) -> None:
    model = torch.nn.Linear(2, 1)
    model.register_buffer("best", torch.tensor(torch.inf))
    step, good = stepping(model), [torch.rand(2, 2) for _ in range(5)]
    assert first_bad_batch(step, good, every=every) is None
    found = first_bad_batch(step, [*good, torch.full((2, 2), torch.nan)], every=every)
    assert (found.index, found.event.phase) == (5, "input")
