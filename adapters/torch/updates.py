"""One pair of optimizer hooks for the whole process, shared by every session."""

import atexit
import functools
import gc
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

if TYPE_CHECKING:
    from anynan.torch.session import Session

_sessions: "weakref.WeakSet[Session]" = weakref.WeakSet()
_handles: list[Any] = []
_scalers: "weakref.WeakSet[torch.amp.GradScaler]" = weakref.WeakSet()


def watch(session: "Session") -> None:
    """Tell this session of every optimizer step from now on."""
    _sessions.add(session)
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before))
        _handles.append(register_optimizer_step_post_hook(_after))


@atexit.register
def _at_exit() -> None:
    for session in list(_sessions):
        session.tracker.remove()


def unwatch(session: "Session") -> None:
    """Stop telling this session; the hooks go with the last one."""
    _sessions.discard(session)
    if not _sessions:
        while _handles:
            _handles.pop().remove()


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        _tell(optimizer)
        return None

    # A closure makes the gradients inside the step: they are read whenever it returns.
    @functools.wraps(closure)
    def watched() -> Any:
        loss = closure()
        _tell(optimizer)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": watched}
    return (args[0], watched, *args[2:]), kwargs


def _tell(optimizer: torch.optim.Optimizer) -> None:
    for session in list(_sessions):
        session.before_update(optimizer)


def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for session in list(_sessions):
        session.after_update(optimizer)


def find_optimizers(parameters: set[int]) -> list[torch.optim.Optimizer]:
    """Look for living optimizers that hold any of these parameters (by id)."""
    return [
        item
        for item in gc.get_objects()
        if issubclass(type(item), torch.optim.Optimizer)
        and any(id(p) in parameters for group in item.param_groups for p in group["params"])
    ]


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
        if scaler is not None and scaler._per_optimizer_states is not states:
            # The update leaves what it has done its work on, by optimizer.
            if not optimizers or optimizers & set(states):
                return True
    return False
