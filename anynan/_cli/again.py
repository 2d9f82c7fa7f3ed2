"""A program that starts itself again is watched there, too: some libraries do so for each rank."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from anynan._base.patches import Patches


def watched_again(options: Sequence[str], program: str) -> Patches:
    """Have what starts the running program once more start it under ``anynan run``.

    A rank that is watched waits for the others to agree on each step, and they would never come.

    Args:
        options: What ``anynan run`` was given before the program.
        program: Its script, or the name of its module.

    Returns:
        What undoes it.
    """
    patches = Patches()
    patches.change(subprocess.Popen, "__init__", lambda start: _starting(start, options, program))
    return patches


def _starting(
    start: Callable[..., None], options: Sequence[str], program: str
) -> Callable[..., None]:
    def begin(self: Any, args: Any, *rest: Any, **given: Any) -> None:
        return start(self, _with(args, options, program), *rest, **given)

    return begin


def _with(args: Any, options: Sequence[str], program: str) -> Any:
    """Give the command that is run in the place of one, which stays where it is another's."""
    if not isinstance(args, (list, tuple)) or list(args[:1]) != [sys.executable]:
        return args
    named = list(args[1:3]) == ["-m", program]
    path = args[1:2] and not named and os.path.isfile(program) and _is(args[1], program)
    return [args[0], "-m", "anynan", "run", *options, *args[1:]] if named or path else args


def _is(path: Any, program: str) -> bool:
    try:
        return os.path.samefile(path, program)
    except (OSError, TypeError, ValueError):
        return False
