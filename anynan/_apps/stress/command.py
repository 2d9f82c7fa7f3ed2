"""``anynan stress``: hunt for inputs that make NaN or Inf."""

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from anynan._cli.statuses import BAD, FINE, named, refuse, says, takes_ignore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anynan._apps.stress.report import StressReport


def add(commands: Any) -> None:
    """Enter the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "stress",
        help="hunt for inputs that make NaN or Inf: anynan stress train.py",
        description=(
            "Hunt for inputs at which a training script, or a function, makes NaN or Inf. A script "
            "runs up to its training loop; the loop's body is then run on changed data, and the "
            "script ends there."
        ),
        epilog=(
            "example: anynan stress --example losses:batch losses:focal\n"
            "exit status: 0 nothing found inside the example's range, 1 something found or no "
            "operation seen, 2 it could not begin"
        ),
    )
    parser.add_argument("target", help="a script, or module:function")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    parser.add_argument(
        "--example", metavar="MODULE:FUNCTION", help="gives the arguments of the function"
    )
    parser.add_argument("--budget", type=float, default=60.0, metavar="SECONDS", help="default: 60")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument("--accept", metavar="FILE", help="findings that are accepted (TOML)")
    parser.add_argument(
        "--write-baseline", metavar="REASON", help="add what is found to the file of --accept"
    )
    parser.add_argument("--to-pytest", metavar="FILE", help="write what is found as tests")
    takes_ignore(parser)
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Hunt, and print what was found.

    Args:
        chosen: The words of the command line.

    Returns:
        The exit status.
    """
    try:
        report = _hunted(chosen)
        if chosen.write_baseline:
            report.accept(chosen.accept, chosen.write_baseline)
        if chosen.to_pytest and report.findings:
            report.to_pytest(chosen.to_pytest, chosen.target if ":" in chosen.target else None)
    except OSError as error:
        return refuse("stress", says(error))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return refuse("stress", f"{chosen.target}: {error}")
    print(report)
    return FINE if report.ok or chosen.write_baseline else BAD


def _hunted(chosen: argparse.Namespace) -> "StressReport":
    from anynan._apps.stress.hunt import stress

    known = chosen.accept
    if chosen.write_baseline and not known:
        msg = "give --write-baseline a file to write to, as --accept FILE"
        raise ValueError(msg)
    if chosen.write_baseline and not os.path.exists(known):
        known = None
    target, example = chosen.target, tuple(chosen.arguments)
    if not target.endswith(".py"):
        wanted = "a script that ends in .py, or module:function"
        example = named(chosen.example, wanted)() if chosen.example else ()
        example = example if isinstance(example, tuple) else (example,)
        target = named(target, wanted)
    with _progress() as tell:
        return stress(
            target, *example, budget=chosen.budget, seed=chosen.seed, accept=known, tell=tell,
            ignore=chosen.ignore,
        )  # fmt: skip


@contextmanager
def _progress() -> "Iterator[Callable[[str, float], object] | None]":
    """Show on a terminal what is tried, and how much of the budget is spent."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("stress", total=1.0)

        def tell(what: str, part: float) -> None:
            bar.update(task, description=what[-60:] or "stress", completed=min(part, 1.0))

        yield tell
