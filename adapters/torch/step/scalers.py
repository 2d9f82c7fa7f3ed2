"""Loss scalers: which one is in use, and whether it skipped an update."""

import gc
import weakref
from typing import TYPE_CHECKING, Any

import torch

from anynan.torch.update.updates import find_optimizers

if TYPE_CHECKING:
    from anynan.torch.session.session import Session

_scalers: "weakref.WeakSet[torch.amp.GradScaler]" = weakref.WeakSet()


def find_scalers() -> list[Any]:
    """Look for living, enabled gradient scalers that have scaled a loss."""
    _scalers.update(
        item
        for item in gc.get_objects()
        if issubclass(type(item), torch.amp.GradScaler) and item.is_enabled()
    )
    return [scaler for scaler in _scalers if scaler._scale is not None]


def scaled(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether a gradient scaler steps this optimizer now."""
    return any(
        id(optimizer) in scaler._per_optimizer_states
        for look in (lambda: list(_scalers), find_scalers)
        for scaler in look()
    )


def scales() -> list[tuple[Any, Any]]:
    """Note the state that each scaler found so far keeps until its update."""
    return [(weakref.ref(scaler), scaler._per_optimizer_states) for scaler in _scalers]


def in_use(held: list[tuple[Any, Any]]) -> bool:
    """Tell whether a scaler was there when the step began, or came since."""
    return bool(held) or not all_in(held)


def worked(held: list[tuple[Any, Any]]) -> bool:
    """Tell whether a scaler unscaled or skipped an update since ``scales``, or may have."""
    if not all_in(held):
        return True
    return any(
        (scaler := ref()) is not None
        and (scaler._per_optimizer_states or scaler._per_optimizer_states is not states)
        for ref, states in held
    )


def all_in(held: list[tuple[Any, Any]]) -> bool:
    """Tell whether every scaler found so far was found when the step began."""
    return {id(scaler) for scaler in _scalers} <= {id(ref()) for ref, _ in held}


def rescaled(held: list[tuple[Any, Any]], optimizers: set[int]) -> bool:
    """Tell whether a scaler was updated since, after it stepped or skipped an optimizer.

    Args:
        held: What ``scales`` gave when the step began.
        optimizers: Ids of the optimizers that count; none are known when it is empty.
    """
    for ref, states in held:
        scaler = ref()
        # The update leaves what it has done its work on, by optimizer.
        moved = scaler is not None and scaler._per_optimizer_states is not states
        if moved and (not optimizers or optimizers & set(states)):
            return True
    return False


def scaler_of(session: "Session") -> Any:
    """Look for the scaler that steps a session's optimizers, where that is known yet."""
    state = session.state()
    scalers = find_scalers()
    if torch._C._current_graph_task_id() != -1:  # no update has come yet
        known = {id(ref()) for ref, _ in state.scales}
        state.scales += [item for item in scales() if id(item[0]()) not in known]
    held = {id(ref()): set(states) for ref, states in state.scales}
    done = {
        scaler: set(scaler._per_optimizer_states) | held.get(id(scaler), set())
        for scaler in scalers
    }
    if any(done.values()):
        found = find_optimizers({id(p) for _, p in session.parameters()})
        own = {id(optimizer) for optimizer in found}
        for scaler, optimizers in done.items():
            if own & optimizers:
                session.scaler = weakref.ref(scaler)
                return scaler
    return scalers[0] if scalers else None
