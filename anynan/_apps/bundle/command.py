"""``anynan replay``: run the operation of a bundle again."""

import argparse
from typing import Any

from anynan._cli.statuses import BAD, FINE, refuse


def add(commands: Any) -> None:
    """Enter the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="run the operation of a saved bundle again: anynan replay bundle",
        description=(
            "Run the operation of a bundle that tracker.save(folder) wrote, in a process of its "
            "own, and compare what it gives with the event. A bundle that was changed is not run."
        ),
        epilog="example: anynan replay bundle\nexit status: 0 as in the event, 1 not so, or not "
        "run, 2 no bundle",
    )
    parser.add_argument("folder", help="what tracker.save(folder) wrote")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Run a bundle's operation, and print what came of it.

    Args:
        chosen: The words of the command line.

    Returns:
        The exit status: 1 if it is not as in the event, 2 if it is no bundle.
    """
    from anynan._apps.bundle.bundle import load
    from anynan._apps.bundle.replay import replay
    from anynan._base.escaping import name, prose
    from anynan._calls.calls import BundleError
    from anynan._reports.report import render_line

    try:
        bundle = load(chosen.folder)
    except (BundleError, ImportError) as error:
        return refuse("replay", f"{name(chosen.folder)}: {prose(str(error))}")
    print(render_line(bundle.event))
    seen = [f"{key} {text}" for key, text in bundle.versions.items()]
    print(f"  seen with  {prose(', '.join(seen))}")
    for note in bundle.notes:
        print(f"  note       {prose(note)}")
    for item in bundle.left_out:
        print(f"  left out   {name(str(item['name']))}: {prose(str(item['why']))}")
    outcome = replay(bundle)
    for line in outcome.printed.splitlines():
        print(f"  {name(line)}")
    print(prose(outcome.text))
    return FINE if outcome.same else BAD
