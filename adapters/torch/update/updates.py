"""Before and after an update: one pair of optimizer hooks, shared by every tracker."""

import atexit
import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from anynan._base.interrupts import whole
from anynan._readings.step import Step
from anynan.torch.call import noted
from anynan.torch.call.growth import registered
from anynan.torch.call.models import Models
from anynan.torch.call.state import State, StopReplay
from anynan.torch.graphs.compiler import between_graphs, look_no_more
from anynan.torch.messages import LAYERS_UNSEEN, MODEL_CALL_UNSEEN, SCALER_SKIPPED
from anynan.torch.private import task
from anynan.torch.read.transforms import capturing
from anynan.torch.step.steps import Steps
from anynan.torch.update.gradients import Gradients
from anynan.torch.update.moves import Moves
from anynan.torch.update.skips import Seam, current, stepped
from anynan.torch.update.termination import Termination
from anynan.torch.weights.optimizers import Optimizers
from anynan.torch.weights.scalers import in_use, scaled


class Updates:
    """See to what one tracker reads before an update, and note the update.

    Args:
        steps: The open steps.
        models: What is watched.
        optimizers: What holds the weights.

    Attributes:
        ran_before: Whether layers were read in a step that ended before its update.
        owed: The first step that failed and ended since the last update, which is of it, too.
        called_past: Called where parts of a model were called past it.
    """

    called_past: Callable[[], None]

    def __init__(self, steps: Steps, models: Models, optimizers: Optimizers) -> None:
        self.tracker, self.steps, self.models = steps.tracker, steps, models
        self.optimizers = optimizers
        self.gradients = Gradients(steps)
        self.moves = Moves(steps.options.updates)
        self.ran_before = False
        self.owed: Step | None = None
        self._since = 1000  # updates since layers were read

    @whole
    def watch(self) -> None:
        """Be told of every optimizer step from now on."""
        _watching[id(self)] = weakref.ref(self)
        listen()

    @whole
    def unwatch(self) -> None:
        """Be told no more; the hooks go with the last one."""
        _watching.pop(id(self), None)
        leave()

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Read gradients and the step so far: weights never take a bad step."""
        state = self.steps.threads.owner()
        if state.replaying:
            self._end_replay(state, optimizer)
            return
        if state.idle:
            return
        if state.in_step and state.rows is not None and state.depth:
            self.models.stepped.add(optimizer)  # rows alone may be of a call outside of the step
        held = self.optimizers.held(optimizer)
        if not held.parameters:
            return
        gradients = [p.grad for p in held.parameters]
        rows = self.open(state, gradients)
        if rows is None:
            return
        self.ran_before = False
        ran = bool(state.calls) or any(site.phase == "forward" for site in rows.sites)
        self._since = 0 if ran else self._since + 1
        self.optimizers.note(optimizer)
        scaler = current()
        scale = None
        if scaler is not None:
            self.steps.scalers.note(rows, scaler)
            # One that hands its check to a fused optimizer leaves the unscaling to it, too.
            scale = getattr(optimizer, "grad_scale", None)
            rows.update_goes_on(made=getattr(optimizer, "found_inf", None) is None)
        failed = None if ran or state.depth else self.owed
        if failed is not None:
            self.tracker.judge.applied_bad_update(failed)
        else:
            self.gradients.read(state, rows, held, gradients, scale)
        # Where no scaler steps this optimizer, none skips the update.
        if rows.pending is not None and scaler is None and not scaled(optimizer):
            self.fail(state, rows)
        if self.steps.ranks.joined:
            self.agree(state, rows)
        if rows.skip or (failed is not None and failed.skip):
            _drop_gradients(optimizer)
        else:
            self.moves.before(optimizer, held, gradients, rows)

    def open(self, state: State, gradients: list[Any]) -> Step | None:
        """Begin an update; give the rows of its step, None if it is none."""
        state.in_optimizer = True
        self.optimizers.known = True
        if self.steps.graphs.boards:
            self.steps.take(state)
        if state.rows is not None:
            return state.rows
        if all(grad is None for grad in gradients):
            return None
        self.say_unseen(state)
        return self.steps.open(state)

    def say_unseen(self, state: State) -> None:
        """Say that weights got gradients from layers that nobody saw running."""
        # Another thread or step may have seen them.
        # So may the step before, of which this is another optimizer's update.
        seen = (
            self.ran_before
            or self._since + 1 < len(self.optimizers.mine())
            or any(
                other.rows is not None for other in self.steps.threads.states if other is not state
            )
        )
        judge, graphs = self.tracker.judge, self.steps.graphs
        if seen or graphs.missed(called=False):
            return
        if judge.options.level != "step":
            judge.say(LAYERS_UNSEEN(again=""))
        elif graphs.hides():
            why = (
                ": it is inside compiled code, or its parts are called past it, so only the "
                "gradients of its weights are watched; track what torch.compile returned, or the "
                "training step"
            )
            judge.say(MODEL_CALL_UNSEEN(why=why))
        else:
            self.called_past()
            why = (
                ", its parts are called past it: in the first step only the gradients of the "
                "weights were read, then each part is watched"
            )
            judge.remark(MODEL_CALL_UNSEEN(why=why))

    def fail(self, state: State, rows: Step) -> None:
        """Act on a gradient that waited for what a loss scaler would do."""
        with state.aside():
            self.tracker.judge.unscaled(rows)

    def agree(self, state: State, rows: Step) -> None:
        """Agree with the other ranks, in the steps that are read."""
        every = self.steps.options.read
        if not isinstance(every, int) or not (rows.number + 1) % every:
            self.steps.ranks.before_update(state, rows)

    def passed(self) -> None:
        """Read gradients as a backward pass has ended, where no optimizer does the update."""
        state = self.steps.threads.state()
        rows = state.rows
        if self.models.fn is not None or state.idle or rows is None or in_use(state.scales):
            return
        if self.optimizers.exist():
            return
        if rows.failed is None:
            held = self.optimizers.unheld()
            self.gradients.read(state, rows, held, [p.grad for p in held.parameters], None)
            if rows.pending is not None:
                self.fail(state, rows)
        if rows.failed is not None:
            self.tracker.judge.applied_bad_update(rows)

    def skipped(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Read the gradients for which a scaler skips an update, if none was seen bad so far."""
        state = self.steps.threads.owner()
        held = self.optimizers.held(optimizer)
        rows = state.rows
        if state.replaying or state.idle or not held.parameters or rows is None:
            return
        self.steps.scalers.note(rows, scaler)
        if rows.pending is not None or rows.failed is not None or rows.held is not None:
            return
        gradients = [p.grad for p in held.parameters]
        self.gradients.read(state, rows, held, gradients, None, skipped=True)
        known = self.steps.options.backward and len(rows.lo) == len(rows.sites)
        if known and all(map(math.isfinite, [*rows.lo, *rows.hi])):
            self.tracker.judge.remark(SCALER_SKIPPED())

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the update; a tracked model's step ends here."""
        state = self.steps.threads.owner()
        if state.idle or not self.optimizers.held(optimizer).parameters:
            return
        state.in_optimizer = False
        rows = state.rows
        self.moves.after(optimizer, rows)
        if rows is None or rows.failed is not None or rows.pending is None or rows.applied:
            self.tracker.judge.updated(self.tracker.step if rows is None else rows.number)
        if task() != -1:
            state.updated = True  # in the middle of the backward pass: there is more to come
            return
        self.finish(state)

    def finish(self, state: State) -> None:
        """Close a tracked model's step at its update; that of a function ends with its call."""
        if self.models.fn is not None:
            state.updated = True  # the weights are no longer those that the step began with
        elif state.rows is not None:
            if self.steps.options.parameters:
                self.steps.write_weights(state, state.rows)
            self.steps.close(state)

    def _end_replay(self, state: State, optimizer: torch.optim.Optimizer) -> None:
        """Make no update in a second run; it ends here where the first had come no further."""
        ours = self.models.fn is not None or bool(self.optimizers.held(optimizer).parameters)
        # Else the weights are those after the update, and what comes then took them so; in the
        # middle of a backward pass there is more to see, too.
        updated = self.models.fn is not None and state.updated
        if ours and task() == state.base and not updated:
            raise StopReplay
        _drop_gradients(optimizer)


