"""Random walks through array code, beside a twin that nobody tracks."""

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import anynan
from tests.chaos import twins
from tests.flat import split
from tests.recording import same

pytestmark = [pytest.mark.tier(2), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

OPTIONS = st.fixed_dictionaries(
    {"action": st.sampled_from(["record", "warn", "raise"])},
    optional={
        "read": st.sampled_from(["immediate", "end", 3]),
        "level": st.just("operation"),
        "replay": st.just(False),
        "stats": st.just(("absmax", "min")),
    },
)


class Simulation:
    """Hold a state that steps change in place, and do with arrays what programs do."""

    def __init__(self) -> None:
        self.weights = np.linspace(0.1, 1.0, 6).reshape(2, 3)
        self.table: dict[str, Any] = {"sum": np.zeros(3), "calls": 0}

    def forward(self, x: Any, way: str = "") -> Any:
        self.table["calls"] += 1
        with anynan.scope("dense"):
            y = np.tanh(x @ self.weights) + np.random.rand()  # noqa: NPY002
        with anynan.scope("head"):
            if way == "log":
                y = np.log(-1 - np.abs(y))
            elif way == "guarded":
                y = np.where(y > 0.5, np.log(np.where(y > 0.5, y, 1.0)), 0.0)
            elif way == "raise":
                raise ValueError("of the user's own")
            elif way == "in place":
                y += 1
                y[0] *= 2
                np.exp(y, out=y)
        self.table["sum"] += y.sum(axis=0)
        return {"y": y, "best": np.argsort(y, axis=None), "top": float(y.max())}


class Walk(twins.Doors, RuleBasedStateMachine):
    """Run the same function twice, under a tracker and without one."""

    @initialize()
    def begin(self) -> None:
        self.before = self.process()
        self.plain, self.tracked = Simulation(), Simulation()
        self.step: Any = self.tracked.forward

    @rule(
        k=twins.SEEDS,
        way=st.sampled_from(["", "", "guarded", "in place", "log", "raise"]),
        kind=st.sampled_from(["float64", "float32", "float16"]),
        place=st.sampled_from(["here", "thread", "quiet"]),
    )
    def call(self, k: int, way: str, kind: str, place: str) -> None:
        x = np.random.default_rng(k).normal(size=(4, 2)).astype(kind)
        results, before = [], x.copy()
        for side, function in ((self.plain, self.plain.forward), (self.tracked, self.step)):
            twins.seed(k)
            once = partial(function, x, way)
            try:
                with twins.quiet(), np.errstate(all="ignore" if place == "quiet" else None):
                    result = (twins.threaded if place == "thread" else twins.outcome)(once)
            except anynan.AnomalyError:
                assert side is self.tracked
                assert self.was_bad
                side.weights = self.plain.weights.copy()
                side.table = copy.deepcopy(self.plain.table)
                return
            results.append((result, side.weights.copy(), copy.deepcopy(side.table), x.copy()))
            if side is self.plain:
                self.was_bad = self.was_bad or way == "log"
                drawn = twins.generators()
        assert same(*results), results
        assert drawn == twins.generators()
        assert np.array_equal(x, before)

    @precondition(lambda self: self.tracker is None)
    @rule(options=OPTIONS)
    def track(self, options: dict[str, Any]) -> None:
        self.tracker = self.step = anynan.track(self.tracked.forward, **split(options))
        self.was_bad = bool(np.isnan(self.tracked.table["sum"]).any())

    def end(self) -> None:
        super().end()
        self.step = self.tracked.forward


def test_tracked_array_code_and_its_twin(amount: Any) -> None:
    amount(Walk, examples=40, steps=20)
