"""Layers that are put into a tracked model later, as low-rank adapters of a frozen one are."""

import weakref
from typing import TYPE_CHECKING, Any

import torch

from anynan.torch.graphs import graphs as compiled
from anynan.torch.step.weights import check_parameters

if TYPE_CHECKING:
    from anynan.torch.session.session import Session


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


def layers(session: "Session") -> dict[torch.nn.Module, str]:
    """Map the watched modules to their first path."""
    found: dict[torch.nn.Module, str] = {}
    for prefix, ref in session.models:
        model = ref()
        if model is not None:
            for path, module in session.paths(prefix, model).items():
                found.setdefault(module, path)
    return found


def follow(session: "Session") -> None:
    """Watch the layers that were put in, took another's place, or got another path."""
    session.grown = registered.count
    try:
        now = layers(session)
    except ValueError as error:  # a pattern that matched before
        session.tracker.say(f"layers were put into a tracked model since: {error}")
        return
    if now == dict(session.hooked):
        return
    if compiled.ran(session):
        session.tracker.say(
            "layers that were put into the model after it was compiled are not watched: track it "
            "again"
        )
        return
    session._uninstall()
    session._install()
    session._held.clear()
    session.tracker.known_clean(session.tracker.step)  # no update made what is bad in new layers
    check_parameters(session)
