"""See what loss scalers do: the losses they scale, and the updates that they skip."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from anynan._base.patches import Patches
from anynan.torch.call import seams
from anynan.torch.private import FIRST_SCALE
from anynan.torch.weights.scalers import scaling

_local = threading.local()


def current() -> torch.amp.GradScaler | None:
    """Give the scaler whose step runs in this thread, if one does."""
    return getattr(_local, "scaler", None)


def stepped() -> None:
    """Note that an optimizer steps: the scaler around it skips nothing."""
    _local.stepped = True


class Seam:
    """Stand before ``GradScaler.scale`` and ``GradScaler.step`` while anything is tracked.

    ``Optimizer.zero_grad``, which goes through all weights, is not noted meanwhile.

    No optimizer hook runs for an update that a scaler skips, and nothing but its use shows that
    there is a scaler.

    Args:
        tell: Called with the optimizer and the scaler after an update was skipped, while the
            gradients and the scale are still those of the step.
    """

    def __init__(self, tell: Callable[[torch.optim.Optimizer, Any], None]) -> None:
        self.on = True
        self.tell = tell
        self._patches = Patches()
        self._patches.change(torch.amp.GradScaler, "step", self._told)
        for kind in _kinds(torch.amp.GradScaler):
            if "scale" in vars(kind):
                self._patches.change(kind, "scale", self._noted)
        self._patches.change(torch.optim.Optimizer, "zero_grad", seams.quietly)
        self._patches.change(torch.utils, "swap_tensors", seams.swapping)
        # Of a class that is defined later, and scales by itself.
        self._patches.change(torch.amp.GradScaler, FIRST_SCALE, self._noted)

    def _noted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
            scaling(scaler)
            return real(scaler, *args, **kwargs)

        return scale

    def _told(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(
            scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any,
            **kwargs: Any,
        ) -> Any:  # fmt: skip
            if not self.on or not scaler.is_enabled():
                return real(scaler, optimizer, *args, **kwargs)
            scaling(scaler)
            before = current()
            _local.scaler, _local.stepped = scaler, False
            try:
                result = real(scaler, optimizer, *args, **kwargs)
                if not _local.stepped:
                    self.tell(optimizer, scaler)
            finally:
                _local.scaler = before
            return result

        return step

    def remove(self) -> None:
        """Put the real method back, unless somebody else stands before it by now."""
        self.on = False
        self._patches.undo()


def _kinds(kind: type[Any]) -> Iterator[type[Any]]:
    """Walk a class and those that are made of it."""
    yield kind
    made: list[type[Any]] = kind.__subclasses__()
    for each in made:
        yield from _kinds(each)
