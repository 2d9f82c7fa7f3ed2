"""Before and after an update: one pair of optimizer hooks, shared by every session."""

import atexit
import functools
import gc
import math
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from anynan.torch.call.state import State, StepMarker, StopReplay
from anynan.torch.graphs import graphs as compiled
from anynan.torch.read.transforms import capturing
from anynan.torch.session.growth import registered
from anynan.torch.step import scalers as scaling
from anynan.torch.update import skips as skipping
from anynan.torch.update.gradients import read_gradients
from anynan.torch.update.termination import Termination

if TYPE_CHECKING:
    from anynan.torch.session.session import Session

_sessions: "weakref.WeakSet[Session]" = weakref.WeakSet()
_handles: list[Any] = []


def watch(session: "Session") -> None:
    """Tell this session of every optimizer step from now on."""
    _sessions.add(session)
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before))
        _handles.append(register_optimizer_step_post_hook(_after))
        _handles.append(register_module_module_registration_hook(registered))
        _handles.append(skipping.Seam(_skipped))
        _handles.append(Termination(_tell_rest))


def _tell_rest() -> None:
    for session in list(_sessions):
        session.tracker.remove()


@atexit.register
def _at_exit() -> None:
    for handle in _handles:
        if isinstance(handle, Termination):
            handle.tell()


def unwatch(session: "Session") -> None:
    """Stop telling this session; the hooks go with the last one."""
    _sessions.discard(session)
    if not _sessions:
        while _handles:
            _handles.pop().remove()
        compiled.look_no_more()


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    skipping.stepped()
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
    if capturing():
        return
    # In the order they were made, which is the same on every rank: each agrees with its own.
    for session in sorted(_sessions, key=lambda session: session.ranks.number):
        before_update(session, optimizer)


def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if capturing():
        return
    for session in list(_sessions):
        after_update(session, optimizer)


def _skipped(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    for session in list(_sessions):
        skipped_update(session, optimizer, scaler)


def find_optimizers(parameters: set[int]) -> list[torch.optim.Optimizer]:
    """Look for living optimizers that hold any of these parameters (by id)."""
    return [
        item
        for item in gc.get_objects()
        if issubclass(type(item), torch.optim.Optimizer)
        and any(id(p) in parameters for group in item.param_groups for p in group["params"])
    ]


def before_update(session: "Session", optimizer: torch.optim.Optimizer) -> None:
    """Read gradients and the step so far: weights never take a bad step."""
    state = session.owner(session.state())
    if state.replaying:
        if isinstance(session, StepMarker) or session.held(optimizer).parameters:
            if torch._C._current_graph_task_id() == state.base:
                raise StopReplay
            # In the middle of a backward pass there is more to see: only no update is made.
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None
        return
    if state.idle:
        return
    if session.in_step and state.rows is not None and state.depth:
        session.stepped.add(optimizer)  # rows alone may be of a call outside of the step
    held = session.held(optimizer)
    if not held.parameters:
        return
    state.in_optimizer = True
    session._optimizer_known = True
    gradients = [p.grad for p in held.parameters]
    compiled.take(session, state)
    rows = state.rows
    if rows is None:
        if all(grad is None for grad in gradients):
            return
        seen = session.ran_before or _ran_elsewhere(session, state)
        if not seen and not compiled.missed(session, called=False):
            session.tracker.say(
                "weights got gradients, but none of the watched layers was seen running: "
                "layers inside a compiled graph, or called past the model, are not watched"
            )
        rows = session.open_step(state)
    session.ran_before = False
    scaler = skipping.current()
    scale = None
    if scaler is not None:
        _note_scale(session, rows, scaler)
        # One that hands its check to a fused optimizer leaves the unscaling to it, too.
        scale = getattr(optimizer, "grad_scale", None)
        rows.applied = getattr(optimizer, "found_inf", None) is None
    read_gradients(session, state, rows, held, gradients, scale)
    reading = rows.pending
    if reading is not None and scaler is None and not scaling.scaled(optimizer):
        # No scaler steps this optimizer, so none skips the update.
        rows.pending = None
        with session.aside(state):
            session.tracker.fail(rows, reading, reading.kind or "nan")
    every = session.options.read
    if not isinstance(every, int) or not (rows.step + 1) % every:
        session.ranks.before_update(session, state, rows)
    if rows.skip:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = None


def skipped_update(
    session: "Session", optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
) -> None:
    """Read the gradients for which a scaler skips an update, where none was seen bad so far."""
    state = session.owner(session.state())
    held = session.held(optimizer)
    rows = state.rows
    if state.replaying or state.idle or not held.parameters or rows is None:
        return
    _note_scale(session, rows, scaler)
    if rows.pending is not None or rows.failed is not None or rows.held is not None:
        return
    gradients = [p.grad for p in held.parameters]
    read_gradients(session, state, rows, held, gradients, None, skipped=True)
    known = session.options.backward and len(rows.lo) == len(rows.sites)
    if known and all(map(math.isfinite, [*rows.lo, *rows.hi])):
        session.tracker.remark(
            "a loss scaler skipped updates although no gradient that is watched was bad: those of "
            "other weights, or what was done to them since, must have been"
        )


def _note_scale(session: "Session", rows: Any, scaler: torch.amp.GradScaler) -> None:
    """Keep the scale that the step ran under: the scaler changes it after the update."""
    if scaler._scale is not None:
        rows.scale = scaler._scale.clone()
        session.scaler = weakref.ref(scaler)


def _ran_elsewhere(session: "Session", state: State) -> bool:
    """Tell whether another thread or step saw the layers run."""
    return any(other.rows is not None for other in session._states if other is not state)


def after_update(session: "Session", optimizer: torch.optim.Optimizer) -> None:
    """Note the update; a tracked model's step ends here."""
    state = session.owner(session.state())
    if state.idle or not session.held(optimizer).parameters:
        return
    state.in_optimizer = False
    rows = state.rows
    if rows is None or rows.failed is not None or rows.pending is None or rows.applied:
        session.tracker.updated(session.tracker.step if rows is None else rows.step)
    if torch._C._current_graph_task_id() != -1:
        state.updated = True  # in the middle of the backward pass: there is more to come
        return
    session.finish_update(state)
