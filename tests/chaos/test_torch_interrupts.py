"""Nothing stays behind: after Ctrl-C at any line of anynan, and over thousands of steps."""

import contextlib
import copy
import gc
import linecache
import logging
import os
import random
import signal
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import pytest

torch: Any = pytest.importorskip("torch")

import anynan  # noqa: E402
from tests.chaos import torch_twins, twins  # noqa: E402
from tests.flat import split  # noqa: E402
from tests.torch_adapter.training import Fault, live_tensors  # noqa: E402

pytestmark = [pytest.mark.tier(2), pytest.mark.filterwarnings("ignore::anynan.AnynanWarning")]

# What puts things back runs in frames of contextlib, too.
PLACES = (str(Path(anynan.__file__).parent) + os.sep, contextlib.__file__)
# Functions that put something in its place or take it away: each line of them is tried.
SEAMS = {
    "FunctionSession._put_back", "Operations.begin", "Operations.end", "Operations._stop",
    "Patches.put", "Patches.undo", "Seam.__enter__", "Seam.__exit__", "Watcher.__enter__",
    "ends_into", "setting",
}  # fmt: skip


class Interrupt:
    """Press Ctrl-C at the n-th new line that runs in anynan; 0 only counts them.

    Python looks for signals as a function begins and as a call returns: a line counts that comes
    first, or after a call. A ``finally`` is still to come when the last call before it returns.
    """

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.places: list[tuple[CodeType, int]] = []
        self._seen: set[tuple[CodeType, int]] = set()
        self._called: dict[int, bool] = {}  # by frame, whether its last line called anything

    def __enter__(self) -> Self:
        gc.collect()  # what is collected inside would swallow it
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    @property
    def where(self) -> str:
        """Say which line it was; the last one, where the run was shorter than the counted one."""
        code, line = self.places[-1]
        return f"{code.co_filename}:{line} in {code.co_qualname}"

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code  # a generator expression may walk the whole heap
        if not code.co_filename.startswith(PLACES) or code.co_name == "<genexpr>":
            return None
        self._called[id(frame)] = True
        return self._line

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event != "line":
            return self._line
        code, number = line = frame.f_code, frame.f_lineno
        called = self._called[id(frame)]
        text = linecache.getline(code.co_filename, number).lstrip()
        self._called[id(frame)] = "(" in text and not text.startswith("with ")
        before = linecache.getline(code.co_filename, number - 1).lstrip()
        if called and line not in self._seen and not before.startswith("finally:"):
            self.places.append(line)
            if len(self.places) == self.at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        self._seen.add(line)
        return self._line


class Program:
    """Hold a small model, and a way to train it."""

    def __init__(self, target: str, **options: Any) -> None:
        torch_twins.seed(0)
        self.fault = Fault()
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), self.fault, torch.nn.Linear(4, 1)
        )
        self.sgd = torch.optim.SGD(self.model.parameters(), 0.1)
        self.begun = copy.deepcopy(self.model.state_dict())
        what = self.model if target == "model" else self.step
        self.tracker = anynan.torch.track(what, action="record", **split(options))
        self.run = self.step if target == "model" else self.tracker

    def step(self) -> None:
        self.sgd.zero_grad()
        self.model(torch.ones(3, 4)).square().mean().backward()
        self.sgd.step()

    def mend(self) -> None:
        self.fault.armed = None
        self.model.load_state_dict(self.begun)


WAYS: list[tuple[str, dict[str, Any], str]] = [
    ("model", {}, "forward"),
    ("model", {"read": "end"}, "backward"),
    ("model", {"level": "operation"}, "forward"),
    ("step", {}, "backward"),
    ("step", {"read": "end", "parameters": True}, "forward"),
    ("step", {"level": "operation"}, "backward"),
]
# PyTorch calls no hook of a call that Ctrl-C ends: what watches every operation of a model that
# is tracked alone is put away by the next step, or by ``remove``.
LATE = WAYS[2]


