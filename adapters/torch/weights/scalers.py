"""Loss scalers: which one is in use, and whether it skipped an update."""

import gc
import weakref
from typing import Any

import torch

from anynan.torch.call.models import Models
from anynan.torch.call.state import State
from anynan.torch.private import scale_of, set_scale, task, work_of
from anynan.torch.weights.optimizers import find_optimizers

_found: "weakref.WeakSet[torch.amp.GradScaler]" = weakref.WeakSet()


class Scalers:
    """Know the scaler that steps the optimizers of one tracker.

    Args:
        models: What is watched.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._used: weakref.ref[torch.amp.GradScaler] | None = None
        self._looked = False

    @property
    def used(self) -> torch.amp.GradScaler | None:
        """Give the scaler that is known to be in use."""
        return None if self._used is None else self._used()

    def look_once(self) -> None:
        """Look for scalers, unless that was done: it is too slow for each step."""
        if not self._looked:
            self._looked = True
            find_scalers()

    def note(self, rows: Any, scaler: torch.amp.GradScaler) -> None:
        """Keep the scale that the step ran under: the scaler changes it after the update."""
        scale = scale_of(scaler)
        if scale is not None:
            rows.scale = scale.clone()
            self._used = weakref.ref(scaler)

    def give_back(self, rows: Any) -> None:
        """Give the scaler the scale that the step ran under."""
        used = self.used
        if used is not None and rows is not None and rows.scale is not None:
            set_scale(used, rows.scale.clone())

    def scale(self, state: State) -> float | None:
        """Give the scale in force, None without a scaler."""
        scaler = self.used
        if scaler is None:
            scaler = self._find(state)
        return None if scaler is None else float(scaler.get_scale())

    def _find(self, state: State) -> Any:
        """Look for the scaler that steps the watched weights, where that is known yet."""
        scalers = find_scalers()
        if task() != -1:  # no update has come yet
            known = {id(ref()) for ref, _ in state.scales}
            state.scales += [item for item in scales() if id(item[0]()) not in known]
        held = {id(ref()): set(states) for ref, states in state.scales}
        done = {scaler: set(work_of(scaler)) | held.get(id(scaler), set()) for scaler in scalers}
        if any(done.values()):
            found = find_optimizers({id(p) for _, p in self._models.parameters()})
            own = {id(optimizer) for optimizer in found}
            for scaler, optimizers in done.items():
                if own & optimizers:
                    self._used = weakref.ref(scaler)
                    return scaler
        return scalers[0] if scalers else None


def find_scalers() -> list[Any]:
    """Look for living, enabled gradient scalers that have scaled a loss."""
    _found.update(
        item
        for item in gc.get_objects()
        if issubclass(type(item), torch.amp.GradScaler) and item.is_enabled()
    )
    return [scaler for scaler in _found if scale_of(scaler) is not None]


def in_sight() -> bool:
    """Tell whether a scaler that was found before has scaled a loss: no search, at no cost."""
    return any(scale_of(scaler) is not None for scaler in _found)


def scaled(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether a gradient scaler steps this optimizer now."""
    return any(
        id(optimizer) in work_of(scaler)
        for look in (lambda: list(_found), find_scalers)
        for scaler in look()
    )


def scales() -> list[tuple[Any, Any]]:
    """Note the state that each scaler found so far keeps until its update."""
    return [(weakref.ref(scaler), work_of(scaler)) for scaler in _found]


def in_use(held: list[tuple[Any, Any]]) -> bool:
    """Tell whether a scaler was there when the step began, or came since."""
    return bool(held) or not all_in(held)


def worked(held: list[tuple[Any, Any]]) -> bool:
    """Tell whether a scaler unscaled or skipped an update since ``scales``, or may have."""
    if not all_in(held):
        return True
    return any(
        (scaler := ref()) is not None and (work_of(scaler) or work_of(scaler) is not states)
        for ref, states in held
    )


def all_in(held: list[tuple[Any, Any]]) -> bool:
    """Tell whether every scaler found so far was found when the step began."""
    return {id(scaler) for scaler in _found} <= {id(ref()) for ref, _ in held}


def rescaled(held: list[tuple[Any, Any]], optimizers: set[int]) -> bool:
    """Tell whether a scaler was updated since, after it stepped or skipped an optimizer.

    Args:
        held: What ``scales`` gave when the step began.
        optimizers: Ids of the optimizers that count; none are known when it is empty.
    """
    for ref, states in held:
        scaler = ref()
        # The update leaves what it has done its work on, by optimizer.
        moved = scaler is not None and work_of(scaler) is not states
        if moved and (not optimizers or optimizers & set(states)):
            return True
    return False
