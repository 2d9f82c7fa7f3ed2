"""How a demo ends: the bug was found, did not show, or the fixed training went through."""

from rich.console import Console

from anynan._diagnosis.rules.evidence import plural
from anynan._reports.report import render_rich
from anynan._runs.narrower import ONLY
from anynan._runs.overview import tightest
from anynan.errors import NonFiniteError
from anynan.tracker import Tracker


def found(console: Console, error: NonFiniteError, *, expected: bool) -> int:
    """Print the report, which is the exception's message, in colour where there is any.

    Args:
        console: Where to.
        error: What the tracker raised.
        expected: The bug was left in.

    Returns:
        The demo's exit code: 0 if this was to be found.
    """
    step = error.event.step
    report = render_rich(error.event) if console.is_terminal else str(error)
    console.print("", report, "", sep="\n")
    if expected:
        console.print(f"Found at step {step}. Run again with --fixed to see it train on.")
        return 0
    console.print(f"Step {step} went bad although the bug is fixed: please report this.")
    return 1


def missed(console: Console, steps: int) -> int:
    """Say that the bug did not show; the demo's exit code is 1."""
    many = plural(steps, "step")
    console.print(f"No reading went bad in {many}: this bug needs more of them (--steps).")
    return 1


def trained(
    console: Console, tracker: Tracker, losses: list[float], *, epoch: int = 0,
    parts: str = "layers",
) -> int:  # fmt: skip
    """Say what a training without the bug saw; the demo's exit code is 0.

    Args:
        console: Where to.
        tracker: What watched it.
        losses: The loss of each step.
        epoch: Steps after which the same batch comes again; 0 if none ever does.
        parts: What the readings are of.
    """
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
    console.print(f"{text}.")
    return 0
