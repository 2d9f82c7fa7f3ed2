"""What tracking a JAX program may change while it lasts, and must have put back after."""

import sys
import weakref
from typing import Any

import jax

from tests.wild.rows import YES


def classes() -> list[type]:
    """Find the classes of modules that tracking might wrap."""
    found: list[type] = []
    for name, base in (("equinox", "Module"), ("flax.nnx", "Module"), ("flax.linen", "Module")):
        if module := sys.modules.get(name):
            found.append(getattr(module, base))
    for kind in found:
        kinds: list[type] = kind.__subclasses__()
        found += [below for below in kinds if below not in found]
    return found


class Footprint:
    """The state before; ``left`` tells what differs from it after."""

    def __init__(self) -> None:
        self._before = self._state()

    @staticmethod
    def _state() -> dict[str, Any]:
        # Transforms make a class of the same name each time: what is compared is the class itself.
        calls = {
            f"{kind.__module__}.{kind.__qualname__}.__call__ {id(kind)}": vars(kind)["__call__"]
            for kind in classes()
            if "__call__" in vars(kind)
        }
        return {
            **{f"jax.config.{name}": value for name, value in jax.config.values.items()},
            **calls,
        }

    def left(self, tracker: weakref.ref[Any]) -> str:
        """Name what is left of the tracking, ``yes`` if nothing is."""
        after = self._state()
        wrong = [
            name for name, value in self._before.items() if after.get(name, value) is not value
        ]
        if tracker() is not None:
            wrong.append("the tracker is still held")
        return f"no: {', '.join(wrong)}" if wrong else YES
