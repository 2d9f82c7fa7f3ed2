"""A fix is tried in array code, too: once more, and as if it had not been."""

import functools
import os
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

import anynan
from tests.failing import failure
from tests.flat import split

# The recorder itself; what the default makes of it is in test_recorder_ends.
track: Any = functools.partial(anynan.track, level="layer")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def failing(fn: Any, *args: Any, **options: Any) -> anynan.Event:
    return failure(track(fn, **split(options)), *args)


@pytest.mark.parametrize("read", ["immediate", "end"])
def test_two_faults_come_in_one_report(read: Any) -> None:
    def preprocess(x: np.ndarray) -> Any:
        return np.sqrt(x - 2), np.arccos(x + 2)

    event = failing(preprocess, np.ones(3), read=read)
    assert event.tried == anynan.events.Trial("sqrt(maximum(x, 1e-8))", "another", "call")
    (other,) = event.others
    assert other.operation.name == "acos"
    assert other.tried.outcome == "finite"


class Counted:
    def __init__(self) -> None:
        self.calls = 0


STATE: dict[str, Any] = {"calls": 0, "log": []}


def test_no_trial_leaves_a_trace() -> None:
    counted, held, runs = Counted(), np.zeros(2), 0

    def step(x: np.ndarray) -> np.ndarray:
        nonlocal runs
        runs += 1
        counted.calls += 1
        STATE["calls"] += 1
        STATE["log"].append(runs)
        held[0] += 1
        return np.log(x - 1)

    state = np.random.get_state()  # noqa: NPY002
    event = failing(step, np.ones(2) / 2)
    assert event.tried.outcome == "finite"
    assert (runs, counted.calls, STATE, held[0]) == (1, 1, {"calls": 1, "log": [1]}, 1)
    assert str(np.random.get_state()) == str(state)  # noqa: NPY002


def draws(x: np.ndarray) -> np.ndarray:
    return np.log(x - 1) * np.random.rand()  # noqa: NPY002


def writes(x: np.ndarray) -> np.ndarray:
    x -= 2
    return np.log(x)


def takes(x: np.ndarray) -> np.ndarray:
    return np.log(x - ITEMS.get())


def leaks(x: np.ndarray) -> np.ndarray:
    return np.log(x * float(np.asarray(x)[0]) - 1)


ITEMS: SimpleQueue[float] = SimpleQueue()  # nothing can stand in it, so nothing is kept
ITEMS.put(1.0)
ITEMS.put(2.0)


@pytest.mark.parametrize("fn", [draws, writes, takes, leaks])
@pytest.mark.filterwarnings("ignore::anynan.AnynanWarning")
def test_nothing_is_claimed_where_the_second_run_would_be_another(fn: Any) -> None:
    STATE["calls"] = 0
    left = ITEMS.qsize() - (fn is takes)
    event = failing(fn, np.ones(2) / 2)
    assert (event.tried, event.others) == (None, ())
    assert ITEMS.qsize() == left


@pytest.mark.parametrize("options", [{"replay": False}, {"level": "operation"}])
def test_nothing_runs_again_where_nothing_may(options: Any) -> None:
    runs = []

    def step(x: np.ndarray) -> np.ndarray:
        runs.append(1)
        return np.log(x - 1)

    assert failing(step, np.ones(2) / 2, **options).tried is None
    assert len(runs) == 1


def test_user_code_can_tell_that_it_runs_again() -> None:
    told = []
    source, sink = os.pipe()  # what went out of the process cannot be put back

    def step(x: np.ndarray) -> np.ndarray:
        told.append(anynan.replaying())
        os.write(sink, b"second" if anynan.replaying() else b"first ")
        return np.log(x - 1)

    failing(step, np.ones(2) / 2)
    assert told == [False]
    assert os.read(source, 100) == b"first second"
    os.close(source)
    os.close(sink)
