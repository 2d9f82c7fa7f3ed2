"""Array code with everything recorded."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import anynan
from tests.failing import failure
from tests.flat import split

NAN, INF = float("nan"), float("inf")
Array = np.ndarray[Any, Any]

# The recorder itself; what the default makes of it is in test_recorder_ends.
track: Any = functools.partial(anynan.track, level="layer")


def caught(function: Callable[..., Any], *args: Any, **options: Any) -> anynan.Event:
    return failure(track(function, **split(options)), *args)


def recorded(function: Callable[..., Any], *args: Any, **options: Any) -> anynan.Tracker:
    tracker: anynan.Tracker = track(function, action="record", **split(options))
    tracker(*args)
    return tracker


@dataclass
class State:
    weight: Any
    bias: Any


# The operation is named.

ZEROS, ONES, SINGULAR = np.zeros(3), np.ones(3), np.ones((2, 2))
