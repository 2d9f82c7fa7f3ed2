"""``anynan report``: what a run saw, from the file it wrote."""

import argparse
from typing import Any

from anynan._cli.statuses import BAD, FINE, TOLD, refuse, says


def add(commands: Any) -> None:
    """Enter the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "report",
        help="show what a run saw, from the file it wrote: anynan report run.jsonl",
        description="Show what a run saw, from the file that tracker.to_jsonl(path) wrote.",
        epilog=f"example: anynan report run.jsonl --html report.html\n{TOLD}",
    )
    parser.add_argument("file", help="what tracker.to_jsonl(path) wrote, whole or cut off")
    parser.add_argument("--html", metavar="OUT", help="also write the page to this file")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Print the report of a run.

    Args:
        chosen: The words of the command line.

    Returns:
        The exit status: 1 if something was bad, 2 if the file cannot be read.
    """
    from anynan._apps.runfile.reading import load

    try:
        found = load(chosen.file)
        if chosen.html is not None:
            found.to_html(chosen.html)
    except (OSError, ValueError) as error:
        return refuse("report", says(error))
    print(found.report())
    return BAD if found.counts["bad"] or found.harms else FINE
