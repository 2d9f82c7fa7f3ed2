"""Keep the state that running a step changes, and put it back into the same objects."""

import copy
import functools
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from anynan._reach.kept import container_state, generator_state
from anynan.torch.call.randomstate import RandomState
from anynan.torch.private import set_version, storage_of, version

# Python objects whose attributes are their whole state.
OPEN = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Snapshot:
    """Copy the state of modules, optimizers, schedulers, scalers and generators.

    Everything goes back into the objects it came from: a weight stays the same tensor, an
    optimizer state that did not exist is gone again. What else has ``state_dict`` and
    ``load_state_dict`` is put back through them. It takes as much memory as what it copies.

    Attributes:
        lost: What could not be copied or put back, with the error.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self._restores: list[Callable[[], object]] = []
        self._seen: dict[int, Any] = {}
        self.lost: list[str] = []
        self._storages: set[int] = set()
        self._grad = torch.is_grad_enabled()
        self._random = RandomState.now()
        with torch.no_grad():
            for item in objects:
                self._keep(item)

    def restore(self) -> None:
        """Put everything back; may be called again."""
        with torch.no_grad():
            for restore in self._restores:
                restore()
        self._random.restore()
        torch.set_grad_enabled(self._grad)

    def _keep(self, item: Any) -> None:
        if id(item) in self._seen:
            return
        if isinstance(item, torch.Tensor):
            self._seen[id(item)] = item
            self._tensor(item)
        elif isinstance(item, torch.nn.Module):
            for module in item.modules():
                if id(module) not in self._seen:
                    self._seen[id(module)] = module
                    self._attributes(module)
        elif isinstance(item, OPEN):
            self._seen[id(item)] = item
            self._attributes(item)
        elif isinstance(item, GENERATORS):
            self._seen[id(item)] = item
            self._generator(item)
        elif isinstance(item, dict | list | set | deque | tuple | np.ndarray):
            self._seen[id(item)] = item
            self._container(item)
        elif (
            hasattr(item, "state_dict")
            and hasattr(item, "load_state_dict")
            and not isinstance(item, type)
        ):
            self._seen[id(item)] = item
            self._through_dict(item)

    def _attributes(self, item: Any) -> None:
        held = dict(item.__dict__)

        def restore() -> None:
            item.__dict__.clear()
            item.__dict__.update(held)

        self._restores.append(restore)
        for name, value in held.items():
            if not name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                self._keep(value)

    def _container(self, item: Any) -> None:
        if isinstance(item, tuple):
            for value in item:
                self._keep(value)
            return
        if isinstance(item, np.ndarray):
            content = item.copy()
            self._restores.append(functools.partial(item.__setitem__, ..., content))
        else:
            restore = container_state(item)
            if restore is not None:
                self._restores.append(restore)
        if not isinstance(item, np.ndarray | set):
            for value in list(item.values() if isinstance(item, dict) else item):
                self._keep(value)

    def _tensor(self, x: torch.Tensor) -> None:
        inner = x.to_local() if hasattr(x, "to_local") else x
        if inner.layout is not torch.strided or inner.is_meta:
            whole = x.detach().clone()
            self._restores.append(functools.partial(x.data.copy_, whole))
        else:
            storage = inner.untyped_storage()
            number = storage_of(storage)
            if number not in self._storages:
                self._storages.add(number)
                content = storage.clone()
                self._restores.append(functools.partial(storage.copy_, content))
        data, requires, count = x.data, x.requires_grad, version(x)
        grad = x.grad if x.is_leaf else None

        def restore() -> None:
            if x.data.data_ptr() != data.data_ptr() or x.shape != data.shape:
                x.data = data
            if x.requires_grad is not requires and x.is_leaf:
                x.requires_grad = requires
            if x.is_leaf:
                x.grad = grad
            if count >= 0:
                set_version(x, count)

        self._restores.append(restore)
        if grad is not None:
            self._keep(grad)

    def _generator(self, item: Any) -> None:
        self._restores.append(generator_state(item))

    def _through_dict(self, item: Any) -> None:
        try:
            state = copy.deepcopy(item.state_dict())
        except Exception as error:  # noqa: BLE001  it is the user's own
            self.lost.append(f"{type(item).__name__} ({type(error).__name__}: {error})")
            return

        def restore() -> None:
            try:
                item.load_state_dict(copy.deepcopy(state))
            except Exception as error:  # noqa: BLE001
                self.lost.append(f"{type(item).__name__} ({type(error).__name__}: {error})")

        self._restores.append(restore)
