"""A second run of array code, and a trial of the fix, begin as the first and leave no trace."""

import os
import random
from collections import deque
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

import anynan
from tests.recording import READS, bad, caught, recorded

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

WEIGHT = np.array([1.0, 0.0])


def arrays() -> Iterator[Any]:
    for value in (4.0, 0.0, 9.0, 16.0):
        yield np.full(2, value)


def default() -> Any:
    def step(items: Any = arrays()) -> Any:  # noqa: B008
        return np.sqrt(next(items) - 1).sum()

    return step


def queued() -> Any:
    todo = deque(arrays())
    return lambda: np.sqrt(todo.popleft() - 1).sum()


@pytest.mark.parametrize("make", [default, queued])
def test_what_a_step_takes_is_given_again_and_nothing_is_lost(make: Any) -> None:
    tracked = anynan.track(make(), action="record", level="step")
    step = make()
    assert [tracked() for _ in range(4)] == pytest.approx([step() for _ in range(4)], nan_ok=True)
    event: Any = bad(tracked)
    assert (event.step, event.operation.name) == (1, "sqrt")
    assert event.tried.outcome == "finite"


def test_what_a_step_counts_on_and_draws_is_put_back() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.calls, self.weight = 0, np.ones(2)
            self.log: list[int] = []
            self.dice, self.coin = np.random.default_rng(0), random.Random(0)

        def step(self, x: np.ndarray) -> Any:
            self.calls += 1
            self.log.append(self.calls)
            self.weight -= x
            noise = self.dice.random(2) + self.coin.random() + random.random()
            return np.sqrt(x + noise if self.calls != 2 else x - self.calls - noise).sum()

    def run(track: bool) -> tuple[Any, ...]:
        random.seed(0)
        trainer = Trainer()
        step = anynan.track(trainer.step, action="record", level="step") if track else trainer.step
        out = [float(step(np.ones(2))) for _ in range(3)]
        assert not track or (bad(step).operation.name, bad(step).step) == ("sqrt", 1)
        after = trainer.dice.random(), trainer.coin.random(), random.random()
        return str(out), trainer.calls, trainer.log, trainer.weight.tolist(), after

    assert run(track=True) == run(track=False)


def test_arrays_that_code_reaches_past_its_arguments_are_watched_in_a_second_run() -> None:
    def step(x: np.ndarray) -> Any:
        return (x @ WEIGHT) / WEIGHT[1]

    assert bad(recorded(step, np.ones(2), level="step")).operation.name == "divide"
    assert type(WEIGHT) is np.ndarray


def test_what_cannot_be_kept_is_named(tmp_path: Any) -> None:
    (tmp_path / "x").write_text("0\n1\n2\n")
    with (tmp_path / "x").open() as lines:

        def step(x: np.ndarray) -> Any:
            return np.sqrt(x * float(next(lines)) - 0.5).sum()

        event = bad(recorded(step, np.ones(2), level="step"))
        assert next(lines) == "1\n"
    (note,) = [note for note in event.notes if "`lines`" in note]
    assert "pass each batch as an argument" in note


@pytest.mark.parametrize("level", ["layer", "step"])
def test_a_fault_that_only_the_fix_makes_is_not_told_as_a_second_one(level: Any) -> None:
    def step(x: np.ndarray) -> Any:
        return np.exp(1 / (x * 0)).sum()  # exp(1e8), with the fix of the division

    event = bad(recorded(step, np.ones(2), level=level))
    assert event.tried.outcome == "another"
    assert not event.others
    assert "is gone, but the step is not finite yet" in anynan.reports.render(event, "text")


@READS
def test_two_faults_come_in_one_report(read: Any) -> None:
    def preprocess(x: np.ndarray) -> Any:
        return np.sqrt(x - 2), np.arccos(x + 2)

    event = caught(preprocess, np.ones(3), read=read)
    assert event.tried == anynan.events.Trial("sqrt(maximum(x, 1e-8))", "another", "call")
    (other,) = event.others
    assert other.operation.name == "acos"
    assert other.tried.outcome == "finite"


STATE: dict[str, Any] = {"calls": 0, "log": []}


def test_no_trial_leaves_a_trace() -> None:
    held, runs = np.zeros(2), 0

    def step(x: np.ndarray) -> np.ndarray:
        nonlocal runs
        runs += 1
        STATE["calls"] += 1
        STATE["log"].append(runs)
        held[0] += 1
        return np.log(x - 1)

    state = np.random.get_state()  # noqa: NPY002
    event = caught(step, np.ones(2) / 2)
    assert event.tried.outcome == "finite"
    assert (runs, STATE, held[0]) == (1, {"calls": 1, "log": [1]}, 1)
    assert str(np.random.get_state()) == str(state)  # noqa: NPY002


def writes(x: np.ndarray) -> np.ndarray:
    x -= 2
    return np.log(x)


ITEMS: SimpleQueue[float] = SimpleQueue()  # nothing can stand in it, so nothing is kept


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: np.log(x - 1) * np.random.rand(),  # noqa: NPY002
        writes,
        lambda x: np.log(x - ITEMS.get()),
        lambda x: np.log(x * float(np.asarray(x)[0]) - 1),
    ],
    ids=["draws", "writes", "takes", "leaks"],
)
@pytest.mark.filterwarnings("ignore::anynan.AnynanWarning")
def test_nothing_is_claimed_where_the_second_run_would_be_another(fn: Any) -> None:
    ITEMS.put(1.0)
    event = caught(fn, np.ones(2) / 2)
    assert (event.tried, event.others) == (None, ())


@pytest.mark.parametrize("options", [{"replay": False}, {"level": "operation"}])
def test_nothing_runs_again_where_nothing_may(options: Any) -> None:
    runs = []

    def step(x: np.ndarray) -> np.ndarray:
        runs.append(1)
        return np.log(x - 1)

    assert caught(step, np.ones(2) / 2, **options).tried is None
    assert len(runs) == 1


def test_user_code_can_tell_that_it_runs_again() -> None:
    told = []
    source, sink = os.pipe()  # what went out of the process cannot be put back

    def step(x: np.ndarray) -> np.ndarray:
        told.append(anynan.replaying())
        os.write(sink, b"second" if anynan.replaying() else b"first ")
        return np.log(x - 1)

    caught(step, np.ones(2) / 2)
    assert told == [False]
    assert os.read(source, 100) == b"first second"
    os.close(source)
    os.close(sink)
