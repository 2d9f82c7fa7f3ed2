"""The search for the first bad batch: what it finds, and that it leaves no trace."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anynan import AnynanWarning
from anynan.torch import BadBatch, first_bad_batch
from anynan.torch.update import updates
from tests.torch_adapter.training import assert_same
from tests.torch_adapter.trainings import SPOILED, Training, batches, every_interval

pytestmark = pytest.mark.tier(2)


# What is found.


@pytest.mark.parametrize("every", [1, 2, 5, 100])
@pytest.mark.parametrize(("how", "word"), [("forward", "log"), ("backward", "sqrt")])
def test_the_batch_and_the_operation(every: int, how: str, word: str) -> None:
    # Without a scaler: it would skip the update of a bad gradient.
    run = Training(how)
    run.scaler = torch.amp.GradScaler("cpu", enabled=False)
    data = batches()
    found = first_bad_batch(run.step, data, every=every)
    assert isinstance(found, BadBatch)
    assert found.index == found.event.step == SPOILED
    assert found.batch is data[SPOILED]
    event = found.event
    assert (event.layer, event.phase, event.operation.name) == (
        "model.marked.fault", how, word,
    )  # fmt: skip
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
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if x[0, 0] == 7:
            optimizer.state[model[0].bias]["exp_avg"].div_(0).sub_(torch.inf)
        return loss

    found = first_bad_batch(step, batches(), every=every)
    event = found.event
    assert (found.index, event.phase, event.parameter) == (SPOILED, "optimizer", "0.bias")
    assert any("looking at the state" in note for note in event.notes)
    assert "exp_avg" in str(found)


@every_interval
def test_no_bad_batch(every: int) -> None:
    run = Training()
    assert first_bad_batch(run.step, batches(None), every=every) is None
    assert first_bad_batch(run.step, [], every=every) is None


@every_interval
def test_the_steps_own_check_is_a_find(every: int) -> None:
    run = Training()

    def step(x: Tensor) -> None:
        if not run.step(x).isfinite():
            msg = "the loss is not finite"
            raise RuntimeError(msg)

    found = first_bad_batch(step, batches(), every=every)
    assert (found.index, found.event.layer) == (SPOILED, "run.model.marked.fault")


@every_interval
def test_an_error_of_the_step_itself(every: int) -> None:
    run = Training()

    def step(x: Tensor) -> None:
        if x[0, 0] == 7:
            msg = "a shape does not fit"
            raise ValueError(msg)
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


def test_a_window_is_run_again_no_further_than_to_the_bad_batch() -> None:
    run = Training()
    ran: list[int] = []

    def step(x: Tensor) -> Tensor:
        ran.append(int(x[0, 1]))
        return run.step(x)

    data = batches(40, 64)
    for i, x in enumerate(data):
        x[0, 1] = i
    found = first_bad_batch(step, data, every=64)
    assert found.index == 40
    assert ran[:64] == list(range(64))
    # What the report's own second run adds to the list is taken back.
    assert ran[64:] == list(range(41))


# No trace.


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
def test_everything_is_left_as_found(
    every: int, spoiled: int | None, trained: int, optimizer: Any
) -> None:
    run = Training(optimizer=optimizer)
    for x in batches(None)[:trained]:
        run.step(x)
    run.model.first.eval()
    before, held, versions = (
        run.state(),
        run.identities(),
        [p._version for p in run.model.parameters()],
    )
    found = first_bad_batch(run.step, batches(spoiled), every=every)
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
