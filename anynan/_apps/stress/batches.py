"""What a script's loop reads in a statement of its own, read once: a part of the example."""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from anynan._arrays.containers import leaves

# A call of these is what makes code a training.
TRAINING = frozenset({"backward", "apply_gradients", "train_on_batch", "step"})
Asked = Callable[[], Any]


class Batches(set[tuple[str, ...]]):
    """Hold the names of the batches that were read.

    What a model or a training makes is no batch, and neither is what the arrays' own library
    draws.
    """

    def __call__(self, names: tuple[str, ...], read: Asked, used: Asked, called: Asked) -> Any:
        """Read a batch, or give None for each name.

        Args:
            names: What the statement binds.
            read: Computes what it binds them to.
            used: Gives what that reads.
            called: Gives what of it is called, or has a method that is.
        """
        nothing = (None,) * len(names)
        try:
            if any(map(_computes, used())):
                return nothing
            value = read()
        except Exception:  # noqa: BLE001  the step itself tells of it
            return nothing
        parts = (value,) if len(names) == 1 else tuple(value)
        arrays = [x for _, x in leaves(parts, "") if hasattr(x, "shape")]
        kinds = {type(x) for x in arrays}
        foreign = any(not any(_is_of(x, kind) for kind in kinds) for x in called())
        computed = kinds & {*map(type, used())} or any(
            getattr(x, "requires_grad", False) or not x.shape for x in arrays
        )
        if not arrays or computed or not foreign or len(parts) != len(names):
            return nothing
        self.add(names)
        return parts


def _computes(x: Any) -> bool:
    """Tell a model, and a function that trains."""
    plain = isinstance(x, type | ModuleType) or inspect.isroutine(x)
    trains = TRAINING & {*getattr(getattr(x, "__code__", None), "co_names", ())}
    return bool(trains) or (callable(x) and not plain)


def _is_of(x: Any, kind: type) -> bool:
    """Tell what belongs to the library of an array, or to Python, but for ``next``."""
    named = x.__name__ if isinstance(x, ModuleType) else getattr(x, "__module__", None)
    package = (named or type(x).__module__).partition(".")[0]
    return x is not next and (package == "builtins" or kind.__module__.startswith(package))
