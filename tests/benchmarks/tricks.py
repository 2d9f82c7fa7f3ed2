"""What each trick gains over the plain way, in one tracked step.

Run it as ``python -m tests.benchmarks.tricks``, with nothing else at work on the machine. A trick
is code that a reader would not write first: it stays while a step costs at least 2 % more without
it, or for another reason that ``docs/decisions.md`` gives. Both ways run the same step, each with a
tracker and a model of its own; they take turns in one process, in an order that is drawn anew each
round, and medians are compared. All of it is done several times over: a trick goes if the middle
one of its ratios is below what it has to gain.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import anynan
from anynan.torch.step import hooks
from tests.benchmarks.gpt import LARGE, SMALL, Size, training
from tests.benchmarks.timing import machine, options, ratios

Run = Callable[[], object]
# Without a trick a step has to cost this much more for it to stay.
WORTH = 1.02
REPEATS = 5


def gpt(size: Size) -> Callable[[], Run]:
    """Train the GPT."""

    def make() -> Run:
        model, step = training(size)
        anynan.torch.track(model)
        return step

    return make


def registered(x: torch.Tensor, hook: Any) -> Any:
    """Hook a gradient behind a tensor's other hooks by the public way."""
    if x.grad_fn is None:
        return x.register_hook(hook)
    number = x.output_nr
    return x.grad_fn.register_prehook(lambda gradients: hook(gradients[number]))


# Trick, what is run, and what makes the plain way of it: where, which name, what stands there.
TRICKS: tuple[tuple[str, str, Callable[[], Run], tuple[tuple[Any, str, Any], ...]], ...] = (
    *(
        ("the hook behind all others", size.name, gpt(size), ((hooks, "hook_last", registered),))
        for size in (SMALL, LARGE)
    ),
)


class _Changed:
    """Run a step with some names changed, and put them back."""

    def __init__(self, run: Run, changes: tuple[tuple[Any, str, Any], ...]) -> None:
        self.run, self.changes = run, changes

    def __call__(self) -> None:
        before = [(place, name, getattr(place, name)) for place, name, _ in self.changes]
        try:
            for place, name, plain in self.changes:
                setattr(place, name, plain)
            self.run()
        finally:
            for place, name, kept in before:
                setattr(place, name, kept)


def measure(make: Callable[[], Run], changes: Any, rounds: int) -> float:
    """Give the time of the plain way over that of the trick."""
    same = tuple((place, name, getattr(place, name)) for place, name, _ in changes)
    runs = {"trick": _Changed(make(), same), "plain": _Changed(make(), changes)}
    return ratios(runs, "trick", rounds)["plain"]


def main() -> None:
    """Print a line for each trick."""
    chosen = options(__doc__, rounds=40)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    print(f"{machine(f'PyTorch {torch.__version__}', f'NumPy {np.__version__}')}")
    print(f"medians of {chosen.rounds} interleaved steps; a trick stays from {WORTH:.2f} on\n")
    print(f"| trick | in | without it / with it | {REPEATS} times over |\n|---|---|---|---|")
    for trick, place, make, changes in TRICKS:
        found = sorted(measure(make, changes, chosen.rounds) for _ in range(REPEATS))
        middle = found[REPEATS // 2]
        print(f"| {trick} | {place} | {middle:.3f} | {found[0]:.3f} to {found[-1]:.3f} |")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
