"""What a hunt needs of array code: to run it, and no slope."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from anynan._apps.stress.lab import Lab
from anynan._arrays.access import namespace
from anynan._arrays.arguments import positional
from anynan.arrays.observe import ArrayTarget
from anynan.arrays.reachable import untouched
from anynan.arrays.tracking import track


class ArrayLab(ArrayTarget, Lab):
    """Run array code on changed inputs."""

    door = staticmethod(track)

    def __init__(self, target: Any, args: tuple[Any, ...], *more: Any) -> None:
        super().__init__(target, args, *more)
        self.parameters = positional(target)
        spaces = {namespace(x).__name__ for x in args if self.is_array(x)}
        self.imports = tuple(f"import {name}" for name in sorted(spaces))

    def code(self, x: Any) -> str:
        """Write an array of the same dtype."""
        if isinstance(x, np.ndarray | np.generic):
            return "{}"
        return f"{namespace(x).__name__}.asarray({{}})"

    def kept(self, program: Callable[..., Any]) -> AbstractContextManager[object]:
        """Put back what it changes."""
        return untouched(program, lambda _: None)


lab_of = ArrayLab.of
