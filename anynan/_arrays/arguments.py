"""Name what a function is called with, as its own parameters are named."""

import inspect
from collections.abc import Callable
from typing import Any

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def parameters(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    """List the parameters of a function; none where they cannot be known."""
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return []


def positional(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Name the parameters that a function takes by position."""
    return tuple(p.name for p in parameters(fn) if p.kind in _POSITIONAL)


def bound(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, Any]]:
    """Give what a function is called with, each by its name.

    Args:
        names: Of the parameters it takes by position.
        args: Positional arguments; one without a parameter of its own is ``args[i]``.
        kwargs: Arguments by name.

    Example:
        >>> from anynan._arrays.arguments import bound, positional
        >>> def step(model, *batch): ...
        >>> [name for name, _ in bound(positional(step), (1, 2, 3), {"lr": 4})]
        ['model', 'args[1]', 'args[2]', 'lr']
    """
    given = [(names[i] if i < len(names) else f"args[{i}]", x) for i, x in enumerate(args)]
    return [*given, *kwargs.items()]
