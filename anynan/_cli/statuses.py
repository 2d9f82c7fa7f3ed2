"""What commands share: exit statuses, how they refuse, and how a function is named to them."""

import argparse
import importlib
import os
import sys
from operator import attrgetter
from typing import Any

from anynan.options import CHECKS

FINE, BAD, UNREADABLE = 0, 1, 2
TOLD = "exit status: 0 nothing bad, 1 something bad, 2 a file that cannot be read"


def refuse(command: str, text: str) -> int:
    """Say why a command cannot begin, or read a file, and give its exit status."""
    print(f"anynan {command}: {text}", file=sys.stderr)
    return UNREADABLE


def says(error: Exception) -> str:
    """Say what is wrong with a file, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def takes_ignore(parser: argparse.ArgumentParser) -> None:
    """Enter the option that silences notes by their names."""
    parser.add_argument(
        "--ignore", metavar="NAME", action="extend", nargs=1, default=[], type=_message,
        help="leave out the notes of this name: the word in brackets that they end in",
    )  # fmt: skip


def _message(name: str) -> str:
    try:
        return str(CHECKS["ignore"]("--ignore", name)[0])
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def named(path: str, wanted: str) -> Any:
    """Import what ``module:function`` names, as from a prompt in this folder.

    Args:
        path: The words of the command line.
        wanted: What to give, where they are no such name.
    """
    module, colon, function = path.partition(":")
    if not colon:
        msg = f"give {wanted}"
        raise ValueError(msg)
    sys.path.insert(0, os.getcwd())
    return attrgetter(function)(importlib.import_module(module))
