"""What a second run would change: noted before it, and put back after it."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from anynan._base.threads import busy_threads
from anynan._reach.kept import Undo, assign, attempt, container_state, generator_state
from anynan.torch.call.discovery import GENERATORS, OPEN, find_modules, find_state, find_weights
from anynan.torch.call.models import Models
from anynan.torch.call.randomstate import RandomState
from anynan.torch.call.reached import reached_by_layers
from anynan.torch.call.rootcall import RootCall
from anynan.torch.call.state import State
from anynan.torch.private import (
    buffers_of,
    give_saved_tensors_hooks,
    is_transformed,
    scale_of,
    set_scale,
    storage_number,
    take_saved_tensors_hooks,
    task,
    work_of,
)

_MODULE_OWN = frozenset(vars(torch.nn.Module()))


class Kept:
    """Note everything a replay may move, and put it back into the same objects.

    What did not change is left alone, and what cannot be put back does not keep the rest from
    it.

    Attributes:
        lost: What could not be put back, with the error.
        apart: The name of another thread at work, which may use what the code reaches: that is
            left alone then.
    """

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.apart: str | None = None
        self._restores: list[tuple[str, Undo]] = []
        self._gradients: dict[int, torch.Tensor] = {}

    def note(
        self, models: Models, states: set[State], roots: list[RootCall],
        scaler: torch.amp.GradScaler | None,
    ) -> None:  # fmt: skip
        """Note what these calls may move, and take the gradients away.

        Args:
            models: What is watched.
            states: The states of the threads that have a part in it.
            roots: The calls.
            scaler: The loss scaler in use.
        """
        for state in states:
            self._flags(state)
        # The program's hooks on saved tensors are left: checkpointing counts what it is shown.
        hooks = functools.partial(give_saved_tensors_hooks, take_saved_tensors_hooks())
        self._restores.append(("hooks on saved tensors", hooks))
        self._restores.append(("the random numbers", RandomState.now().restore))
        mine = _models(models, roots)
        for p in _parameters(models, roots, mine):
            self.gradient(p)
        for model in {*mine, *models.scripted}:
            for module in model.modules():
                if isinstance(module, torch.jit.ScriptModule):  # what it holds is not Python's
                    for name, x in module.named_buffers(recurse=False):
                        self._restores.append((name, _content(x)))
                else:
                    self._module(module)
        busy, reached = busy_threads(), roots[0].reached if roots else None
        if reached is not None and busy:
            self.apart = next(iter(busy.values()))
        elif reached is not None:
            self._restores.append(("what the code reaches", reached.hold()))
            self._restores.append(("what layers reach", reached_by_layers(models).hold()))
        if models.fn is not None or _of_functions(roots):  # a model's own call runs none of these
            for name, item in _stateful(models, roots, scaler):
                if not isinstance(item, torch.amp.GradScaler):
                    self._stateful(name, item)
                elif item.is_enabled():
                    self._scaler(item)

    def restore(self) -> None:
        """Put everything back, the last first."""
        while self._restores:
            attempt(*self._restores.pop(), self.lost)

    def gradient(self, p: torch.Tensor) -> None:
        """Take a leaf's gradient away until the end: what the replay adds up is apart."""
        if id(p) in self._gradients or is_transformed(p) or not p.is_leaf:  # a transform's own
            return
        self._gradients[id(p)] = p
        grad, data, attributes = p.grad, p.data, dict(vars(p))
        for name, value in attributes.items():  # a library's own, as a gradient for each sample
            self._container(name, value)

        def restore() -> None:
            assign(vars(p), attributes)
            if storage_number(p.data) != storage_number(data):
                p.data = data
            p.grad = grad

        self._restores.append(("a gradient", restore))
        p.grad = None

    def _flags(self, state: State) -> None:
        idle, replaying, base = state.idle, state.replaying, state.base

        def restore() -> None:
            state.idle, state.replaying, state.base = idle, replaying, base

        self._restores.append(("the tracker's own state", restore))
        state.idle = state.replaying = True
        state.base = task()

    def _module(self, module: torch.nn.Module) -> None:
        attributes, buffers = dict(vars(module)), dict(buffers_of(module))
        for name, value in attributes.items():
            if name not in _MODULE_OWN:
                self._container(f"{type(module).__name__}.{name}", value)
                if isinstance(value, GENERATORS):
                    self._restores.append((name, generator_state(value)))

        def restore() -> None:
            assign(buffers_of(module), buffers)
            assign(vars(module), attributes)

        self._restores.append((type(module).__name__, restore))
        for name, x in buffers.items():
            # Swapped, not written back: the user's graph may have saved the original.
            buffers_of(module)[name] = None if x is None else x.detach().clone()
        for name, x in attributes.items():
            if isinstance(x, torch.Tensor) and not x.requires_grad:
                module.__dict__[name] = x.clone()

    def _container(self, name: str, value: Any) -> None:
        restore = container_state(value)
        self._restores += [] if restore is None else [(name, restore)]

    def _scaler(self, scaler: torch.amp.GradScaler) -> None:
        states = {key: dict(held) for key, held in work_of(scaler).items()}
        scale = scale_of(scaler)

        def restore() -> None:
            work_of(scaler).clear()
            work_of(scaler).update(states)
            set_scale(scaler, scale)

        self._restores.append(("a loss scaler", restore))

    def _stateful(self, name: str, item: Any) -> None:
        """Note an optimizer, a scheduler or a generator that the step can reach."""
        if isinstance(item, GENERATORS):
            self._restores.append((name, generator_state(item)))
            return
        attributes = dict(vars(item))
        for key, value in attributes.items():
            self._container(f"{name}.{key}", value)
        for group in attributes.get("param_groups", ()):
            self._container(f"{name}.param_groups", group)
            for key, value in list(group.items()):
                self._container(f"{name}.{key}", value)
                if isinstance(value, torch.Tensor):  # a learning rate on the device
                    self._restores.append((f"{name}.{key}", _content(value)))
        self._restores.append((name, lambda: assign(vars(item), attributes)))


