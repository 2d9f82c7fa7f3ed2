"""Models whose own call is not made: a training loop that is one of their methods calls parts."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from anynan.torch.read.paths import clean_path, join
from anynan.torch.step.hooks import RootEnter, RootExit

if TYPE_CHECKING:
    from anynan.torch.session.session import Session


def has_own_loop(model: torch.nn.Module) -> bool:
    """Tell whether a trainer calls a method of the model instead of the model, as Lightning's."""
    return callable(getattr(model, "training_step", None))


def hook_parts(session: "Session", prefix: str, model: torch.nn.Module) -> None:
    """Take a call of each part of a model for a call of the model: something to run again."""
    for path, part in _parts(prefix, model):
        enter, leave = RootEnter(session, path), RootExit(session)
        session.handles += [
            enter.on(part.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)),
            leave.on(part.register_forward_hook(leave, always_call=True)),
        ]


def called_past(session: "Session") -> None:
    """Note that a layer was called without its model, and be ready the next time."""
    if session.parts or not session.roots_are_models:
        return
    session.parts = True
    for prefix, ref in session.models:
        model = ref()
        if model is not None:
            hook_parts(session, prefix, model)


def _parts(prefix: str, model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, child in model.named_children():
        path = join(prefix, clean_path(name, model))
        if type(child).forward is torch.nn.Module.forward:  # a list or a dict of modules
            yield from _parts(path, child)
        else:
            yield path, child
