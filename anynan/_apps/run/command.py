"""``anynan run``: a program as it is, with everything in it watched."""

import argparse
import importlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from anynan._apps.run import program
from anynan._apps.run.ending import SHOWN, Ending, Own
from anynan._base import notices, products
from anynan._base.messages import left
from anynan._base.patches import Patches
from anynan._cli.statuses import BAD, refuse, takes_ignore
from anynan._everywhere import Found, watch_everything
from anynan._readings.history import Ring
from anynan._reports.logs import listeners
from anynan._reports.report import render, render_markdown
from anynan._runs.run import Run
from anynan._steps.record import numpy_met
from anynan.options import ACTIONS, LEVELS, Options, environment

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
    if chosen.action == "off":
        return program.run(begin)[0]
    arrays: Any = importlib.import_module("anynan.arrays.program")
    found, own, errors = Found(), Own(), arrays.listen()
    listeners.append(own.hear)
    numpy_met[0] = errors.__str__
    options = Options(action=chosen.action, level=chosen.level, ignore=chosen.ignore)
    end = watch_everything(options, found)
    notices.blanket[0] = bool(sys.warnoptions)
    with errors, _watched_again(_given(chosen), _own_name(chosen)):
        status, ended_by = program.run(begin)
    found.ended_by = ended_by
    notices.ended_by.append(ended_by)
    end()
    notices.ended_by.clear()
    notices.blanket[0] = True
    listeners.remove(own.hear)
    numpy_met[0] = None
    ending = Ending(found, own, arrays.closing(errors, told=bool(found.bad())), ended_by)
    shown = ended_by is not None and not isinstance(ended_by, SystemExit)
    quiet = chosen.action in ("record", "skip") and not shown
    for event in found.bad()[: int(quiet)]:
        print(f"\n{render(event, which=found.several)}\n", file=sys.stderr)
    lines = list(left(ending.lines(), chosen.ignore))
    if ending.harmed or _rank() == "0":  # of several ranks the first one says that all is well
        for line in (*lines, *ending.listed()):
            print(line, file=sys.stderr, flush=True)
    if chosen.report:
        _write(chosen.report, lines, found, ending)
    fails = chosen.fail or chosen.action == "raise"
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


def _given(chosen: argparse.Namespace) -> list[str]:
    """Give the options as they were given."""
    report = ["--report", os.path.abspath(chosen.report)] if chosen.report else []
    fail = ["--fail"] if chosen.fail else []
    ignored = [word for name in chosen.ignore for word in ("--ignore", name)]
    return ["--action", chosen.action, "--level", chosen.level, *ignored, *fail, *report]


def _own_name(chosen: argparse.Namespace) -> str:
    """Name the program as it would name itself to start again."""
    main: Any = sys.modules["__main__"]
    return str(main.__spec__.name if chosen.module else main.__file__)


def _rank() -> str:
    """Name this process among those of a distributed run; "0" is the first, or the only one."""
    return os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"


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


def _write(path: str, lines: list[str], found: Found, ending: Ending) -> None:
    stem, end = os.path.splitext(path)
    if _rank() != "0":
        stem += f"-rank{_rank()}"
        path = stem + end
    runs = [replace(run, harms=ending.harms) for run in found.runs()[:SHOWN]]
    try:
        if end == ".html" and runs:
            for i, run in enumerate(runs):
                run.to_html(f"{stem}-{i + 1}{end}" if i else path)
            return
        if end == ".jsonl":
            counts = Counter(
                e.severity if e.expected is None else "expected" for e in ending.events
            )
            nothing = Run(
                "the program", Ring(0), events=tuple(ending.events), counts=counts,
                notes=tuple(lines), harms=ending.harms,
            )  # fmt: skip
            writing = products.part("runfile", "writing")
            for i, run in enumerate(runs or [nothing]):
                writing.Writer(f"{stem}-{i + 1}{end}" if i else path).whole(run)
            return
        form = render_markdown if end == ".md" else render
        parts = ["\n".join(lines), *map(form, ending.events)]
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n\n".join(part.rstrip() for part in parts) + "\n")
    except OSError as error:
        print(f"anynan run: the report could not be written: {error}", file=sys.stderr)


def _watched_again(options: Sequence[str], own: str) -> Patches:
    """Have what starts the running program once more start it under ``anynan run``.

    A rank that is watched waits for the others to agree on each step, and they would never come.
    """
    patches = Patches()
    patches.change(subprocess.Popen, "__init__", lambda start: _starting(start, options, own))
    return patches


def _starting(start: Callable[..., None], options: Sequence[str], own: str) -> Callable[..., None]:
    def begin(self: Any, args: Any, *rest: Any, **given: Any) -> None:
        return start(self, _with(args, options, own), *rest, **given)

    return begin


def _with(args: Any, options: Sequence[str], own: str) -> Any:
    """Give the command that is run in the place of one, which stays where it is another's."""
    if not isinstance(args, (list, tuple)) or list(args[:1]) != [sys.executable]:
        return args
    named = list(args[1:3]) == ["-m", own]
    path = args[1:2] and not named and os.path.isfile(own) and _is(args[1], own)
    return [args[0], "-m", "anynan", "run", *options, *args[1:]] if named or path else args


def _is(path: Any, own: str) -> bool:
    try:
        return os.path.samefile(path, own)
    except (OSError, TypeError, ValueError):
        return False
