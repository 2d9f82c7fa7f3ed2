"""Random programs: the results are untouched, what goes bad is found, and both readings agree."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import anynan

pytestmark = [pytest.mark.tier(2), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

Step = tuple[str, Callable[[Any, Any], Any]]

UNARY: list[Step] = [
    ("exp", lambda x, _: np.exp(x)),
    ("log", lambda x, _: np.log(x)),
    ("sqrt", lambda x, _: np.sqrt(x)),
    ("reciprocal", lambda x, _: 1 / x),
    ("square", lambda x, _: x * x),
    ("negative", lambda x, _: -x),
    ("shift", lambda x, _: x - x.max()),
    ("flip", lambda x, _: x[::-1]),
    ("share", lambda x, _: x / x.sum()),
    ("cumulate", lambda x, _: np.cumsum(x)),
    ("norm", lambda x, _: x / np.linalg.norm(x)),
    ("halve", lambda x, _: np.concatenate([x[2:], x[:2]]) * 0.5),
    ("sort", lambda x, _: np.sort(x)),
    ("einsum", lambda x, _: np.einsum("i,j->i", x, x)),
]
BINARY: list[Step] = [
    ("add", lambda x, y: x + y),
    ("subtract", lambda x, y: x - y),
    ("multiply", lambda x, y: x * y),
    ("divide", lambda x, y: x / y),
    ("maximum", lambda x, y: np.maximum(x, y)),
    ("power", lambda x, y: np.power(x, y)),
]


def write(x: Any, y: Any) -> Any:
    x = x.copy()
    x[1:3] = y[:2]
    x *= 2
    return x


STEPS = [*UNARY, *BINARY, ("write", write)]


def program(chosen: list[int]) -> Callable[[Any, Any], Any]:
    def run(x: Any, y: Any) -> Any:
        for i in chosen:
            x, y = STEPS[i][1](x, y), x
        return x

    return run


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, len(STEPS) - 1), min_size=1, max_size=6),
    st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.5, 800.0, -1e200, 1e-300]), min_size=4, max_size=4),
    st.lists(st.sampled_from([0.0, 1.0, -2.0, 3.0]), min_size=4, max_size=4),
)
def test_random_programs(chosen: list[int], first: list[float], second: list[float]) -> None:
    run = program(chosen)
    x, y = np.array(first), np.array(second)
    plain = run(x, y)
    events = []
    for read in ("immediate", "end"):
        tracker = anynan.track(run, action="record", advanced=anynan.Advanced(read=read))
        ours = tracker(x, y)
        assert type(ours) is type(plain)
        assert np.array_equal(ours, plain, equal_nan=True)
        assert np.array_equal(x, first)
        bad = [event for event in tracker.events if event.severity == "bad"]
        wrong = bool(np.isnan(plain).any() or np.isposinf(plain).any())
        assert bool(bad) == wrong
        assert all(event.operation is not None for event in bad)
        events.append([
            (event.kind, event.operation.name, event.cause.tag if event.cause else None,
             event.then.name if event.then else None)
            for event in bad if event.operation is not None
        ])  # fmt: skip
    assert events[0] == events[1]
