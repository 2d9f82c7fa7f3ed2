"""See the updates that a loss scaler skips: no optimizer hook runs for them."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

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
        self.real = real = torch.amp.GradScaler.step

        @functools.wraps(real)
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
                    tell(optimizer, scaler)
            finally:
                _local.scaler = before
            return result

        self.step = step
        torch.amp.GradScaler.step = step  # type: ignore[method-assign, assignment]

    def remove(self) -> None:
        """Put the real method back, unless somebody else stands before it by now."""
        self.on = False
        if vars(torch.amp.GradScaler)["step"] is self.step:
            torch.amp.GradScaler.step = self.real  # type: ignore[method-assign]
