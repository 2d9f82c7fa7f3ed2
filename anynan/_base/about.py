"""What the package is, for its own rooms: its version, and the adapters that come with it."""

import platform
import sys
from contextlib import suppress
from types import ModuleType

import numpy as np

__version__ = "0.1.0"
ADAPTERS = ("torch", "jax", "tensorflow", "keras", "cupy", "mlx")
# Framework, as its package is called -> the folder of its adapter: array code has no framework.
FOLDERS = {**{name: name for name in ADAPTERS}, "numpy": "arrays"}


def versions(backend: str | None) -> dict[str, str]:
    """Name what runs, with versions."""
    found = {"anynan": __version__, "python": platform.python_version(), "numpy": np.__version__}
    module = sys.modules.get(backend or "")
    if module is not None:
        found[backend or ""] = version_of(module)
    return found


def version_of(module: ModuleType) -> str:
    """Give the version of a package; one without ``__version__`` has it where it was installed."""
    return str(getattr(module, "__version__", "") or installed(module.__name__) or "unknown")


def installed(package: str) -> str:
    """Give the version of a package as it was installed, empty if it was not."""
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""
