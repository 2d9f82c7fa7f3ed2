"""Array code that is tracked, and what is told of it."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import anynan
from tests.failing import failure
from tests.flat import split

NAN, INF = float("nan"), float("inf")
Array = np.ndarray[Any, Any]
ZEROS, ONES = np.zeros(3), np.ones(3)
READS = pytest.mark.parametrize("read", ["immediate", "end"])
LEVELS = pytest.mark.parametrize("level", ["step", "layer", "operation"])

# The recorder itself: each operation is watched as it runs.
track: Any = functools.partial(anynan.track, level="layer")


def caught(function: Callable[..., Any], *args: Any, **options: Any) -> anynan.Event:
    return failure(track(function, **split(options)), *args)


def recorded(function: Callable[..., Any], *args: Any, **options: Any) -> anynan.Tracker:
    tracker: anynan.Tracker = track(function, action="record", **split(options))
    tracker(*args)
    return tracker


def failing(function: Any, *args: Any, **options: Any) -> anynan.Event:
    """Give the event of a call at the default level, which explains by a second run."""
    with np.errstate(all="ignore"):
        return failure(anynan.track(function, **split(options)), *args)


def bad(tracker: Any) -> Any:
    """Give the one bad event of a tracker."""
    (event,) = [event for event in tracker.events if event.severity == "bad"]
    return event


def line_of(function: Any, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    (found,) = [first + i for i, line in enumerate(lines) if text in line]
    return found


@dataclass
class State:
    weight: Any
    bias: Any


def same(one: Any, two: Any) -> bool:
    """Compare bit for bit, types included: no array of anynan's own comes out."""
    if type(one) is not type(two):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and np.array_equal(one, two, equal_nan=one.dtype.kind in "fc")
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, State):
        return same(vars(one), vars(two))
    return bool(one == two or (one != one and two != two))


def entropy(p: Any) -> Any:
    q = p * np.log(p)
    return -q.sum()


def centre(x: Any) -> None:
    x -= x.mean()
    x /= x.std()


def attention(x: Any, scale: float = 1.0) -> Any:
    xp = x.__array_namespace__()
    with anynan.scope("scores"):
        scores = xp.matmul(x, xp.matrix_transpose(x)) * scale
    with anynan.scope("softmax"):
        grown = xp.exp(scores)
        weights = grown / xp.sum(grown, axis=-1, keepdims=True)
    return xp.sum(weights * 2.0)
