"""What a failing step costs, and the steps after it: counted, not timed."""

import functools
import gc
import math
import pickle
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import anynan
from anynan.torch.call.randomstate import RandomState
from anynan.torch.replay.replay import Replays
from anynan.torch.session.session import Session
from anynan.torch.weights.weights import Weights
from tests.counting import calls
from tests.flat import split
from tests.processes import ROOT, python
from tests.torch_adapter.training import Count, bad

pytestmark = pytest.mark.tier(2)

NAN = float("nan")


class Program:
    """A training step over many small layers, into which one fault is put."""

    def __init__(self, fault: str, *, model: bool, depth: int = 10, **options: Any) -> None:
        torch.manual_seed(0)
        self.fault, self.on = fault, False
        layers = [layer for _ in range(depth) for layer in (nn.Linear(4, 4), nn.Tanh())]
        self.model = nn.Sequential(*layers, nn.Linear(4, 1))
        self.model[2].register_forward_hook(self._inside)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        target: Any = self.model if model else self._step
        self.tracker: Any = anynan.torch.track(target, **split(options))
        self.step = self._step if model else self.tracker

    def _inside(self, module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out / (out * 0) if self.on and self.fault == "forward" else out

    def _step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        if self.on and self.fault == "loss":
            loss = (loss * 0).log() * 0
        if self.on and self.fault == "backward":
            loss = (loss * 0).sqrt()
        self.optimizer.zero_grad()
        loss.backward()
        if self.on and self.fault == "optimizer":
            self.optimizer.param_groups[0]["lr"] = NAN
        self.optimizer.step()
        return loss

    def clean(self) -> None:
        self.step(torch.randn(3, 4))

    def fail(self) -> None:
        """Run the step that fails; of an optimizer's fault that is the next one."""
        x = torch.randn(3, 4)
        self.on = True
        with warnings.catch_warnings(action="ignore", category=anynan.AnynanWarning):
            if self.fault == "input":
                x[0, 0] = NAN
            if self.fault == "weight":
                with torch.no_grad():
                    self.model[4].weight[0, 0] = NAN
            for _ in range(2 if self.fault == "optimizer" else 1):
                try:
                    self.step(x)
                except anynan.NonFiniteError:
                    self.optimizer.zero_grad()
        self.on = False


def warm(fault: str, **options: Any) -> Program:
    """Make a program whose first steps, which cost more, are over."""
    program = Program(fault, **options)
    program.clean()
    program.clean()
    return program


step_or_model = pytest.mark.parametrize("model", [False, True], ids=["step", "model"])
FAULTS = ("input", "forward", "loss", "backward", "weight", "optimizer")


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count what is dear: second runs, searches of the heap, looks at all weights."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str, what: Callable[[dict[str, Any]], str]) -> None:
        real = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            counts[what(kwargs)] += 1
            return real(*args, **kwargs)

        patch.setattr(owner, name, called)

    with pytest.MonkeyPatch.context() as patch:
        count(Replays, "again", lambda given: "trials" if given.get("runner") else "runs")
        count(gc, "get_objects", lambda _: "searches")
        count(gc, "get_referrers", lambda _: "searches")
        count(Session, "evidence", lambda _: "evidence")
        count(Weights, "bad", lambda _: "looks")
        yield counts


def usual(program: Program) -> int:
    """Count the calls of a step; now and then one looks anew at what the code reaches."""
    return min(calls(program.clean) for _ in range(3))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("level", ["layer", "step"])
@step_or_model
def test_a_fault_has_one_second_run_and_no_search_of_the_heap(fault, level, model) -> None:
    program = warm(fault, model=model, level=level, action="record")
    with counted() as counts:
        program.fail()
    assert len(bad(program.tracker)) == 1
    assert max(counts["runs"], counts["trials"]) <= 1
    assert counts["searches"] == 0
    assert counts["evidence"] <= 2  # of what is bad, and of the batch where that came in bad
    assert counts["looks"] <= 3


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("level", ["operation", "layer", "step"])
def test_the_cost_of_a_fault_is_linear_in_the_number_of_layers(fault: str, level: Any) -> None:
    Program(fault, model=False, level=level, action="record").fail()  # what is loaded once
    found = []
    for depth in (20, 40, 80):
        program = warm(fault, model=False, level=level, action="record", depth=depth)
        found.append(calls(program.fail))
    assert found[2] - found[1] < 2.4 * (found[1] - found[0])


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "options",
    [
        *({"action": action} for action in ("record", "warn", "skip", lambda event: None)),
        *({"action": "record", **other} for other in ({"replay": False}, {"read": "end"})),
        {"action": "record", "level": "step"},
    ],
)
def test_the_steps_after_a_fault_cost_what_they_did(fault: str, options: Any) -> None:
    program = warm(fault, model=False, **options)
    before = usual(program)
    program.fail()
    with warnings.catch_warnings(action="ignore", category=anynan.AnynanWarning):
        program.clean()  # it sees what was left behind
        program.clean()
    events = len(program.tracker.events)
    with counted() as counts:
        program.clean()
    assert not counts, counts
    assert usual(program) <= 1.2 * before
    assert len(program.tracker.events) == events


def test_weights_that_go_bad_again_are_told_again() -> None:
    program = Program("weight", model=False, action="record")
    program.clean()
    for _ in range(2):
        program.fail()
        program.clean()
        with torch.no_grad():
            for p in program.model.parameters():
                p.fill_(0.1)
        program.optimizer.state.clear()
        program.clean()
    (event,) = program.tracker.events
    assert (event.parameter, event.times) == ("4.weight", 2)


