"""NaN and Inf that come in as data or that a program keeps on purpose: named if they harm."""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest

import anynan
from tests.conformance.programs import Asked, Run, with_jax, with_mlx, with_tensorflow, with_torch
from tests.failing import failure
from tests.flat import split

WHOLE = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
# The first row is whole, the others hold a NaN and an Inf.
GAPS = np.array([[1.0, 2.0], [np.nan, 4.0], [5.0, np.inf]], np.float32)


def with_numpy(asked: Asked, **options: Any) -> Run:
    def step(x: Any) -> Any:
        return np.tanh(np.nan_to_num(x, posinf=0.0) if asked.fills else x).mean()

    tracked = anynan.track(step, **split(options))
    return Run(tracked, tracked, list)


KEEPERS = [with_torch, with_jax, with_tensorflow, with_mlx]
Made = Callable[..., Run]


@pytest.mark.parametrize("made", [with_numpy, *KEEPERS])
@pytest.mark.parametrize("level", ["layer", "operation"])
def test_missing_values_that_are_filled_in_raise_nothing(made: Made, level: str) -> None:
    with closing(made(Asked(fills=True), level=level)) as run:
        for _ in range(2):
            assert np.isfinite(float(run.call(GAPS)))
        assert run.tracker.count("bad") == 0
        came = [event for event in run.tracker.events if event.phase == "input"]
        assert [(event.severity, event.kind) for event in came] == [("suspect", "nan")]


@pytest.mark.parametrize("made", [with_numpy, *KEEPERS])
@pytest.mark.parametrize("replay", [True, False])
def test_missing_values_that_reach_the_loss_are_named(made: Made, replay: bool) -> None:
    with closing(made(Asked(), replay=replay)) as run:
        event = failure(run.call, GAPS)
    assert (event.phase, event.kind, event.tensor) == ("input", "nan", "x")
    if replay:
        assert event.cause.tag == "bad_input"
        assert "2 of 3 rows are bad: 1, 2" in event.cause.evidence
        assert run.tracker.count("suspect") == 0


@pytest.mark.parametrize("made", KEEPERS)
@pytest.mark.parametrize("options", [{}, {"parameters": True}, {"level": "operation"}], ids=str)
def test_what_is_kept_and_does_no_harm_raises_nothing(made: Made, options: Any) -> None:
    with closing(made(Asked(keeps=True), **options)) as run:
        for _ in range(3):
            assert np.isfinite(float(run.call(WHOLE)))
        assert run.tracker.count("bad") == 0
        events = run.tracker.events
        noted = {str(event.parameter).rpartition(".")[2] for event in events}
        assert noted <= {"best", "ages"}
        assert {event.severity for event in events} <= {"suspect"}


@pytest.mark.parametrize("made", KEEPERS)
@pytest.mark.parametrize("replay", [True, False])
def test_what_is_kept_is_named_where_it_does_harm(made: Made, replay: bool) -> None:
    with closing(made(Asked(keeps=True, harms=True), replay=replay)) as run:
        event = failure(run.call, WHOLE)
    if replay or event.parameter is not None:
        assert event.phase == "parameter"
        assert str(event.parameter).rpartition(".")[2] == "ages"
        assert event.kind == "nan"
    else:  # nothing is said to be the cause
        assert event.cause.tag == "unknown"
