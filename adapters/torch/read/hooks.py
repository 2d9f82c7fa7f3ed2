"""Hooks that copies of a model leave behind, and hooks on gradients behind the user's own."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

_set = dict.__setitem__


class _Sweep:
    """Take copied hooks out of the dicts they came into, once the whole copy is made.

    It lives in the memo of ``copy.deepcopy``, and goes with it.
    """

    def __init__(self) -> None:
        self.found: list[tuple[Any, int]] = []

    def __del__(self) -> None:
        for hooks, key in self.found:
            hooks.pop(key, None)


class Hook:
    """Be dropped from copies: a deep-copied or unpickled model is not tracked.

    Attributes:
        handle: What takes it off its module.
    """

    __slots__ = ("handle",)

    def on(self, handle: Any) -> Any:
        """Note the handle, and hand it on."""
        self.handle = handle
        return handle

    def __deepcopy__(self, memo: Any) -> Any:
        handle: Any = getattr(self, "handle", None)
        copied = None if handle is None else memo.get(id(handle.hooks_dict_ref()))
        if copied is not None:  # the dict in whose copy this will be
            memo.setdefault(id(_Sweep), _Sweep()).found.append((copied, handle.id))
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        # What loads the model may not have anynan: this stands for "do nothing" in the
        # standard library, whatever the arguments.
        return getattr, (contextlib.nullcontext(), "__exit__")


class CallHook(Hook):
    """Call a function, and be dropped from copies of the module."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> None:
        """Call it."""
        self.function(*args)


class _LastHooks(dict[Any, Callable[[Any], None]]):
    """Hold a tensor's hooks as PyTorch calls them, in order, and keep our own behind the user's.

    The key of one of the user's is a number, that of our own is the hook itself.
    What a user's hook makes of a gradient is what the layers before get.
    """

    __slots__ = ("__weakref__",)

    def __setitem__(self, key: Any, hook: Callable[[Any], None]) -> None:
        own = [known for known in self if known is self[known]]
        for known in own:
            del self[known]
        _set(self, key, hook)
        self.update(zip(own, own, strict=True))


def hook_last(x: torch.Tensor, hook: Callable[[Any], None]) -> Any:
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


def own_hooks(x: torch.Tensor) -> list[Callable[[Any], None]]:
    """List what ``hook_last`` put on a tensor itself."""
    hooks: Any = x._backward_hooks if x.grad_fn is not None else None
    return [hook for key, hook in hooks.items() if key is hook] if type(hooks) is _LastHooks else []
