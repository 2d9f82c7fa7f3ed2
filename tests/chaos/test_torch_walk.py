"""Random walks through what a PyTorch program may do, beside a twin that nobody tracks."""

import copy
import gc
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

torch: Any = pytest.importorskip("torch")

import anynan  # noqa: E402
from anynan._steps.tracked import inside  # noqa: E402
from tests.chaos import torch_twins, twins  # noqa: E402
from tests.chaos.torch_twins import CALLS, CHANGES, COPIES, FAILURES, Net, Side  # noqa: E402
from tests.flat import split  # noqa: E402
from tests.torch_adapter.training import assert_same  # noqa: E402

pytestmark = pytest.mark.tier(2)

OPTIONS = st.fixed_dictionaries(
    {"action": st.sampled_from(["record", "warn", "raise", "skip"])},
    optional={
        "read": st.sampled_from(["immediate", "end", 3]),
        "level": st.just("operation"),
        "parameters": st.just(True),
        "replay": st.just(False),
        "backward": st.just(False),
        "stats": st.just(("mean", "rms")),
        "patience": st.just(1),
    },
)


def is_bad(value: Any) -> bool:
    leaves = torch.utils._pytree.tree_leaves(value)
    tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return not all(bool(x.isfinite().all()) for x in tensors)


def everything_of(tracker: Any) -> list[Any]:
    events = [event.to_json() for event in tracker.events]
    return [repr(tracker), tracker.report(), tracker.history.select(), tracker.notes, events]


def acts(tracker: Any) -> bool:
    options = inside(tracker).judge.options
    return options.action in {"raise", "skip"} or bool(options.patience)


@pytest.fixture(scope="module", autouse=True)
def _everything_ran_once() -> None:
    """Let PyTorch set up what it sets up at the first use."""
    side = Side(Net("without", nested=False, shared=False))
    for what in (*CALLS, *FAILURES, *CHANGES):
        with twins.quiet():
            twins.outcome(partial(what, side, 1))


class Walk(RuleBasedStateMachine):
    """Do the same with two models; track, pause, resume and untrack one of them."""

    @initialize(
        k=twins.SEEDS,
        checkpointed=st.sampled_from([None, "reentrant", "without"]),
        nested=st.booleans(),
        shared=st.booleans(),
    )
    def begin(self, k: int, checkpointed: str | None, nested: bool, shared: bool) -> None:
        torch_twins.LOG.clear()
        self.process, self.modes = torch_twins.process(), torch_twins.modes()
        torch_twins.seed(k)
        model = Net(checkpointed, nested, shared)
        self.plain, self.tracked = Side(model), Side(copy.deepcopy(model))
        self.trackers: list[Any] = []
        self.was_bad = False

    def both(self, what: Callable[[Side, int], Any], k: int) -> None:
        results = []
        acting, raised = any(acts(tracker) for tracker in self.trackers), False
        for side in (self.plain, self.tracked):
            torch_twins.LOG[:] = side.log
            torch_twins.seed(k)
            try:
                with twins.quiet():
                    result = twins.outcome(partial(what, side, k))
            except anynan.AnomalyError as error:
                assert side is self.tracked
                result, raised = error, True
            side.log[:] = torch_twins.LOG
            results.append((result, torch_twins.generators(), side.state()))
            assert_same(self.modes, torch_twins.modes(), f"{what.__name__}: ")
        fault = self.plain.model.fault.armed in {"forward", "backward"}
        result, _, state = results[0]
        self.was_bad = self.was_bad or fault or is_bad([result, state])
        if raised or (acting and self.was_bad):
            assert self.was_bad, results[1][0]
            self.tracked.take_over(self.plain)
            return
        for word, one, two in zip(("result", "generators", "state"), *results, strict=True):
            assert_same(one, two, f"{what.__name__}: {word}")

    @rule(k=twins.SEEDS)
    def train(self, k: int) -> None:
        self.both(Side.train, k)

    @rule(k=twins.SEEDS, what=st.sampled_from(CALLS) | st.sampled_from(FAILURES))
    def call(self, k: int, what: Callable[[Side, int], Any]) -> None:
        self.both(what, k)

    @rule(k=twins.SEEDS, what=st.sampled_from(CHANGES))
    def change(self, k: int, what: Callable[[Side, int], Any]) -> None:
        # Known: between a call and its update the watcher of operations has hooks on the layers
        # that are copied, and that no pickle takes.
        watcher = any(
            inside(tracker).judge.options.level == "operation" for tracker in self.trackers
        )
        if not (watcher and what in COPIES):
            self.both(what, k)

    @rule(k=twins.SEEDS, armed=st.sampled_from(["forward", "backward", "raise"]))
    def break_a_step(self, k: int, armed: str) -> None:
        for side in (self.plain, self.tracked):
            side.model.fault.armed = armed
        self.both(Side.train, k)
        for side in (self.plain, self.tracked):
            side.model.fault.armed = None

    def alone(self, what: Callable[[], Any]) -> Any:
        """Do something that must not be felt."""
        state, generators = self.tracked.state(), torch_twins.generators()
        try:
            with twins.quiet():
                result = what()
        except anynan.AnomalyError:
            assert self.was_bad
            result = None
        assert_same(generators, torch_twins.generators())
        assert_same(state, self.tracked.state())
        return result

    @rule(options=OPTIONS, part=st.sampled_from(["", "inner", "head"]))
    def track(self, options: dict[str, Any], part: str) -> None:
        target = self.tracked.model.get_submodule(part)
        known = {id(inside(t).fn) for t in self.trackers if inside(t).judge.adapter is not None}
        if id(target) not in known:
            self.begun(target, options)

    @precondition(lambda self: self.tracked.step == self.tracked.plain_step)
    @rule(options=OPTIONS)
    def track_the_step(self, options: dict[str, Any]) -> None:
        self.tracked.step = self.begun(self.tracked.plain_step, options) or self.tracked.step

    def begun(self, target: Any, options: dict[str, Any]) -> Any:
        tracker = self.alone(lambda: anynan.torch.track(target, **split(options)))
        self.trackers += [tracker] if tracker is not None else []
        return tracker

    @precondition(lambda self: self.trackers)
    @rule(which=st.integers(0, 3), what=st.sampled_from(twins.DOORS))
    def use(self, which: int, what: str) -> None:
        tracker = self.trackers[which % len(self.trackers)]
        self.alone(getattr(tracker, what))
        if what == "remove":
            self.trackers.remove(tracker)
            if self.tracked.step is tracker:
                self.tracked.step = self.tracked.plain_step

    @precondition(lambda self: self.trackers)
    @rule()
    def ask_for_everything(self) -> None:
        for tracker in self.trackers:
            self.alone(partial(everything_of, tracker))
            assert self.was_bad or not tracker.count("bad")

    def teardown(self) -> None:
        if sys.exc_info()[0] is not None:
            for tracker in getattr(self, "trackers", ()):
                twins.outcome(tracker.remove)
            return
        for tracker in self.trackers:
            self.alone(tracker.remove)
            assert self.was_bad or not tracker.count("bad")
        assert_same(self.plain.hooks(), self.tracked.hooks())
        twins.assert_process(self.process, torch_twins.process())
        gone = [weakref.ref(x) for x in (self.tracked.model, self.tracked.adam, *self.trackers)]
        del self.tracked
        self.trackers.clear()
        tracker = None
        for _ in range(2):  # what lies behind a graph goes after the graph
            gc.collect()
        assert [ref() for ref in gone] == [None] * len(gone)


def test_a_tracked_model_and_its_twin(amount: Any) -> None:
    amount(Walk, examples=25, steps=20)
