"""The functions of PyTorch's that stand-ins take the place of, for what no function mode sees."""

import functools
import sys
import warnings
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any

import torch

from anynan._base.context import replaying
from anynan.errors import AnynanWarning
from anynan.torch.call import noted
from anynan.torch.call.note import Transformed, as_weight, is_users

_is_dynamo = torch.compiler.is_dynamo_compiling
_getframe = sys._getframe


def applying(apply: Any) -> Callable[..., Any]:
    """Note the program's own functions with a gradient: no function mode sees their call."""

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        run = apply.__get__(None, cls)
        own = isinstance(cls.forward, FunctionType) and is_users(cls.forward.__code__)
        return noted.called(run, run if own else None, args, kwargs, _getframe(1))

    return applied


def transforming(transform: Callable[..., Any]) -> Callable[..., Any]:
    """Note the call of what a function transform made as one operation.

    What runs inside computes with stand-ins, which are gone with the call.
    """

    @functools.wraps(transform)
    def transformed(func: Any, *how: Any, **named: Any) -> Any:
        made = transform(func, *how, **named)
        if _is_dynamo():
            return made

        @functools.wraps(made)
        def call(*args: Any, **kwargs: Any) -> Any:
            if _is_dynamo():
                return made(*args, **kwargs)
            return noted.called(made, Transformed(made), args, kwargs, _getframe(1))

        return call

    return transformed


def placing(show: Callable[..., Any]) -> Callable[..., Any]:
    """Give a warning of PyTorch's own the line that called PyTorch: the innermost is ours.

    What an operation says as it is run again, it has said before.
    """

    def shown(message: Any, category: Any, filename: str, *args: Any, **kwargs: Any) -> None:
        frame: FrameType | None = _getframe(1)
        while frame is not None and _is_between(frame, filename):
            frame = frame.f_back
        if filename != noted.__file__ or frame is None:
            if not replaying() or issubclass(category, AnynanWarning):
                show(message, category, filename, *args, **kwargs)
            return
        scope = frame.f_globals  # whose filters and registry are as without us
        warnings.warn_explicit(
            message, category, frame.f_code.co_filename, frame.f_lineno, scope.get("__name__"),
            scope.setdefault("__warningregistry__", {}), scope,
        )  # fmt: skip

    return shown


def _is_between(frame: FrameType, filename: str) -> bool:
    name = frame.f_globals.get("__name__")
    return frame.f_code.co_filename == filename or name in ("warnings", "_py_warnings")


def quietly(real: Callable[..., Any]) -> Callable[..., Any]:
    """Have a function that computes nothing, but asks every weight for its gradient, not noted."""

    def called(*args: Any, **kwargs: Any) -> Any:
        notes = None if _is_dynamo() else noted.away()
        if notes is None:
            return real(*args, **kwargs)
        notes.hold_gradients()
        try:
            return real(*args, **kwargs)
        finally:
            notes.put()

    return called


def taking(take: Callable[..., Any]) -> Callable[..., Any]:
    """Hold what is made of an array: no function mode sees that."""

    @functools.wraps(take)
    def taken(*args: Any, **kwargs: Any) -> Any:
        out = take(*args, **kwargs)
        notes = None if _is_dynamo() else noted.of()
        if notes is not None:
            notes.hold(out, copied=True)  # the program may fill the array anew
        return out

    return taken


def making(new: Callable[..., Any]) -> Callable[..., Any]:
    """Note of what a weight was made: no function mode sees that."""

    def made(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(new, cls)
        if cls is not torch.nn.Parameter or type(data) is not torch.Tensor or _is_dynamo():
            return run(data, *args, **kwargs)
        run = functools.partial(run, **kwargs)
        return noted.called(lambda x: run(x, *args), as_weight, (data,), {}, _getframe(1))

    return made


def swapping(swap: Callable[..., Any]) -> Callable[..., Any]:
    """Let go of tensors that are to change places: PyTorch refuses what is referred to weakly."""

    @functools.wraps(swap)
    def swapped(*given: Any) -> Any:
        notes = noted.of()
        if notes is not None:
            notes.forget()
        return swap(*given)

    return swapped
