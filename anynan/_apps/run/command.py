"""``anynan run``: a program as it is, with everything in it watched."""

import argparse
import os
import sys
from typing import Any

from anynan._apps.run import program
from anynan._apps.run.processes import Processes
from anynan._apps.run.telling import rank, tell
from anynan._apps.run.watching import Asked, Watch
from anynan._cli.statuses import BAD, refuse, takes_ignore
from anynan.options import ACTIONS, LEVELS, environment

GIVE, ITS_OWN = "a script, or -m and a module", "its arguments"  # what a message calls them
FORMS = ("", ".txt", ".log", ".md", ".jsonl", ".html")


def add(commands: Any) -> None:
    """Enter the command."""
    parser = commands.add_parser(
        "run",
        help="run a script or a module, and watch the models in it: anynan run train.py",
        description=(
            "Run a script, or a module with -m, as python would, and watch the models in it. "
            "Everything after its name belongs to it."
        ),
        usage="anynan run [options] (script | -m module) [its arguments]",
        epilog=(
            "example: anynan run --report found.html train.py --lr 1e-3\n"
            "exit status: the program's own; with --fail or --action raise 1 where that is 0 and "
            "something was bad; 2 if there is no such program, or no report can be written"
        ),
    )
    parser.add_argument(
        "--action", choices=ACTIONS, default="warn",
        help="what happens if something is bad; default: warn",
    )  # fmt: skip
    parser.add_argument(
        "--fail", action="store_true",
        help="exit with 1 if something was bad and the program's own status is 0",
    )  # fmt: skip
    parser.add_argument("--level", choices=LEVELS, default="step", help="default: step")
    parser.add_argument(
        "--report", metavar="FILE",
        help="write every report there: as text (.txt) or as Markdown (.md); or a file for each "
        "model: the run as JSON lines (.jsonl), which anynan report reads, or a page (.html)",
    )  # fmt: skip
    parser.add_argument("--within", help=argparse.SUPPRESS)  # where a process tells its program
    takes_ignore(parser)
    parser.add_argument("-m", dest="module", action="store_true", help="run a module")
    parser.add_argument("program", metavar=GIVE, help=argparse.SUPPRESS)
    parser.add_argument(
        "arguments", metavar=ITS_OWN, nargs=argparse.REMAINDER, help=argparse.SUPPRESS
    )
    parser.set_defaults(run=run, whole=True)


def run(chosen: argparse.Namespace) -> int:
    """Run the program.

    Returns:
        Its own exit status; 1 where that is 0, something was bad and this was asked for.
    """
    try:
        chosen.action = _action(chosen.action)
        if chosen.report:
            _refuse_report(chosen.report)
        begin = program.load(chosen.program, chosen.arguments, module=chosen.module)
    except program.Missing as error:
        return refuse("run", str(error))
    except SyntaxError as error:  # shown as Python shows it
        sys.excepthook(SyntaxError, error.with_traceback(None), None)
        return BAD
    if chosen.action == "off":
        return program.run(begin)[0]
    report = os.path.abspath(chosen.report) if chosen.report else None
    ignore = tuple(chosen.ignore)
    asked = Asked(chosen.action, chosen.level, ignore, report, chosen.within)
    watch = Watch(asked)
    own = _own_name(chosen)
    processes = Processes(asked, watch, own)
    told = watch.telling(asked.within, os.path.basename(own)) if asked.within else None
    with watch.errors, processes:
        status, ended_by = program.run(begin)
    heard = processes.heard()
    ending = watch.close(ended_by, heard)
    if heard.any and watch.idle():  # a launcher: the report is theirs
        asked = asked._replace(report=None)
    lines = tell(asked, watch, ending)
    if ending.harmed or rank() == "0":  # of several ranks the first one says that all is well
        for line in lines:
            print(line, file=sys.stderr, flush=True)
    if told is not None and not watch.idle():
        told.ended([], harmed=ending.harmed)
    fails = chosen.fail or asked.action == "raise"
    return BAD if ending.harmed and fails and not status else status


def _action(given: str) -> str:
    """Give the action that holds: ``ANYNAN`` goes before the options.

    Raises:
        Missing: If it is an unknown word.
    """
    try:
        return environment() or given
    except ValueError as error:
        raise program.Missing(str(error)) from None


def _own_name(chosen: argparse.Namespace) -> str:
    """Name the program as it would name itself to start again."""
    main: Any = sys.modules["__main__"]
    return str(main.__spec__.name if chosen.module else main.__file__)


def _refuse_report(path: str) -> None:
    """Refuse a file that no report could be written to, before the program has run for hours.

    Raises:
        Missing: If its ending is unknown, or its folder is missing or cannot be written to.
    """
    end, folder = os.path.splitext(path)[1], os.path.dirname(os.path.abspath(path))
    if end not in FORMS:
        known = ", ".join(filter(None, FORMS))
        msg = f"--report {path}: {end} is no form of a report; choose from {known}"
    elif not os.path.isdir(folder):
        msg = f"--report {path}: there is no folder {folder}"
    elif os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
        msg = f"--report {path}: it cannot be written"
    else:
        return
    raise program.Missing(msg)
