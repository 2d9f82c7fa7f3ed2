"""What running a step changes: its models, what trains them, and who watches them."""

import gc
from contextlib import ExitStack
from typing import Any

import torch

from anynan._steps.tracked import Handle, Tracked, inside
from anynan.torch.call.discovery import find_modules, find_state, find_weights
from anynan.torch.call.snapshot import OPEN
from anynan.torch.update.updates import watching


def pause_trackers(step: Any, stack: ExitStack) -> None:
    """Pause every tracker of the step and of its models: the search has its own."""

    def pause(tracker: Tracked) -> None:
        if not tracker.paused:
            tracker.pause()
            stack.callback(tracker.resume)

    if isinstance(step, Handle):
        pause(inside(step))
    while True:
        found = find_state(step).values()
        held = [inside(item) for item in found if isinstance(item, Handle)]
        new = [tracker for tracker in held if not tracker.paused]
        if not new:
            break
        for tracker in new:
            pause(tracker)
    mine = {id(module) for model in models_of(step) for module in model.modules()}
    for each in watching():
        if any(id(model) in mine for _, model in each.models.living()):
            pause(each.tracker)


def models_of(fn: Any) -> list[torch.nn.Module]:
    """List the modules that a function can reach."""
    found = list(find_modules(fn).values())
    states = find_state(fn).values()
    return found + [item for item in states if isinstance(item, torch.nn.Module)]


def objects_of(fn: Any, batches: Any, state: list[Any] | None) -> list[Any]:
    """List everything whose state a run may change."""
    objects: list[Any] = [*models_of(fn), *find_state(fn).values(), *(state or ())]
    objects += find_weights(fn).values()
    for item in state or ():
        if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
            msg = f"state= takes objects with state_dict and load_state_dict, not {item!r}"
            raise TypeError(msg)
    objects = [item for item in objects if not isinstance(item, Handle)]
    if not objects and state is None:
        msg = (
            "no model or optimizer was found in the step's closure, globals or bound object, so "
            "nothing could be put back: give them as state=[model, optimizer], or state=[] if "
            "the step keeps no state"
        )
        raise ValueError(msg)
    weights = {id(p) for m in objects if isinstance(m, torch.nn.Module) for p in m.parameters()}
    living = [item for item in gc.get_objects() if issubclass(type(item), OPEN)]
    optimizers = [
        item
        for item in living
        if isinstance(item, torch.optim.Optimizer)
        and (
            any(item is known for known in objects)
            or any(id(p) in weights for group in item.param_groups for p in group["params"])
        )
    ]
    stepped = {id(item) for item in optimizers}
    objects += optimizers
    objects += [
        item
        for item in living
        if isinstance(item, torch.amp.GradScaler)
        or (
            isinstance(item, torch.optim.lr_scheduler.LRScheduler)
            and id(getattr(item, "optimizer", None)) in stepped
        )
    ]
    return objects + _generators(batches)


def _generators(batches: Any) -> list[Any]:
    """List the random generators that a data loader, maybe in a progress bar, draws from."""
    loader = getattr(batches, "iterable", batches)
    holders = [loader]
    for name in ("sampler", "batch_sampler"):
        inner = getattr(loader, name, None)
        holders += [inner, getattr(inner, "sampler", None)]
    found = [getattr(holder, "generator", None) for holder in holders]
    return [item for item in found if isinstance(item, torch.Generator)]
