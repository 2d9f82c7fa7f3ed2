"""A hook on the gradient of an output, after all hooks of the user's own, at little cost."""

from collections.abc import Callable
from typing import Any

import torch

_Hook = Callable[[Any], None]
_set = dict.__setitem__


class _LastHooks(dict[Any, _Hook]):
    """Hold a tensor's hooks as PyTorch calls them, in order, and keep our own behind the user's.

    The key of one of the user's is a number, that of our own is the hook itself.
    What a user's hook makes of a gradient is what the layers before get.
    """

    __slots__ = ("__weakref__",)

    def __setitem__(self, key: Any, hook: _Hook) -> None:
        own = [known for known in self if known is self[known]]
        for known in own:
            del self[known]
        _set(self, key, hook)
        self.update(zip(own, own, strict=True))


def hook_last(x: torch.Tensor, hook: _Hook) -> Any:
    """Call a hook with the gradient that arrives at a tensor, after the tensor's other hooks.

    ``Tensor.register_hook`` does the same through Python code and a handle, and a prehook of the
    node, which would come last as well, through more: either costs several times as much.

    Args:
        x: An output that requires a gradient.
        hook: Called with the gradient, or None.

    Returns:
        What takes the hook off a leaf, which outlives the step; None for what goes with its graph.
    """
    node = x.grad_fn
    hooks: Any = x._backward_hooks
    if node is None:
        return x.register_hook(hook)  # a leaf, as a weight that a layer returns
    if hooks is None and type(x) is torch.Tensor:
        hooks = _LastHooks()
        _set(hooks, hook, hook)
        x._backward_hooks = hooks
        node._register_hook_dict(x)
    elif type(hooks) is _LastHooks:
        _set(hooks, hook, hook)
    else:  # the user's own came first, or a subclass decides what its attributes are
        number = x.output_nr
        node.register_prehook(lambda gradients: hook(gradients[number]))
    return None


def own_hooks(x: torch.Tensor) -> list[_Hook]:
    """List what ``hook_last`` put on a tensor itself."""
    hooks: Any = x._backward_hooks if x.grad_fn is not None else None
    return [hook for key, hook in hooks.items() if key is hook] if type(hooks) is _LastHooks else []
