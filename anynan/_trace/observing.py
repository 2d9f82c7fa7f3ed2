"""Find the framework that runs a target, for what looks at every operation of it."""

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from anynan._base.about import ADAPTERS
from anynan._trace.op import Observed, Observer

# Keras runs on others, so it is asked first; array code takes what nobody else does.
_ORDER = ("keras", *(name for name in ADAPTERS if name != "keras"), "arrays")


def adapter_of(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, what: str
) -> tuple[str, Any]:
    """Give the name of the adapter that runs a target, and its module ``observe``.

    Frameworks that are not imported are not asked.

    Args:
        target: A model or a function.
        args: What it is called with.
        kwargs: By name.
        what: The function of the user's, for the error.

    Raises:
        TypeError: If there is none.
    """
    for name in _ORDER:
        if name != "arrays" and name not in sys.modules:
            continue
        try:
            module = importlib.import_module(f"anynan.{name}.observe")
        except ModuleNotFoundError as error:
            if error.name != f"anynan.{name}.observe":
                raise
            continue
        if module.takes(target, args, kwargs):
            return name, module
    kind = target.__name__ if isinstance(target, type) else type(target).__name__
    msg = (
        f"{what}() cannot run a {kind} with these arguments: give a model, a step or a function, "
        "and example arrays to call it with"
    )
    raise TypeError(msg)


def observe(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], observer: Observer
) -> Observed:
    """Run a target of any framework once, show each operation, and leave no trace.

    Args:
        target: A model, a training step or any function.
        args: What it is called with.
        kwargs: By name.
        observer: Sees each operation as it ran; what it returns takes the place of its results.

    Raises:
        TypeError: If no framework runs it.

    Example:
        >>> import torch
        >>> from anynan._trace.observing import observe
        >>> seen = []
        >>> _ = observe(torch.nn.ReLU(), (torch.ones(2),), {}, lambda op: seen.append(op.name))
        >>> seen
        ['relu']
    """
    _, module = adapter_of(target, args, kwargs, what="observe")
    found: Observed = module.observe(target, args, kwargs, observer)
    return found
