"""``anynan stress``: hunt for inputs that make NaN or Inf."""

import argparse
import sys
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from anynan._base import products
from anynan._cli.statuses import BAD, FINE, named, refuse

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
            "exit status: 0 nothing found inside the example's range, 1 something found, 2 it "
            "could not begin"
        ),
    )
    parser.add_argument("target", help="a script, or module:function")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    parser.add_argument(
        "--example", metavar="MODULE:FUNCTION", help="gives the arguments of the function"
    )
    parser.add_argument("--budget", type=float, default=60.0, metavar="SECONDS", help="default: 60")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Hunt, and print what was found.

    Args:
        chosen: The words of the command line.

    Returns:
        The exit status.
    """
    from anynan._apps.stress.script import NoLoopError

    try:
        report = _hunted(chosen)
    except (NoLoopError, OSError, ImportError, AttributeError, TypeError, ValueError) as error:
        return refuse("stress", f"{chosen.target}: {error}")
    print(report)
    return FINE if report.ok else BAD


def _hunted(chosen: argparse.Namespace) -> "StressReport":
    from anynan._apps.stress.hunt import stress
    from anynan._apps.stress.script import hunt_in

    def hunt(target: Any, *example: Any) -> "StressReport":
        with _progress() as tell:
            return stress(target, *example, budget=chosen.budget, seed=chosen.seed, tell=tell)

    if chosen.target.endswith(".py"):
        load = products.part("run", "program").load

        def run(code: Any, scope: dict[str, Any]) -> None:
            load(chosen.target, chosen.arguments, module=False, code=code, scope=scope)()

        found: StressReport = hunt_in(chosen.target, hunt, run)
        return found
    wanted = "a script that ends in .py, or module:function"
    example = named(chosen.example, wanted)() if chosen.example else ()
    example = example if isinstance(example, tuple) else (example,)
    return hunt(named(chosen.target, wanted), *example)


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