def _of_functions(roots: list[RootCall]) -> list[RootCall]:
    return [root for root in roots if root.of_function]


def _models(models: Models, roots: list[RootCall]) -> set[torch.nn.Module]:
    """List what is watched, and the other models that functions run."""
    found = {model for _, model in models.living()}
    for root in _of_functions(roots):
        found.update(find_modules(root.fn, root.args, root.kwargs).values())
    return found


def _parameters(
    models: Models, roots: list[RootCall], mine: Iterable[torch.nn.Module]
) -> Iterable[torch.Tensor]:
    """List the leaves whose gradients the calls may change: the step's own, nobody else's."""
    found: dict[int, torch.Tensor] = {id(p): p for _, p in models.parameters()}
    for optimizer in list(models.stepped):
        for group in optimizer.param_groups:
            found.update((id(p), p) for p in group["params"])
    for root in _of_functions(roots):
        found.update((id(p), p) for p in find_weights(root.fn).values())
        found.update((id(p), p) for model in mine for p in model.parameters())
    for root in roots:
        for _, x in models.inputs(root.fn, root.args, root.kwargs):
            if x.is_leaf and x.requires_grad:
                found[id(x)] = x
    return found.values()


def _stateful(
    models: Models, roots: list[RootCall], scaler: torch.amp.GradScaler | None
) -> Iterable[tuple[str, Any]]:
    """Walk the optimizers, schedulers, scalers and generators that a step reaches, once each."""
    found: dict[int, tuple[str, Any]] = {}
    for root in roots:
        for name, item in find_state(root.fn).items():
            if isinstance(item, (*OPEN, *GENERATORS)):
                found.setdefault(id(item), (name, item))
    for optimizer in list(models.stepped):
        found.setdefault(id(optimizer), (type(optimizer).__name__, optimizer))
    if scaler is not None:
        found.setdefault(id(scaler), ("a loss scaler", scaler))
    return found.values()


def _content(x: torch.Tensor) -> Callable[[], object]:
    held = x.detach().clone()

    def restore() -> None:
        if not torch.equal(x, held):
            with torch.no_grad():
                x.copy_(held)

    return restore
