"""Functions of array code that fail, and where."""

import inspect
from typing import Any

import numpy as np
import pytest

import anynan
from tests.flat import split


def failing(function: Any, *args: Any, **options: Any) -> anynan.Event:
    tracked = anynan.track(function, **split(options))  # it is the default
    with np.errstate(all="ignore"), pytest.raises(anynan.NonFiniteError) as caught:
        tracked(*args)
    return caught.value.event


def line_of(function: Any, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    (found,) = [first + i for i, line in enumerate(lines) if text in line]
    return found


def entropy(p: Any) -> Any:
    q = p * np.log(p)
    return -q.sum()


def centre(x: Any) -> None:
    x -= x.mean()
    x /= x.std()
