"""``anynan run``: a program as it is, with everything in it watched."""

import argparse
import json
import os
import sys

from anynan._cli import program
from anynan._reports.report import render, render_line, render_markdown
from anynan._steps.everywhere import Found, watch_everything
from anynan.options import ACTIONS, LEVELS, Options

USAGE = 2
FAILED = 1
SHOWN = 10


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "run",
        help="run a script or a module, and watch the models in it: anynan run train.py",
        description=(
            "Run a script, or a module with -m, as python would, and watch the models in it. "
            "What comes after its name is its own."
        ),
        usage="anynan run [options] (script | -m module) [its arguments]",
    )
    parser.add_argument(
        "--action", choices=ACTIONS, default="warn",
        help="what happens where something is bad; default: warn",
    )  # fmt: skip
    parser.add_argument("--level", choices=LEVELS, default="step", help="default: step")
    parser.add_argument(
        "--report", metavar="FILE",
        help="write every report there: as text, as Markdown (.md) or as JSON lines (.jsonl)",
    )  # fmt: skip
    parser.add_argument("-m", dest="module", action="store_true", help="run a module")
    parser.add_argument("program", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(chosen: argparse.Namespace) -> int:
    """Run the program.

    Returns:
        Its own exit status; 1 where that is 0, something was bad and ``raise`` was asked for.
    """
    try:
        begin = program.load(chosen.program, chosen.arguments, module=chosen.module)
    except program.Missing as error:
        print(f"anynan run: {error}", file=sys.stderr)
        return USAGE
    found = Found()
    end = watch_everything(Options(action=chosen.action, level=chosen.level), found)
    status, shown = program.run(begin)
    end()
    bad = found.bad()
    if bad and chosen.action in ("record", "skip") and shown is None:
        print(f"\n{render(bad[0])}\n", file=sys.stderr)
    _sum_up(found)
    if chosen.report:
        _write(chosen.report, found)
    return FAILED if bad and chosen.action == "raise" and not status else status


def _sum_up(found: Found) -> None:
    """Say at the end what came of it; of several ranks the first one does, if all is well."""
    bad = found.bad()
    if not bad and os.environ.get("RANK", "0") != "0":
        return
    lines = found.lines() or ["anynan: no model was seen running"]
    lines += [f"  event     {render_line(event)}" for event in bad[:SHOWN]]
    if len(bad) > SHOWN:
        lines.append(f"  event     {len(bad) - SHOWN} more")
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def _write(path: str, found: Found) -> None:
    if path.endswith(".jsonl"):
        text = "".join(f"{json.dumps(event.to_dict())}\n" for event in found.events)
    else:
        form = render_markdown if path.endswith(".md") else render
        parts = ["\n".join(found.lines()), *map(form, found.events)]
        text = "\n\n".join(part.rstrip() for part in parts) + "\n"
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        print(f"anynan run: the report could not be written: {error}", file=sys.stderr)
