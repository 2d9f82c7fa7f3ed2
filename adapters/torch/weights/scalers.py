"""Loss scalers: which one is in use, and whether it skipped an update."""

import weakref
from threading import get_ident
from typing import Any

import torch

from anynan._base.identity import ByIdentity
from anynan.torch.call.models import Models
from anynan.torch.call.state import State
from anynan.torch.private import scale_of, set_scale, work_of
from anynan.torch.weights.optimizers import find_optimizers

# Those that scaled a loss while anything was tracked, each with the state that it kept until its
# update as it did so first. Nothing searches the heap for them: that takes seconds in a large one.
_found: "ByIdentity[torch.amp.GradScaler, dict[int, dict[str, Any]]]"
_found = ByIdentity()
# How often they scaled or stepped, and the thread that did so last.
_uses: "ByIdentity[torch.amp.GradScaler, tuple[int, int]]"
_uses = ByIdentity()
# Whether one ever did: most programs have none, and the dicts need not be asked at each step.
ever: list[bool] = []


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

    def note(self, rows: Any, scaler: torch.amp.GradScaler) -> None:
        """Keep the scale that the step ran under: the scaler changes it after the update."""
        scale = scale_of(scaler)
        if scale is not None:
            rows.ran_under(scale.clone())
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
        """Choose the scaler that steps the watched weights, where that is known yet."""
        scalers = list(_found) if ever else []
        if len(scalers) > 1 and not self._looked:  # an update tells it: this is of the first step
            done = {ref(): set(states) for ref, states in since(state.scales)}
            done = {scaler: set(work_of(scaler)) | done.get(scaler, set()) for scaler in scalers}
            if any(done.values()):
                self._looked = True
                found = find_optimizers({id(p) for _, p in self._models.parameters()})
                own = {id(optimizer) for optimizer in found}
                for scaler, optimizers in done.items():
                    if own & optimizers:
                        self._used = weakref.ref(scaler)
                        return scaler
        return scalers[0] if scalers else None


def scaling(scaler: torch.amp.GradScaler) -> None:
    """Note that a scaler is about to scale a loss, or to step."""
    if not scaler.is_enabled():
        return
    count, _ = _uses.get(scaler, (0, 0))
    _uses[scaler] = count + 1, get_ident()
    ever[:] = [True]
    if scaler not in _found:
        _found[scaler] = work_of(scaler)


def uses() -> dict[int, int]:
    """Note how often each scaler was used, by id."""
    return {id(scaler): count for scaler, (count, _) in list(_uses.items())} if ever else {}


def forget_idle(before: dict[int, int]) -> None:
    """Forget each scaler of this thread that was not used since ``uses``.

    A step with a backward pass went by without it: it is that of an earlier training.
    """
    for scaler in list(_found) if ever else ():
        count, thread = _uses.get(scaler, (0, 0))
        if thread == get_ident() and before.get(id(scaler)) == count:
            _found.pop(scaler, None)


def in_sight() -> bool:
    """Tell whether a scaler has scaled a loss."""
    return bool(ever) and any(scale_of(scaler) is not None for scaler in list(_found))


def scaled(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether a gradient scaler steps this optimizer now."""
    return bool(ever) and any(id(optimizer) in work_of(scaler) for scaler in list(_found))


def scales() -> list[tuple[Any, Any]]:
    """Note the state that each scaler keeps until its update."""
    return [(weakref.ref(scaler), work_of(scaler)) for scaler in list(_found)] if ever else []


def since(held: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Add to what ``scales`` gave those scalers that came since, as they were then."""
    if not ever:
        return held
    known = {id(ref()) for ref, _ in held}
    new = [(weakref.ref(x), mark) for x, mark in list(_found.items()) if id(x) not in known]
    return held + new


def in_use(held: list[tuple[Any, Any]]) -> bool:
    """Tell whether a scaler was there when the step began, or came since."""
    return bool(held) or (bool(ever) and bool(_found))


def worked(held: list[tuple[Any, Any]]) -> bool:
    """Tell whether a scaler unscaled or skipped an update since ``scales``."""
    return bool(ever) and any(
        (scaler := ref()) is not None and (work_of(scaler) or work_of(scaler) is not states)
        for ref, states in since(held)
    )


def rescaled(held: list[tuple[Any, Any]], optimizers: set[int]) -> bool:
    """Tell whether a scaler was updated since, after it stepped or skipped an optimizer.

    Args:
        held: What ``scales`` gave when the step began.
        optimizers: Ids of the optimizers that count; none are known when it is empty.
    """
    for ref, states in since(held):
        scaler = ref()
        # The update leaves what it has done its work on, by optimizer.
        moved = scaler is not None and work_of(scaler) is not states
        if moved and (not optimizers or optimizers & set(states)):
            return True
    return False
