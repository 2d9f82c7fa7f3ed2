"""What becomes of tracked models later: layers are put in, as adapters are; they are compiled."""

import weakref
from typing import Any

import torch

from anynan._base.identity import SetByIdentity
from anynan.torch.private import is_compiled_from, original

_is_dynamo = torch.compiler.is_dynamo_compiling


class _Registered:
    """Count the modules that were put into tracked models.

    Attributes:
        followers: The layers of each session, whose ``compiled`` is told of what was compiled.
    """

    def __init__(self) -> None:
        self.count = 0
        self.followers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._outer: SetByIdentity[torch.nn.Module] = SetByIdentity()
        self._known: SetByIdentity[torch.nn.Module] = SetByIdentity()

    def know(self, model: torch.nn.Module) -> None:
        """Count what is put into this model from now on."""
        self._known.add(*model.modules())

    def __call__(self, module: Any, name: str, submodule: Any) -> None:
        """Count one more."""
        # ``self.layers[:n]`` registers the layers in a new list at every call, also in code that
        # is being compiled: a graph would be guarded by the count.
        if _is_dynamo():
            return
        if module in self._known:
            self.count += 1
        elif is_compiled_from(module, name) and submodule in self._known:
            self._outer.add(module)
            for follower in list(self.followers):
                follower.compiled(module, submodule)

    def outer(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        """List what was compiled from a model."""
        return [module for module in self._outer if original(module) is model]


registered = _Registered()
