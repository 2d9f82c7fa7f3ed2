"""Models whose own call is not made: a training loop that is one of their methods calls parts."""

from collections.abc import Iterator

import torch

from anynan.torch.read.paths import clean_path, join


def has_own_loop(model: torch.nn.Module) -> bool:
    """Tell whether a trainer calls a method of the model instead of the model, as Lightning's."""
    return callable(getattr(model, "training_step", None))


def parts(prefix: str, model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Walk the parts that such a loop may call, with their paths."""
    for name, child in model.named_children():
        path = join(prefix, clean_path(name, model))
        if type(child).forward is torch.nn.Module.forward:  # a list or a dict of modules
            yield from parts(path, child)
        else:
            yield path, child
