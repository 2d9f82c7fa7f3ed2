"""What a run changes, and who watches it: all is copied before, and put back after."""

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from anynan._reach.kept import container_state, generator_state
from anynan._steps.tracked import Handle, Tracked, inside
from anynan.torch.call.discovery import (
    GENERATORS,
    OPEN,
    after,
    find_modules,
    find_state,
    find_weights,
    is_stateful,
    living,
)  # fmt: skip
from anynan.torch.call.randomstate import RandomState
from anynan.torch.private import set_version, storage_number, version
from anynan.torch.update.updates import watching


def pause_trackers(step: Any, stack: ExitStack) -> None:
    """Pause every tracker of the step and of its models: the search has its own."""

    def pause(trackers: Iterable[Tracked]) -> bool:
        new = {id(tracker): tracker for tracker in trackers if not tracker.paused}
        for tracker in new.values():
            tracker.pause()
            stack.callback(tracker.resume)
        return bool(new)

    if isinstance(step, Handle):
        pause([inside(step)])
    # What a tracker calls is in sight once it is paused.
    while pause(inside(item) for item in find_state(step).values() if isinstance(item, Handle)):
        pass
    mine = {id(module) for model in _models(step) for module in model.modules()}
    pause(
        each.tracker
        for each in watching()
        if any(id(model) in mine for _, model in each.models.living())
    )


def _models(fn: Any) -> list[torch.nn.Module]:
    """List a model, or the modules that a function can reach."""
    if isinstance(fn, torch.nn.Module):
        return [fn]
    found = [*find_modules(fn).values(), *find_state(fn).values()]
    return [item for item in found if isinstance(item, torch.nn.Module)]


def stateful_objects(fn: Any, batches: Any, state: list[Any] | None) -> list[Any]:
    """List everything whose state a run may change."""
    for item in state or ():
        if not is_stateful(item):
            msg = f"state= takes objects with state_dict and load_state_dict, not {item!r}"
            raise TypeError(msg)
    objects = [*_models(fn), *find_state(fn).values(), *(state or ()), *find_weights(fn).values()]
    objects = [item for item in objects if not isinstance(item, Handle)]
    if not objects and state is None:
        msg = (
            "no model or optimizer was found in the step's closure, globals or bound object, so "
            "nothing could be put back: give them as state=[model, optimizer], or state=[] if "
            "the step keeps no state"
        )
        raise ValueError(msg)
    trained = {id(p) for m in objects if isinstance(m, torch.nn.Module) for p in m.parameters()}
    known = {id(item) for item in objects}
    around = living(after(OPEN))
    for item in around:
        if isinstance(item, torch.optim.Optimizer) and (
            id(item) in known
            or any(id(p) in trained for group in item.param_groups for p in group["params"])
        ):
            known.add(id(item))
            objects.append(item)
    objects += [
        item
        for item in around
        if isinstance(item, torch.amp.GradScaler) or id(getattr(item, "optimizer", None)) in known
    ]
    return objects + _generators(batches)


def _generators(batches: Any) -> list[torch.Generator]:
    """List the generators that a data loader, maybe in a progress bar, draws from."""
    loader = getattr(batches, "iterable", batches)
    holders = [loader]
    for name in ("sampler", "batch_sampler"):
        inner = getattr(loader, name, None)
        holders += [inner, getattr(inner, "sampler", None)]
    drawn = [getattr(holder, "generator", None) for holder in holders]
    return [item for item in drawn if isinstance(item, torch.Generator)]


class Snapshot:
    """Copy the state of modules, optimizers, schedulers, scalers and generators.

    Everything goes back into the objects it came from: a weight stays the same tensor, an
    optimizer state that did not exist is gone again. What else has ``state_dict`` and
    ``load_state_dict`` is put back through them. It takes as much memory as what it copies. A
    second run copies no weights, as it moves none.

    Attributes:
        lost: What could not be copied or put back, with the error.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self.lost: list[str] = []
        self._restores: list[Callable[[], object]] = []
        self._storages: set[int] = set()
        self._grad, self._random = torch.is_grad_enabled(), RandomState.now()
        seen: dict[int, Any] = {}
        todo = list(objects)
        with torch.no_grad():
            for item in todo:
                if id(item) not in seen:
                    seen[id(item)] = item
                    todo.extend(self._keep(item))

    def restore(self) -> None:
        """Put everything back; may be called again."""
        with torch.no_grad():
            for restore in self._restores:
                restore()
        self._random.restore()
        torch.set_grad_enabled(self._grad)

    def _keep(self, item: Any) -> Iterable[Any]:
        """Keep an object's own state, and list what it holds."""
        if isinstance(item, torch.Tensor):
            return self._tensor(item)
        if isinstance(item, GENERATORS):
            self._restores.append(generator_state(item))
        elif isinstance(item, np.ndarray):
            self._restores.append(functools.partial(item.__setitem__, ..., item.copy()))
        elif isinstance(item, tuple):
            return item
        elif isinstance(item, (torch.nn.Module, *OPEN)):
            hooks = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
            self._container(vars(item))
            return [value for name, value in vars(item).items() if not name.endswith(hooks)]
        elif isinstance(item, dict | list | set | deque):
            self._container(item)
            return list(item.values() if isinstance(item, dict) else item)
        elif not isinstance(item, type) and is_stateful(item):
            self._through_dict(item)
        return ()

    def _container(self, item: Any) -> None:
        restore = container_state(item)
        if restore is not None:
            self._restores.append(restore)

    def _tensor(self, x: torch.Tensor) -> Iterable[Any]:
        inner = x.to_local() if hasattr(x, "to_local") else x
        stored = inner.layout is torch.strided and not inner.is_meta
        if not stored:
            whole = x.detach().clone()
            self._restores.append(functools.partial(x.data.copy_, whole))
        else:
            storage = inner.untyped_storage()
            number = storage_number(inner)
            if number not in self._storages:
                self._storages.add(number)
                self._restores.append(functools.partial(storage.copy_, storage.clone()))
        data, requires, count = x.data, x.requires_grad, version(x)
        grad = x.grad if x.is_leaf else None

        def restore() -> None:
            if stored and (x.data.data_ptr() != data.data_ptr() or x.shape != data.shape):
                x.data = data
            if x.requires_grad is not requires and x.is_leaf:
                x.requires_grad = requires
            if x.is_leaf:
                x.grad = grad
            if count >= 0:
                set_version(x, count)

        self._restores.append(restore)
        return () if grad is None else (grad,)

    def _through_dict(self, item: Any) -> None:
        lost = self.lost  # not self: the copies go as soon as nobody holds them

        def guarded(call: Callable[[], Any]) -> Any:
            try:
                return call()
            except Exception as error:  # noqa: BLE001  it is the user's own
                lost.append(f"{type(item).__name__} ({type(error).__name__}: {error})")

        state = guarded(lambda: copy.deepcopy(item.state_dict()))
        if state is not None:
            # First: it may load into what is put back by itself.
            self._restores.insert(
                0, lambda: guarded(lambda: item.load_state_dict(copy.deepcopy(state)))
            )
