"""Count what a piece of code does, where a timing would say less."""

import gc
import sys
from collections.abc import Callable
from functools import partial
from typing import Any


def calls(run: Callable[[], object], *, of: tuple[str, ...] = ("call", "c_call")) -> int:
    """Count the calls of Python and C functions, or only ``of`` one kind.

    No garbage is collected meanwhile: what other tests left would call its finalizers.
    """
    found = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal found
        found += event in of

    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    return found


def python_calls(run: Callable[..., object], *args: object) -> int:
    """Count the calls of Python functions in one call of a function."""
    return calls(partial(run, *args), of=("call",))
