"""``anynan run``: a program as it is, with everything in it watched."""

import argparse
import json
import os
import sys
from contextvars import copy_context
from typing import Any

from anynan._cli import program
from anynan._cli.again import watched_again
from anynan._recorder.errorlog import ErrorLog
from anynan._reports.report import render, render_line, render_markdown
from anynan._steps.everywhere import Found, watch_everything
from anynan.events import Event
from anynan.options import ACTIONS, LEVELS, Options

USAGE = 2
FAILED = 1
SHOWN = 10
NOTHING = (
    "anynan: no model or compiled function was seen running, and NumPy met no overflow, "
    "division by zero or invalid value"
)


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
        help="write every report there: as text, as Markdown (.md), as JSON lines (.jsonl) "
        "or as a page (.html), one for each model",
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
    found, errors = Found(), ErrorLog(copy_context())
    end = watch_everything(Options(action=chosen.action, level=chosen.level), found)
    with errors, watched_again(_given(chosen), _own_name(chosen)):
        status, shown = program.run(begin)
    end()
    bad = found.bad()
    if bad and chosen.action in ("record", "skip") and shown is None:
        print(f"\n{render(bad[0], which=found.several)}\n", file=sys.stderr)
    lines = [*found.lines(SHOWN), *_floats(errors)]
    _sum_up(lines, bad, which=found.several)
    if chosen.report:
        _write(chosen.report, lines, found)
    return FAILED if bad and chosen.action == "raise" and not status else status


def _given(chosen: argparse.Namespace) -> list[str]:
    """Give the options as they were given."""
    report = ["--report", os.path.abspath(chosen.report)] if chosen.report else []
    return ["--action", chosen.action, "--level", chosen.level, *report]


def _own_name(chosen: argparse.Namespace) -> str:
    """Name the program as it would name itself to start again."""
    main: Any = sys.modules["__main__"]
    return str(main.__spec__.name if chosen.module else main.__file__)


def _rank() -> str:
    """Name this process among those of a distributed run; "0" is the first, or the only one."""
    return os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"


def _floats(errors: ErrorLog) -> list[str]:
    """Say what NumPy met in the program's own code."""
    if not errors.lines:
        return []
    return [
        f"anynan: NumPy met: {errors}",
        "  note      whether it did harm is not known: anynan.track(function) follows it",
    ]


def _sum_up(told: list[str], bad: list[Event], *, which: bool) -> None:
    """Say at the end what came of it; of several ranks the first one does, if all is well."""
    if not bad and _rank() != "0":
        return
    lines = told or [NOTHING]
    lines += [f"  event     {render_line(event, which=which)}" for event in bad[:SHOWN]]
    if len(bad) > SHOWN:
        lines.append(f"  event     {len(bad) - SHOWN} more")
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def _write(path: str, lines: list[str], found: Found) -> None:
    stem, end = os.path.splitext(path)
    if _rank() != "0":
        stem += f"-rank{_rank()}"
        path = stem + end
    try:
        if end == ".html" and found.runs():
            for i, run in enumerate(found.runs()[:SHOWN]):
                run.to_html(f"{stem}-{i + 1}{end}" if i else path)
            return
        if end == ".jsonl":
            text = "".join(f"{json.dumps(event.to_dict())}\n" for event in found.events)
        else:
            form = render_markdown if end == ".md" else render
            parts = ["\n".join(lines), *map(form, found.events)]
            text = "\n\n".join(part.rstrip() for part in parts) + "\n"
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        print(f"anynan run: the report could not be written: {error}", file=sys.stderr)
