"""Hooks that copies of a model leave behind."""

import contextlib
from collections.abc import Callable
from typing import Any


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
