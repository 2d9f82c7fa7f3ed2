"""Random programs: the results are untouched, what goes bad is found, and both readings agree."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import anynan

pytestmark = [pytest.mark.tier(2), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def write(x: Any, y: Any) -> Any:
    x = x.copy()
    x[1:3] = y[:2]
    x *= 2
    return x


STEPS: list[Callable[[Any, Any], Any]] = [
    lambda x, _: np.exp(x),
    lambda x, _: np.log(x),
    lambda x, _: 1 / x,
    lambda x, _: x - x.max(),
    lambda x, _: x / x.sum(),
    lambda x, _: x / np.linalg.norm(x),
    lambda x, _: np.concatenate([x[2:], x[:2]]) * 0.5,
    lambda x, _: np.einsum("i,j->i", x, x),
    lambda x, y: x - y,
    lambda x, y: x * y,
    lambda x, y: x / y,
    lambda x, y: np.maximum(x, y),
    lambda x, y: np.power(x, y),
    write,
]


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, len(STEPS) - 1), min_size=1, max_size=6),
    st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.5, 800.0, -1e200, 1e-300]), min_size=4, max_size=4),
    st.lists(st.sampled_from([0.0, 1.0, -2.0, 3.0]), min_size=4, max_size=4),
)
def test_random_programs(chosen: list[int], first: list[float], second: list[float]) -> None:
    def run(x: Any, y: Any) -> Any:
        for i in chosen:
            x, y = STEPS[i](x, y), x
        return x

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
        events.append([
            (event.kind, event.operation.name, event.cause.tag, event.then and event.then.name)
            for event in bad
        ])  # fmt: skip
    assert events[0] == events[1]
