"""Time a tracked training step beside what users would otherwise pick.

Every variant trains its own copy of the same model; the variants take turns in one process, a
few steps each, and medians of their times are divided by the untracked median. Run it with
nothing else on the machine: ``make bench``.
"""

import contextlib
import importlib
import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import anynan
from anynan._everywhere import Found
from anynan.options import Options
from anynan.torch.watchall import watch_all
from tests.benchmarks.gpt import LARGE, SMALL, Size, publish_sizes, training
from tests.benchmarks.timing import ratios
from tests.flat import split

GOALS = {
    SMALL.name: "step <= 1.05, layer <= 1.15",
    LARGE.name: "step <= 1.01, layer <= 1.03",
}


def plain(model: nn.Module, step: Callable[[], None]) -> Callable[[], None]:
    return step


def tracked(
    model: nn.Module, step: Callable[[], None], *, whole: bool = False, **chosen: Any
) -> Callable[[], None]:
    """Run under a tracker of the model, or of the whole step."""
    tracker = anynan.torch.track(step if whole else model, **split(chosen))
    return tracker if whole else step


@contextlib.contextmanager
def unasked() -> Iterator[None]:
    """Watch as `anynan run` does: models are found by their call, and what is around is noted.

    For a whole turn: to replace at each step what every module is called by would cost more than
    what is measured.
    """
    undo = watch_all(Options(action="warn", level="step"), Found())
    try:
        yield
    finally:
        undo()


def within(
    tool: Callable[[], Any], model: nn.Module, step: Callable[[], None]
) -> Callable[[], None]:
    """Run each step inside a tool's context."""

    def run() -> None:
        with tool():
            step()

    return run


def isnan_hooks(model: nn.Module, step: Callable[[], None]) -> Callable[[], None]:
    """Run with the hook people write: isnan and isinf on every output, forward only."""

    def hook(module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and (
            torch.isnan(output).any() or torch.isinf(output).any()
        ):
            raise RuntimeError(type(module).__name__)

    for module in model.modules():
        module.register_forward_hook(hook)
    return step


def transformers_debug(model: nn.Module, step: Callable[[], None]) -> Callable[[], None]:
    """Run under transformers' DebugUnderflowOverflow, forward only."""
    from transformers.debug_utils import DebugUnderflowOverflow

    DebugUnderflowOverflow(model)  # type: ignore[no-untyped-call]
    return step


BASE, RUN = "no tracking", "anynan run"
VARIANTS: dict[str, Callable[[nn.Module, Callable[[], None]], Callable[[], None]]] = {
    BASE: plain,
    'anynan track(model, level="step")': partial(tracked, level="step"),
    'anynan track(step, level="step")': partial(tracked, whole=True, level="step"),
    RUN: plain,
    "anynan track(model)": tracked,
    "anynan track(step)": partial(tracked, whole=True),
    "anynan, backward=False": partial(tracked, backward=False),
    'anynan, read="end"': partial(tracked, read="end"),
    'anynan track(model, level="operation")': partial(tracked, level="operation"),
    "autograd.detect_anomaly": partial(within, partial(torch.autograd.detect_anomaly, True)),
    "isnan/isinf forward hooks": isnan_hooks,
    "transformers DebugUnderflowOverflow": transformers_debug,
    "sherlorch.trace": partial(within, lambda: importlib.import_module("sherlorch").trace()),
}
TURN = 8
SELDOM = ('anynan track(model, level="operation")', "sherlorch.trace")


def measure(size: Size, rounds: int, device: str) -> dict[str, float]:
    runs = {}
    for name, make in VARIANTS.items():
        model, step = training(size, device)
        with warnings.catch_warnings(), contextlib.redirect_stdout(None):
            warnings.simplefilter("ignore")
            runs[name] = make(model, step)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    turns = math.ceil(rounds / (TURN - TURN // 4))
    return ratios(runs, BASE, turns, turn=TURN, around={RUN: unasked}, wait=wait, seldom=SELDOM)


if __name__ == "__main__":
    publish_sizes("torch eager", __doc__, measure, GOALS)