@pytest.fixture
def handler() -> Iterator[Any]:
    """Have Ctrl-C raise here, whatever runs the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def places(found: list[tuple[CodeType, int]], amount: str, *, seams: bool = True) -> list[int]:
    """Choose lines to interrupt, counted from 1."""
    if amount == "many":  # others each time
        return list(range(random.randint(1, 5), len(found) + 1, 5))
    few = range(1, len(found) + 1, len(found) // 6)
    ours = [i for i, (code, _) in enumerate(found, 1) if seams and code.co_qualname in SEAMS]
    return sorted({*few, *ours})


amounts = pytest.mark.parametrize("amount", ["few", pytest.param("many", marks=pytest.mark.long)])


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way[0]}-{way[2]}-{way[1]}")
@amounts
def test_ctrl_c_at_any_line_of_a_step(way: Any, amount: str, handler: Any) -> None:
    target, options, armed = way
    program = Program(target, **options)
    program.run()
    program.fault.armed = armed
    with Interrupt() as count:
        program.run()
    program.tracker.remove()
    before = torch_twins.process()
    for place in places(count.places, amount, seams="level" in options):
        program = Program(target, **options)
        tracked = torch_twins.process()
        program.run()
        program.fault.armed = armed
        with contextlib.suppress(KeyboardInterrupt), Interrupt(place) as interrupt:
            program.run()
        where = interrupt.where
        if way is not LATE:
            twins.assert_process(tracked, torch_twins.process(), where)
        elif place % 2:  # nothing comes after it
            program.tracker.remove()
            twins.assert_process(before, torch_twins.process(), where)
            continue
        program.mend()  # it works as before
        program.run()
        program.run()
        twins.assert_process(tracked, torch_twins.process(), where)
        program.tracker.clear()
        program.fault.armed = armed
        program.run()
        program.tracker.flush()
        assert any(event.severity == "bad" for event in program.tracker.events), where
        program.tracker.remove()
        assert not any(map(torch_twins.is_ours, hooks_of(program.model))), where
        twins.assert_process(before, torch_twins.process(), where)


def each_interrupt(begin: Any, act: Any, amount: str) -> Iterator[tuple[str, Any]]:
    """Interrupt what is done with something at one line after the other, each time made anew."""
    made = begin()
    with Interrupt() as count:
        act(made)
    for place in places(count.places, amount):
        made = begin()
        with contextlib.suppress(KeyboardInterrupt), Interrupt(place) as interrupt:
            act(made)
        yield interrupt.where, made


# As the last reference goes, Python lets nothing out of a `__del__`.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@amounts
def test_ctrl_c_at_any_line_of_remove(amount: str, handler: Any) -> None:
    """A second ``remove`` ends what the first began."""

    def begin() -> Program:
        program = Program(LATE[0], **LATE[1])
        program.run()
        return program

    begin().tracker.remove()
    before = torch_twins.process()
    for where, program in each_interrupt(begin, lambda made: made.tracker.remove(), amount):
        program.tracker.remove()
        assert not any(map(torch_twins.is_ours, hooks_of(program.model))), where
        twins.assert_process(before, torch_twins.process(), where)


@amounts
def test_ctrl_c_at_any_line_of_track(amount: str, handler: Any) -> None:
    anynan.torch.track(torch.nn.Linear(2, 2)).remove()
    before = torch_twins.process()
    for where, model in each_interrupt(lambda: torch.nn.Linear(2, 2), anynan.torch.track, amount):
        with contextlib.suppress(ValueError):  # it is not tracked
            anynan.untrack(model)
        assert not any(map(torch_twins.is_ours, hooks_of(model))), where
        twins.assert_process(before, torch_twins.process(), where)


def hooks_of(model: Any) -> Iterator[Any]:
    for module in model.modules():
        for key in torch_twins.MODULE_HOOKS:
            yield from getattr(module, key).values()
    for p in model.parameters():
        yield from (p._backward_hooks or {}).values()


def held(model: Any) -> dict[str, int]:
    """Count what could pile up."""
    return {
        "tensors": live_tensors(),
        "objects": len(gc.get_objects()),
        "blocks": sys.getallocatedblocks(),
        "hooks": sum(count for *_, count in torch_twins.counted(model)),
        "hooks of weights": sum(len(p._backward_hooks or ()) for p in model.parameters()),
    }


@pytest.mark.parametrize(
    ("target", "options"),
    [("model", {"action": "skip"}), ("step", {"patience": 3, "read": "end"})],
    ids=["model", "step"],
)
@pytest.mark.parametrize("steps", [600, pytest.param(21_000, marks=pytest.mark.long)])
def test_nothing_piles_up(target: str, options: Any, steps: int, caplog: Any) -> None:
    fault = Fault()
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.Tanh(), fault, torch.nn.Dropout(0.1), torch.nn.Linear(8, 1)
    )
    adam = torch.optim.Adam(model.parameters())
    x, y = torch.randn(16, 4, 8), torch.randn(16, 4, 1)

    def step(i: int) -> None:
        fault.armed = ("forward", "backward")[i // 100 % 2] if i % 100 == 50 else None
        adam.zero_grad()
        (model(x[i % 16]) - y[i % 16]).square().mean().backward()
        adam.step()

    caplog.set_level(logging.CRITICAL + 1, "anynan")  # pytest keeps all that is logged
    tracker = anynan.torch.track(
        model if target == "model" else step, **split({"history": 50, **options})
    )
    run = step if target == "model" else tracker
    counts, seen = [], 0
    with twins.quiet():
        for i in range(steps):
            run(i)
            if (i + 1) % (steps // 3) == 0:
                seen += tracker.count("bad")
                tracker.clear()  # events are the program's to forget: the rest must not grow
                counts.append(held(model))
    assert seen == steps // 100
    for what in ("tensors", "hooks", "hooks of weights"):
        assert len({count[what] for count in counts}) == 1
    # What piles up does so each time; what a cache keeps, as another cause is first told, once.
    for what, most in ("objects", 100), ("blocks", 1000):
        assert min(after[what] - before[what] for before, after in pairwise(counts)) < most
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    tracker.remove()
    assert held(model)["hooks"] == 0
