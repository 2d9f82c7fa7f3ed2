"""See the updates that a loss scaler skips: no optimizer hook runs for them."""

import threading
from collections.abc import Callable
from typing import Any

import torch

from anynan._reach.patches import Patches

_local = threading.local()


def current() -> torch.amp.GradScaler | None:
    """Give the scaler whose step runs in this thread, if one does."""
    return getattr(_local, "scaler", None)


def stepped() -> None:
    """Note that an optimizer steps: the scaler around it skips nothing."""
    _local.stepped = True


class Seam:
    """Stand before ``GradScaler.step`` while anything is tracked.

    Args:
        tell: Called with the optimizer and the scaler after an update was skipped, while the
            gradients and the scale are still those of the step.
    """

    def __init__(self, tell: Callable[[torch.optim.Optimizer, Any], None]) -> None:
        self.on = True
        self.tell = tell
        self._patches = Patches()
        self._patches.change(torch.amp.GradScaler, "step", self._told)

    def _told(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(
            scaler: torch.amp.GradScaler,
            optimizer: torch.optim.Optimizer,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            if not self.on or not scaler.is_enabled():
                return real(scaler, optimizer, *args, **kwargs)
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
