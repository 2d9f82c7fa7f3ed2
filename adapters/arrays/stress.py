"""What a hunt needs of array code: to run it, and no slope."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from anynan._apps.stress.lab import Array, Lab
from anynan._arrays.access import namespace, to_host
from anynan._arrays.arguments import positional
from anynan.arrays.observe import observe, takes
from anynan.arrays.reachable import untouched
from anynan.arrays.trackable import is_array
from anynan.arrays.tracking import track


def lab_of(target: Any, example: tuple[Any, ...]) -> Lab | None:
    """Give the lab of a function of array code; None for all else."""
    return ArrayLab(target, example) if takes(target, example, {}) else None


class ArrayLab(Lab):
    """Run array code on changed inputs."""

    door = staticmethod(track)
    shows = staticmethod(observe)

    def __init__(self, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.target, self.args, self.parameters = target, args, positional(target)
        spaces = {namespace(x).__name__ for x in args if is_array(x)}
        self.imports = tuple(f"import {name}" for name in sorted(spaces))

    def is_array(self, x: Any) -> bool:
        """Tell what an array is that a hunt may change."""
        return is_array(x)

    def host(self, x: Any) -> Array:
        """Bring an array to the host."""
        return x if type(x) is np.ndarray else np.asarray(to_host(x))

    def like(self, new: Array, x: Any) -> Any:
        """Make an array of the same library."""
        if isinstance(x, np.ndarray | np.generic):
            return new.copy()
        return namespace(x).asarray(new, dtype=x.dtype)

    def code(self, x: Any) -> str:
        """Write an array of the same dtype."""
        if isinstance(x, np.ndarray | np.generic):
            return "{}"
        return f"{namespace(x).__name__}.asarray({{}})"

    def kept(self, program: Callable[..., Any]) -> AbstractContextManager[object]:
        """Put back what it changes."""
        return untouched(program, lambda _: None)
