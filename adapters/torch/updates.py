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
