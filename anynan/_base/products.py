"""The one door through which the core reaches a product that stands on it."""

import importlib
import os
from types import ModuleType
from typing import Any

_ROOM = f"{__name__.partition('.')[0]}._apps"


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
