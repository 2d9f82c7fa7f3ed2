"""Ctrl-C at any line of anynan: nothing stays behind, and what comes after is still seen."""

import contextlib
import copy
import linecache
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch: Any = pytest.importorskip("torch")

import anynan  # noqa: E402
from tests.chaos import torch_twins, twins  # noqa: E402
from tests.chaos.conftest import chosen  # noqa: E402
from tests.torch_adapter.training import Fault  # noqa: E402

# What puts things back runs in frames of contextlib, too.
PLACES = (str(Path(anynan.__file__).parent) + os.sep, contextlib.__file__)


class Interrupt:
    """Press Ctrl-C at the n-th new line that runs in anynan; 0 only counts them."""

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.seen: dict[tuple[str, int], None] = {}

    def __enter__(self) -> Self:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    @property
    def where(self) -> str:
        """Say which line it was; the last one, where the run was shorter than the counted one."""
        return "{}:{}".format(*list(self.seen)[: self.at][-1])

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PLACES) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        line = frame.f_code.co_filename, frame.f_lineno
        # Of a `with`, an interrupt may come when it has begun and its end is not yet seen to.
        begins = linecache.getline(*line).lstrip().startswith("with ")
        if event == "line" and line not in self.seen and not begins:
            self.seen[line] = None
            if len(self.seen) == self.at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
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
        self.tracker = anynan.torch.track(what, action="record", **options)
        self.run = self.step if target == "model" else self.tracker

    def step(self) -> None:
        self.sgd.zero_grad()
        self.model(torch.ones(3, 4)).square().mean().backward()
        self.sgd.step()

    def mend(self) -> None:
        """Make all finite again."""
        self.fault.armed = None
        self.model.load_state_dict(self.begun)


WAYS: list[tuple[str, dict[str, Any], str]] = [
    ("model", {}, "forward"),
    ("model", {"read": "step"}, "backward"),
    ("model", {"level": "operation"}, "forward"),
    ("step", {}, "backward"),
    ("step", {"read": "step", "parameters": True}, "forward"),
    ("step", {"level": "operation"}, "backward"),
]
# PyTorch calls no hook of a call that Ctrl-C ends, so the next call puts back what it changed.
LATE = 2
LINES: dict[int, int] = {}


def lines(way: int) -> int:
    """Count the lines at which a bad step can be interrupted."""
    if way not in LINES:
        target, options, armed = WAYS[way]
        program = Program(target, **options)
        program.run()
        program.fault.armed = armed
        with Interrupt() as count:
            program.run()
        program.tracker.remove()
        LINES[way] = len(count.seen)
    return LINES[way]


@pytest.fixture
def handler() -> Iterator[Any]:
    """Have Ctrl-C raise here, whatever runs the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.mark.filterwarnings("ignore::anynan.AnynanWarning")
def test_ctrl_c_at_any_line(request: pytest.FixtureRequest, handler: Any) -> None:
    before = None

    @chosen(request.config, examples=12)
    @given(way=st.integers(0, len(WAYS) - 1), place=st.floats(0, 1))
    def at(way: int, place: float) -> None:
        nonlocal before
        target, options, armed = WAYS[way]
        total = lines(way)
        before = before or torch_twins.process()
        program = Program(target, **options)
        hooks = torch_twins.process()
        program.run()
        program.fault.armed = armed
        interrupt = Interrupt(max(1, round(place * total)))
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            program.run()
        where = interrupt.where
        twins.assert_process(hooks, torch_twins.process(), where)
        # Afterwards it works as before.
        program.mend()
        program.run()
        program.run()
        program.tracker.clear()
        program.fault.armed = armed
        program.run()
        program.tracker.check()
        assert any(event.severity == "bad" for event in program.tracker.events), where
        program.tracker.remove()
        assert not any(map(torch_twins.is_ours, hooks_of(program.model))), where
        twins.assert_process(before, torch_twins.process(), where)

    at()


def hooks_of(model: Any) -> Iterator[Any]:
    for module in model.modules():
        for key in torch_twins.MODULE_HOOKS:
            yield from getattr(module, key).values()
    for p in model.parameters():
        yield from (p._backward_hooks or {}).values()
