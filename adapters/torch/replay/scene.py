"""What a watcher of operations is told about the program: its storages, layers and weights."""

import functools
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from anynan._diagnosis.lineage import External
from anynan.torch.call.models import Models
from anynan.torch.call.regions import Regions
from anynan.torch.call.rootcall import RootCall
from anynan.torch.call.state import StopReplay
from anynan.torch.private import StorageWeakRef, is_transformed, storage_number
from anynan.torch.read.hooks import CallHook
from anynan.torch.read.probes import local
from anynan.torch.read.tensors import tensors
from anynan.torch.replay.watcher import Watcher

Handed = tuple[str, "weakref.ref[torch.Tensor]"]


class Scene:
    """Show a watcher where it is in the program.

    Args:
        models: What is watched.

    Attributes:
        handed: What calls were handed that others computed, weakly, by name.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self.handed: list[Handed] = []

    def outside(self, root: RootCall) -> dict[int, tuple[External, str]]:
        """Name the storages that exist before the call: inputs, weights, buffers."""
        found: dict[int, tuple[External, str]] = {}
        named = self._models.parameters()
        weights = {id(x) for _, x in named}
        for name, x in [*named, *self._models.buffers()]:
            key = _storage(x)
            if key is not None:
                found[key] = ("parameter" if id(x) in weights else "buffer", name)
        for name, x in self._models.inputs(root.fn, root.args, root.kwargs):
            key = _storage(x)
            if key is not None:
                kind: External = "handed" if self._is_handed(root, x) else "input"
                found.setdefault(key, (kind, name))
        return found

    def _is_handed(self, root: RootCall, x: torch.Tensor) -> bool:
        """Tell whether a call was given what the program computed.

        What a part of the model gets from another was computed, nobody saw where; what a model gets
        inside a step may have been.
        """
        inner = self._models.fn is not None and root.fn is not self._models.fn
        among = self._models.parts or self._models.handed
        return inner or (among and x.grad_fn is not None)

    def look_at(self, root: RootCall) -> None:
        """Remember what a call is handed, as it is before the second run gets it apart."""
        given = self._models.inputs(root.fn, root.args, root.kwargs)
        self.handed += [(name, weakref.ref(x)) for name, x in given if self._is_handed(root, x)]

    def storages(self, root: RootCall) -> list[StorageWeakRef]:
        """Refer to the storages of a call's inputs, without keeping them."""
        inputs = self._models.inputs(root.fn, root.args, root.kwargs)
        return [
            StorageWeakRef(local(x).untyped_storage()) for _, x in inputs if _storage(x) is not None
        ]

    def gradients(self, watcher: Watcher) -> None:
        """Note the bad gradients that landed on weights."""
        try:
            for name, p in self._models.with_gradient():
                watcher.check_sink("backward", name.rpartition(".")[0], name, p.grad)
        except StopReplay:
            pass

    def layers(self, watcher: Watcher, calls: dict[str, int]) -> ExitStack:
        """Tell the watcher which layer runs, and show it what leaves each layer.

        Args:
            watcher: What to tell.
            calls: How often each layer was called in this step before.

        Returns:
            What ends it.
        """
        stack = ExitStack()
        for prefix, model in self._models.living():
            stack.enter_context(self._model(prefix, model, watcher, calls))
        return stack

    @contextmanager
    def _model(
        self, prefix: str, model: torch.nn.Module, watcher: Watcher, before: dict[str, int]
    ) -> Iterator[None]:
        calls, regions, stack = dict(before), Regions(), ExitStack()
        watched = set(self._models.paths(prefix, model))
        weak = weakref.ref(watcher)

        def enter(path: str, module: Any, args: Any) -> None:
            if not watcher.mine():
                return
            again = watcher.in_backward()  # recomputed under activation checkpointing
            if again or not torch.is_grad_enabled():
                call = regions.number(calls, path, again=again)[0]
            else:
                call = calls.get(path, 0)
                calls[path] = call + 1
            watcher.layers.append((path, call))

        def leave(path: str, module: Any, args: Any, output: Any) -> None:
            if not watcher.mine():
                return
            call = next((n for known, n in reversed(watcher.layers) if known == path), 0)
            if output is not None and path in watched and watcher.observer is None:
                # What checkpointing runs again was passed before.
                first = None if watcher.in_backward() else call
                for name, x in tensors(output, "output", objects=True):
                    if is_transformed(x):  # nor did the first run read it
                        continue
                    watcher.check_sink("forward", path, name, x, call=first)
                    if x.requires_grad:
                        handle = x.register_hook(functools.partial(arrived, weak, path, name, call))
                        if x.grad_fn is None:  # a leaf outlives the run
                            stack.callback(handle.remove)
            while watcher.layers and watcher.layers.pop()[0] != path:
                pass

        with stack:
            for path, module in self._models.named(prefix, model).items():
                hook = CallHook(functools.partial(enter, path))
                handle = hook.on(module.register_forward_pre_hook(hook, prepend=True))
                stack.callback(handle.remove)
                hook = CallHook(functools.partial(leave, path))
                handle = hook.on(module.register_forward_hook(hook, always_call=True))
                stack.callback(handle.remove)
            yield


def arrived(
    ref: Any, path: str | None, name: str, call: int | None, grad: torch.Tensor | None
) -> None:
    """Show a watcher the gradient that came to what a layer gave.

    Args:
        ref: The watcher, held weakly.
        path: The layer's path.
        name: Which of its outputs.
        call: Which call of it in the step; None where the first run has no such place.
        grad: The gradient.
    """
    found = ref()
    if found is not None and grad is not None:
        label = "grad" if name == "output" else f"grad of {name}"
        found.check_sink("backward", path, label, grad, call=call)


def _storage(x: torch.Tensor) -> int | None:
    """Give the number of a tensor's storage; None where it has none that can be seen."""
    if x.layout is not torch.strided or x.is_meta:
        return None
    try:
        return storage_number(local(x))
    except (RuntimeError, ValueError):  # inside a function transform, or not made yet
        return None
