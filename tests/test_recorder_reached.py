"""A second run of array code begins with what the first began with, and leaves no trace."""

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import anynan

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

WEIGHT = np.array([1.0, 0.0])


def bad(tracker: Any) -> Any:
    (event,) = [event for event in tracker.events if event.severity == "bad"]
    return event


def numbers() -> Iterator[dict[str, np.ndarray]]:
    for value in (4.0, 0.0, 9.0, 16.0):
        yield {"x": np.full(2, value), "y": np.ones(2)}


def closure() -> Any:
    items = iter([np.full(2, x) for x in (4.0, 0.0, 9.0, 16.0)])

    def step() -> Any:
        return np.sqrt(next(items) - 1).sum()

    return step


def default() -> Any:
    def step(items: Any = numbers()) -> Any:  # noqa: B008
        return np.sqrt(next(items)["x"] - 1).sum()

    return step


def attribute() -> Any:
    class Trainer:
        def __init__(self) -> None:
            arrays = [np.full(2, x) for x in (4.0, 0.0, 9.0, 16.0)]
            self.items = zip(arrays, "abcd", strict=True)

        def step(self) -> Any:
            return np.sqrt(next(self.items)[0] - 1).sum()

    return Trainer().step


def queued() -> Any:
    todo = deque([np.full(2, x) for x in (4.0, 0.0, 9.0, 16.0)])

    def step() -> Any:
        return np.sqrt(todo.popleft() - 1).sum()

    return step


@pytest.mark.parametrize("make", [closure, default, attribute, queued])
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
        if track:
            assert bad(step).operation.name == "sqrt"
            assert bad(step).step == 1
        after = trainer.dice.random(), trainer.coin.random(), random.random()
        return str(out), trainer.calls, trainer.log, trainer.weight.tolist(), after

    assert run(track=True) == run(track=False)


def test_arrays_that_code_reaches_past_its_arguments_are_watched_in_a_second_run() -> None:
    def step(x: np.ndarray) -> Any:
        return (x @ WEIGHT) / WEIGHT[1]

    tracked = anynan.track(step, action="record", level="step")
    tracked(np.ones(2))
    assert bad(tracked).operation.name == "divide"
    assert type(WEIGHT) is np.ndarray


def test_what_cannot_be_kept_is_named(tmp_path: Any) -> None:
    (tmp_path / "x").write_text("0\n1\n2\n")
    with (tmp_path / "x").open() as lines:

        def step(x: np.ndarray) -> Any:
            return np.sqrt(x * float(next(lines)) - 0.5).sum()

        tracked = anynan.track(step, action="record", level="step")
        tracked(np.ones(2))
        assert next(lines) == "1\n"
    (note,) = [note for note in bad(tracked).notes if "`lines`" in note]
    assert "pass each batch as an argument" in note


# What a fix leaves.


@pytest.mark.parametrize("level", ["layer", "step"])
def test_a_fault_that_only_the_fix_makes_is_not_told_as_a_second_one(level: Any) -> None:
    def step(x: np.ndarray) -> Any:
        return np.exp(1 / (x * 0)).sum()  # exp(1e8), with the fix of the division

    tracked = anynan.track(step, action="record", level=level)
    tracked(np.ones(2))
    event: Any = bad(tracked)
    assert event.tried.outcome == "another"
    assert not event.others
    assert "is gone, but the step is not finite yet" in anynan.reports.render(event, "text")
