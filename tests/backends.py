"""The array libraries the suite runs over, and how a test gets its arrays from one."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.tiers import installed


class Backend(Enum):
    """Name an array library and, after a colon, the variant of it."""

    NUMPY = "numpy"
    NUMPY_READONLY = "numpy:readonly"
    NUMPY_STRIDED = "numpy:strided"
    STRICT = "array_api_strict"
    TORCH = "torch"
    TORCH_STANDARD = "torch:standard"
    TORCH_CUDA = "torch:cuda"
    JAX = "jax.numpy"
    DASK = "dask.array"
    TENSORFLOW = "tensorflow"
    MLX = "mlx.core"

    @property
    def module(self) -> str:
        """Give the module to import; without it the backend cannot run."""
        return self.value.partition(":")[0]

    @property
    def variant(self) -> str:
        """Give what is special, an empty string if nothing is."""
        return self.value.partition(":")[2]

    @property
    def library(self) -> str:
        """Give the name that an event's ``backend`` shows."""
        return self.module.partition(".")[0]

    @property
    def adapter(self) -> str | None:
        """Name our module that reads these arrays, None for the array API standard alone."""
        adapted = self in (Backend.TORCH, Backend.TORCH_CUDA, Backend.TENSORFLOW, Backend.MLX)
        return f"anynan.{self.library}" if adapted else None

    @property
    def tier(self) -> int:
        """Give the lowest tier of a test that runs over it."""
        first = (Backend.STRICT, Backend.TORCH, Backend.JAX, Backend.TENSORFLOW, Backend.MLX)
        return 0 if self is Backend.NUMPY else 1 if self in first else 2

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        """Give the marks of a test that runs over it."""
        tier = pytest.mark.tier(self.tier)
        return [tier, pytest.mark.gpu] if self.variant == "cuda" else [tier]

    @property
    def installed(self) -> bool:
        return installed(self.library)

    def load(self) -> ModuleType:
        """Import the namespace; an ImportError says that the library or its device is not here."""
        xp = importlib.import_module(self.module)
        if self.library in ("numpy", "torch", "dask"):
            xp = importlib.import_module(f"array_api_compat.{self.module}")
        if self.variant == "cuda" and not xp.cuda.is_available():
            msg = f"{self.value}: no CUDA device is available"
            raise ImportError(msg)
        if self.library == "jax":
            importlib.import_module("jax").config.update("jax_enable_x64", True)
        return xp


@dataclass(frozen=True)
class Space:
    """Make arrays of one backend, the same way for all of them."""

    backend: Backend
    xp: Any
    device: Any = None  # of the library's choice

    def has(self, dtype: str) -> bool:
        """Tell whether the library has a dtype of this name."""
        return self._dtype(dtype) is not None

    def array(self, values: Any, dtype: str = "float32") -> Any:
        """Make an array from nested lists, numbers or a NumPy array."""
        options = {} if self.device is None else {"device": self.device}
        if self.backend is Backend.TENSORFLOW:
            # No array API; it converts an array's dtype, but not one element's.
            return self.xp.constant(np.asarray(values), self._dtype(dtype))
        made = self.xp.asarray(values, dtype=self._dtype(dtype), **options)
        return _VARIANTS.get(self.backend, lambda x: x)(made)

    def _dtype(self, name: str) -> Any:
        found = getattr(self.xp, name, None)
        if found is None and self.backend.library == "numpy" and installed("ml_dtypes"):
            found = getattr(importlib.import_module("ml_dtypes"), name, None)
        return found


def _readonly(x: Any) -> Any:
    x.flags.writeable = False
    return x


def _strided(x: Any) -> Any:
    """Give the same values with gaps between them and every axis reversed in memory."""
    wide = np.zeros([2 * length for length in x.shape], x.dtype)
    gaps: tuple[Any, ...] = (..., *(slice(None, None, -2) for _ in x.shape))
    view = wide[gaps]
    view[...] = x
    return view


_VARIANTS: dict[Backend, Callable[[Any], Any]] = {
    Backend.NUMPY_READONLY: _readonly,
    Backend.NUMPY_STRIDED: _strided,
}


def parse(text: str) -> list[Backend]:
    """Read a comma-separated list of backends."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = {backend.value: backend for backend in Backend}
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        msg = (
            f"--backends: {', '.join(map(repr, unknown)) or 'the empty list'} is unknown; "
            f"choose from {', '.join(known)}"
        )
        raise ValueError(msg)
    return list(dict.fromkeys(known[name] for name in names))
