"""The one door through which the core reaches a product, and a product its side of an adapter."""

import importlib
import os
import sys
from types import ModuleType
from typing import Any

from anynan._base.about import ADAPTERS

_PACKAGE = __name__.partition(".")[0]
_ROOM = f"{_PACKAGE}._apps"


def names() -> list[str]:
    """List the products that are there."""
    (folder,) = importlib.import_module(_ROOM).__path__
    found = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    return sorted(name for name in found if name.isidentifier() and not name.startswith("_"))


def find(name: str, part: str) -> ModuleType | None:
    """Import a part of a product; None where there is none.

    Args:
        name: The product.
        part: Which module of it.
    """
    module = f"{_ROOM}.{name}.{part}"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (module, f"{_ROOM}.{name}"):
            raise
        return None


def part(name: str, part: str) -> Any:
    """Import a part of a product.

    Args:
        name: The product.
        part: Which module of it.

    Raises:
        RuntimeError: If this copy of the library has no such product.
    """
    found = find(name, part)
    if found is None:
        msg = f"this copy of anynan has no {name}: install anynan again to have it"
        raise RuntimeError(msg)
    return found


def side(part: str, maker: str, *given: Any, refused: str) -> Any:
    """Give the side of a product that an adapter has for a target.

    Frameworks that are not imported are not asked. Keras runs on others, so it comes first; array
    code, which takes what nobody else does, last.

    Args:
        part: What the module is called in an adapter: ``compare``, ``stress``.
        maker: The function in it that makes a side, and gives None for what is another's.
        *given: What that is called with.
        refused: What is said where nobody takes the target.

    Raises:
        TypeError: If that is so.
    """
    for name in ("keras", *(name for name in ADAPTERS if name != "keras"), "arrays"):
        module = f"{_PACKAGE}.{name}.{part}"
        if name == "arrays" or name in sys.modules:
            try:
                found = getattr(importlib.import_module(module), maker)(*given)
            except ModuleNotFoundError as error:
                if error.name != module:
                    raise
            else:
                if found is not None:
                    return found
    raise TypeError(refused)
