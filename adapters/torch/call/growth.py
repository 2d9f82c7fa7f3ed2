"""Layers that are put into a tracked model later, as low-rank adapters of a frozen one are."""

import weakref
from typing import Any

import torch

_is_dynamo = torch.compiler.is_dynamo_compiling


class _Registered:
    """Count the modules that were put into tracked models."""

    def __init__(self) -> None:
        self.count = 0
        self._known: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def know(self, model: torch.nn.Module) -> None:
        """Count what is put into this model from now on."""
        self._known.update(model.modules())

    def __call__(self, module: Any, name: str, submodule: Any) -> None:
        """Count one more."""
        # ``self.layers[:n]`` registers the layers in a new list at every call, also in code that
        # is being compiled: a graph would be guarded by the count.
        if not _is_dynamo() and module in self._known:
            self.count += 1


registered = _Registered()
