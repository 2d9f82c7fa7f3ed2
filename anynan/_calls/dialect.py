"""How a script writes the calls of a framework."""

from collections.abc import Callable
from dataclasses import dataclass

from anynan._calls.calls import Words


@dataclass(frozen=True)
class Dialect:
    """Say how a framework's calls are written.

    Attributes:
        framework: Its name, as it is imported and installed.
        head: Imports, ``loaded`` (every tensor of the file) and ``show(when, name, x)``.
        words: Its values.
        function: Gives the code of a function by the name that the call has; refuses others.
        ready: Gives the code that makes a tensor ``x`` of the file one of a dtype; None where
            it is one.
        bits: Whether dtypes that NumPy does not have are kept as unsigned integers.
        gradient: Gives the lines that take and show the gradient of a line's result, of operands
            from what arrives at it.
    """

    framework: str
    head: str
    words: Words
    function: Callable[[str], str]
    ready: Callable[[str], str | None]
    bits: bool = True
    gradient: Callable[[str, list[str], list[str | None]], list[str]] | None = None


def of_numpy(lacking: str) -> Callable[[str], str | None]:
    """Make the ``ready`` of a framework that takes the arrays of NumPy.

    Args:
        lacking: The code of a dtype that NumPy does not have, with ``{}`` for its name.
    """

    def ready(dtype: str) -> str | None:
        if dtype.startswith("complex"):
            return f'x.view("{dtype}")[..., 0]'
        if dtype == "bfloat16" or dtype.startswith("float8"):
            return f"x.view({lacking.format(repr(dtype))})"
        return None

    return ready