def scaled(self: Any, outputs: Any) -> Any:
    """Scale without PyTorch's own method, as FSDP's scaler does."""
    if self._scale is None:
        self._lazy_init_scale_growth_tracker(outputs.device)
    return outputs * self._scale


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("used", ["before", "since"])
@step_or_model
def test_an_overflow_that_a_scaler_answers_for_is_no_fault(own, used, model) -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def make() -> Any:
        kind: Any = type("Own", (torch.amp.GradScaler,), {"scale": scaled} if own else {})
        return kind("cpu", init_scale=2.0**120)

    scaler = make()
    if used == "before":
        scaler.scale(torch.zeros(()))

    def step(x: torch.Tensor) -> None:
        loss = net(x).square().mean() * 1e30
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    with counted() as counts:
        tracker: Any = anynan.torch.track(net if model else step)
        if used == "since":
            scaler = make()
        (step if model else tracker)(torch.ones(2, 2))
        tracker.remove()
    assert counts["searches"] <= 1  # for optimizers, at the first step
    assert [event.severity for event in tracker.events] == ["suspect"]
    assert math.isclose(scaler.get_scale(), 2.0**119)


def clean_step(depth: int, level: str | None, *, model: bool) -> tuple[int, Counter[str]]:
    """Count the calls and the operators of a clean step of so many layers."""
    program = Program("none", model=model, depth=depth, level=level or "step")
    if level is None:
        program.tracker.remove()
        program.step = program._step
    run = functools.partial(program.step, torch.randn(3, 4))
    for _ in range(9):  # after the eighth step what the code reaches is not searched for a while
        run()
    found = min(calls(run) for _ in range(3))
    with Count() as count:
        run()
    if level is not None:
        program.tracker.remove()
    return found, count.seen


def added(depth: int, level: str, *, model: bool) -> tuple[int, Counter[str]]:
    """Count what tracking adds to that."""
    plain, tracked = (clean_step(depth, each, model=model) for each in (None, level))
    operators = tracked[1].copy()
    operators.subtract(plain[1])
    return tracked[0] - plain[0], +operators


@step_or_model
def test_a_clean_step_at_level_step_adds_the_same_whatever_the_depth(model: bool) -> None:
    small, large = (added(depth, "step", model=model) for depth in (5, 40))
    assert small[1] == large[1]
    assert large[1]["_foreach_norm"] == large[1]["stack"] == 1  # all weights at once
    assert large[1]["aminmax"] <= 4  # the batch, the output, its gradient, the loss
    assert large[1].total() <= 10
    assert large[1]["_local_scalar_dense"] == 0  # nothing is read one by one
    assert large[0] - small[0] <= 35  # layers and weights are not gone through in Python
    assert large[0] <= 650


@step_or_model
def test_a_clean_step_at_level_layer_adds_one_reduction_an_output_and_a_gradient(model) -> None:
    small, large = (added(depth, "layer", model=model) for depth in (5, 40))
    layers = 2 * 35
    operators = large[1].copy()
    operators.subtract(small[1])
    assert dict(+operators) == {"aminmax": 2 * layers}
    assert large[1]["_local_scalar_dense"] == 0
    assert large[0] - small[0] <= 50 * layers


@step_or_model
def test_a_step_that_draws_nothing_takes_the_state_of_numpy_once(model, monkeypatch) -> None:
    program = Program("forward", model=model, level="step")
    np.random.seed(1)  # noqa: NPY002
    program.clean()
    taken = []
    real = np.random.get_state
    monkeypatch.setattr(np.random, "get_state", lambda: taken.append(1) or real())
    for _ in range(3):
        program.clean()
    assert not taken


CHANGES: dict[str, Callable[[], object]] = {
    "a normal number": lambda: np.random.randn(),  # noqa: NPY002
    "all words": lambda: np.random.bytes(4 * 624),  # noqa: NPY002  the place is the same after it
    "another": lambda: np.random.seed(3),  # noqa: NPY002
    "a normal number of Python": lambda: random.gauss(0, 1),  # a second one is kept
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_of_a_generator_is_seen(change: str) -> None:
    before = np.random.get_state()  # noqa: NPY002
    try:
        np.random.seed(0)  # noqa: NPY002
        for _ in range(5):
            found = RandomState.now()
            assert pickle.dumps(found.numpy) == pickle.dumps(np.random.get_state())  # noqa: NPY002
            assert found.python == random.getstate()
            CHANGES[change]()
    finally:
        np.random.set_state(before)  # noqa: NPY002


NEVER_MADE = """
import gc
import torch
from anynan.torch.weights.optimizers import find_optimizers

real = gc.get_objects, gc.get_referrers
def refuse(*given):
    raise AssertionError("the heap was searched")

class Own(torch.optim.SGD):
    pass

weight = torch.nn.Parameter(torch.ones(2))
gc.get_objects = gc.get_referrers = refuse
assert find_optimizers({id(weight)}) == []
gc.get_referrers = real[1]
own = Own([weight], lr=0.1)
assert find_optimizers({id(weight)}) == [own]
assert find_optimizers({id(own)}) == []
"""


def test_the_heap_is_searched_only_for_optimizers_of_a_class_that_was_made() -> None:
    done = python("-c", NEVER_MADE, cwd=ROOT)
    assert done.returncode == 0, done.stderr
