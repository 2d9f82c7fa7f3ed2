"""``anynan precision``: what breaks first in a narrow dtype."""

import argparse
from typing import Any

from anynan._cli.statuses import BAD, FINE, named, refuse, takes_ignore
from anynan.errors import reason


def add(commands: Any) -> None:
    """Enter the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "precision",
        help="find what breaks first in half precision: anynan precision module:function",
        description=(
            "Run a function of yours that takes nothing (a training step, or a call of a model) in "
            "float32 and in a narrow dtype, and tell what breaks first and what to keep in float32."
        ),
        epilog=(
            "example: anynan precision train:step --dtype bfloat16\n"
            "exit status: 0 it fits, 1 something breaks, 2 the function could not be run"
        ),
    )
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="train:step, of train.py here")
    parser.add_argument("--dtype", default="float16", metavar="NAME", help="default: float16")
    parser.add_argument("--how", choices=("cast", "autocast"), default="cast", help="default: cast")
    parser.add_argument("--errors", action="store_true", help="measure rounding errors, too")
    parser.add_argument("--no-plan", action="store_true", help="look for no plan")
    takes_ignore(parser)
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Run a function, and print the report.

    Args:
        chosen: The words of the command line.

    Returns:
        The exit status: 1 if something breaks, 2 if the function could not be run.
    """
    from anynan._apps.precision.precision import precision

    try:
        report = precision(
            named(chosen.target, "module:function"), dtype=chosen.dtype, how=chosen.how,
            plan=not chosen.no_plan, errors=chosen.errors, ignore=chosen.ignore,
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001  the program's own, too
        return refuse("precision", f"{chosen.target}: {reason(error)}")
    print(report)
    return FINE if report.fits else BAD
