"""Count what a piece of code does, where a timing would say less."""

import sys
from collections.abc import Callable
from typing import Any


def calls(run: Callable[[], object]) -> int:
    """Count the calls of Python and C functions."""
    found = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found
