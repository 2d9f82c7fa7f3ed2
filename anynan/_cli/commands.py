"""The command line: its commands, and ``anynan --version``."""

import argparse
import difflib
import importlib
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

from anynan._base import products
from anynan._base.about import FOLDERS, __version__
from anynan._cli import doctor
from anynan._cli.statuses import refuse

# What a reader of the list looks for first; a product with a ``command.py`` that is not named here
# comes after these.
_FIRST = ("run", "demo", "scan", "runfile", "bundle", "compare", "precision", "stress")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The words after ``anynan``; those of the process by default.

    Returns:
        The exit status: 0 for success, 2 for a command that could not begin.
    """
    chosen = _parser().parse_args(arguments)
    if chosen.command is None:
        _parser().print_help()
        return 0
    if getattr(chosen, "whole", False):  # the program that it runs deals with these itself
        return int(chosen.run(chosen))
    try:
        status: int = chosen.run(chosen)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    return status


def demos() -> list[str]:
    """List the demos: those of the adapters that have one."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return [
        name for name, folder in FOLDERS.items()
        if os.path.isfile(os.path.join(root, folder, "demo.py"))
    ]  # fmt: skip


class _Lines(argparse.HelpFormatter):
    """Wrap each line of a description and an epilogue by itself."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n".join(fill(line, width, indent) for line in text.split("\n"))


class _Parser(argparse.ArgumentParser):
    """Say what was probably meant, and refuse an unknown option where it was given."""

    def __init__(self, **given: Any) -> None:
        """Print a command's examples and statuses line by line, as they are written."""
        given.setdefault("formatter_class", _Lines)
        super().__init__(**given)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and leave nothing over: the usage that is printed is then this command's."""
        found, left = super().parse_known_args(args, namespace)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return found, left

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, with the words that are nearest to a wrong one."""
        wrong = re.match(
            r"unrecognized arguments: (--?\w[\w-]*)|.*invalid choice: '(.*?)'", message
        )
        if wrong is not None:
            word = wrong[1] or wrong[2]
            known = [
                x for a in self._actions for x in (*a.option_strings, *map(str, a.choices or ()))
            ]
            # The values of another option are no answer.
            known = [x for x in known if x.startswith("-") or x in message]
            near = difflib.get_close_matches(word, known, n=1)
            message += f"; did you mean {near[0]}?" if near else ""
        for action in self._actions:  # what is left over is not missing
            if action.nargs == argparse.REMAINDER:
                message = message.replace(f", {action.metavar or action.dest}", "")
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="anynan",
        description="Find where a number goes bad.",
        epilog="anynan COMMAND --help shows what a command takes, and what its exit status means.",
        formatter_class=argparse.HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"anynan {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    found = {name: products.find(name, "command") for name in products.names()}
    adds = {name: module.add for name, module in found.items() if module is not None}
    adds["demo"] = _add_demo
    for name in sorted(adds, key=lambda x: (_FIRST.index(x) if x in _FIRST else len(_FIRST), x)):
        adds[name](commands)
    doctor.add(commands)
    return parser


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="train a small model until a real bug strikes, and print the report: anynan demo",
        description="Train a small model until a real bug strikes, and print the report.",
        epilog=(
            "example: anynan demo --framework numpy --bug log\n"
            "exit status: 0 the bug was found, 1 it was not, 2 no such framework or bug"
        ),
    )
    demo.add_argument("--framework", choices=demos(), help="default: the first that is installed")
    demo.add_argument("--bug", metavar="NAME", help="which bug; --list shows them")
    demo.add_argument("--fixed", action="store_true", help="train on with the bug fixed")
    demo.add_argument("--steps", type=partial(_whole, 1), metavar="N", help="stop after so many")
    demo.add_argument("--seed", type=partial(_whole, 0), default=0, metavar="N", help="default: 0")
    demo.add_argument("--list", action="store_true", help="list the bugs and stop")
    demo.set_defaults(run=_demo)


def _demo(chosen: argparse.Namespace) -> int:
    try:
        name, module = _load(chosen.framework)
    except ImportError as error:
        return refuse("demo", str(error))
    bugs: dict[str, str] = module.BUGS
    if chosen.list:
        width = max(len(bug) for bug in bugs)
        for bug, text in bugs.items():
            print(f"{bug.ljust(width)}  {text}")
        return 0
    bug = chosen.bug or next(iter(bugs))
    if bug not in bugs:
        known = ", ".join(bugs)
        return refuse("demo", f"{name} has no bug {bug!r}; choose from {known}")
    result: Any = module.main(bug, fixed=chosen.fixed, steps=chosen.steps, seed=chosen.seed)
    return int(result)


def _load(wanted: str | None) -> tuple[str, ModuleType]:
    """Import the wanted demo, or the first one whose framework is installed.

    Raises:
        ImportError: If the framework is missing; it says how to install it.
    """
    missing = []
    for name in demos() if wanted is None else [wanted]:
        module = f"anynan.{FOLDERS.get(name, name)}"
        try:
            importlib.import_module(module)
            return name, importlib.import_module(f"{module}.demo")
        except ImportError as error:
            missing.append(str(error))
    raise ImportError("\n".join(missing) or "no adapter with a demo was found")


def _whole(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        msg = f"{text!r} is not a whole number"
        raise argparse.ArgumentTypeError(msg) from None
    if number < least:
        msg = f"{number} is too small: it must be at least {least}"
        raise argparse.ArgumentTypeError(msg)
    return number
