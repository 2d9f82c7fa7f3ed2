"""Walk the tensors in what a layer takes and gives."""

from collections.abc import Iterator
from typing import Any

import torch

from anynan._arrays.containers import leaves


def tensors(value: Any, name: str, *, objects: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Walk the tensors in a module's inputs or outputs, with readable names.

    Args:
        value: What went in or came out.
        name: What to call it.
        objects: Look into the attributes of objects that are no containers, as distributions.
    """
    # isinstance would ask what is no tensor for its class, and a proxy may raise there.
    if issubclass(type(value), torch.Tensor):
        yield name, value
        return
    for path, item in leaves(value, name, objects=objects):
        if issubclass(type(item), torch.Tensor):
            yield path, item
