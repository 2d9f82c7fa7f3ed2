"""What every demo does: it trains until the bug strikes, or without it, and says how that ended."""

from collections.abc import Callable

from rich.console import Console

from anynan._diagnosis.rules.evidence import plural
from anynan._reports.report import render_rich
from anynan._runs.narrower import ONLY
from anynan._runs.overview import tightest
from anynan.errors import NonFiniteError
from anynan.tracker import Tracker

# Trains so many steps without a bug, or with the one of this name, appends each loss, and gives
# what watched.
Train = Callable[[Console, str, int, list[float]], Tracker]


def show(
    title: str, train: Train, bug: str, *, fixed: bool, steps: int, epoch: int = 0,
    parts: str = "layers",
) -> int:  # fmt: skip
    """Train, and tell of it.

    Args:
        title: What the bug is.
        train: The training.
        bug: Name of the bug.
        fixed: Leave the bug out.
        steps: Stop after so many.
        epoch: Steps after which the same batch comes again; 0 if none ever does.
        parts: What the readings are of.

    Returns:
        The demo's exit code: 0 if the bug was found, or stayed away from the fixed training; else
        1.
    """
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{bug}: {title}{' (fixed)' if fixed else ''}")
    losses: list[float] = []
    try:
        tracker = train(console, "" if fixed else bug, steps, losses)
    except NonFiniteError as error:
        _print_report(console, error)
        step = error.event.step
        said = f"Found at step {step}. Run again with --fixed to see it train on."
        broken = f"Step {step} went bad although the bug is fixed: please report this."
        console.print(broken if fixed else said)
        return int(fixed)
    more = f"No reading went bad in {plural(steps, 'step')}: this bug needs more of them (--steps)."
    console.print(_seen(tracker, losses, epoch, parts) if fixed else more)
    return int(not fixed)


def _print_report(console: Console, error: NonFiniteError) -> None:
    """Print the report, which is the exception's message, in colour where there is any."""
    report = render_rich(error.event) if console.is_terminal else str(error)
    console.print("", report, "", sep="\n")


def _seen(tracker: Tracker, losses: list[float], epoch: int, parts: str) -> str:
    """Say what a training without the bug saw."""
    seen = {reading.layer for reading in tracker.history if reading.layer}
    many = f" {len(seen)} {parts}," if seen else ""
    text = f"{plural(len(losses), 'step')},{many} no reading went bad"
    for layer, reading in list(tightest(tracker.history).items())[:1]:
        where = layer or f"the whole {'model' if parts == 'layers' else 'function'}"
        text += f"; tightest headroom {reading.headroom:.1f} bits at {where} ({ONLY})"
    last = (len(losses) - 1) // epoch * epoch if epoch else len(losses) - 1
    if last:
        whose = "The loss of the first batch" if epoch else "The loss"
        text += f".\n{whose} fell from {losses[0]:.2f} to {losses[last]:.2f}"
    return f"{text}."