def _drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Have an update change nothing."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = None


# Asked twice an update: a ``WeakSet`` costs several times as much to walk.
_watching: "dict[int, weakref.ref[Updates]]" = {}
_handles: list[Any] = []


def watching() -> list[Updates]:
    """List those that are told, in the order in which they began to be."""
    found = [each for ref in list(_watching.values()) if (each := ref()) is not None]
    if len(found) < len(_watching):
        for key, ref in list(_watching.items()):
            if ref() is None:
                _watching.pop(key, None)
    return found


def listen() -> None:
    """Be told of updates: an optimizer that steps already tells of its next step alone."""
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before))
        _handles.append(register_optimizer_step_post_hook(_after))
        _handles.append(register_module_module_registration_hook(registered))
        _handles.append(Seam(_skipped))
        _handles.append(Termination(_tell_rest))


def leave() -> None:
    """Be told no more, unless something is watched, or a whole program."""
    if not watching() and noted.everywhere is None:
        while _handles:
            _handles.pop().remove()
        look_no_more()


def _tell_rest() -> None:
    for each in watching():
        each.tracker.remove()


@atexit.register
def _at_exit() -> None:
    for handle in _handles:
        if isinstance(handle, Termination):
            handle.tell()


@between_graphs
def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    stepped()
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        notes = noted.away()
        _tell(optimizer)
        if notes is not None and noted.is_own(optimizer):
            notes.put()
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
    found = watching()
    if len(found) > 1:
        # In the order they were made, which is the same on every rank: each agrees with its own.
        found.sort(key=lambda each: each.steps.ranks.number)
    for each in found:
        each.before(optimizer)
    if noted.everywhere is not None:
        noted.everywhere.update()


@between_graphs
def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not capturing():
        for each in watching():
            each.after(optimizer)
    noted.updated(optimizer)


def _skipped(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    for each in watching():
        each.skipped(optimizer, scaler)
