"""PyTorch's compiler: what it leaves to Python, and the graphs that it made already."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from anynan.torch.private import (
    entry_codes,
    have_graphs,
    hook_guards,
    is_compiled,
    is_compiler_loaded,
    skip,
)

whole: list[bool] = []
"""Whether an optimizer was compiled whole, whose updates no hook tells."""
_is_dynamo = torch.compiler.is_dynamo_compiling
_before: list[Any] = []  # the setting's default, while something is tracked
_lock = threading.Lock()
_eager: list[Any] = []  # by whom compiled code is run uncompiled now, the first of them sets it


def run_outside(*functions: Any) -> None:
    """Let functions run as they are when a compiled module calls them.

    What PyTorch compiles around a module's own hooks is each of them alone; these, and what
    they call, are left to Python. Inlined in a graph they are still traced.
    """
    for function in functions:
        skip(function.__code__)


def _is_whole() -> bool:
    whole[:] = [True]
    return True


# The compiler calls it as it compiles, and its graph has the answer.
_is_whole._dynamo_marked_constant = True  # type: ignore[attr-defined]


def between_graphs(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Let an optimizer's hook run as it is where an update is compiled, or not at all.

    PyTorch's own optimizers end a graph as an update begins, so a hook ends none that would be
    whole. Another one may be compiled with ``fullgraph=True``: no hook is in its graph.
    """

    def outside(*given: Any) -> Any:
        return hook(*given)

    outside._torchdynamo_disable = True  # type: ignore[attr-defined]  # what the compiler asks

    @functools.wraps(hook)
    def told(optimizer: torch.optim.Optimizer, *given: Any) -> Any:
        if not _is_dynamo():
            return hook(optimizer, *given)
        if type(optimizer).__module__.startswith("torch.optim."):
            return outside(optimizer, *given)
        _is_whole()
        return None

    run_outside(told)
    return told


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled modules and functions uncompiled inside.

    The setting is the whole process's: of several threads, the last one puts it back.
    """
    if not is_compiler_loaded():
        yield
        return
    with _lock:
        _eager.append(_eager[0] if _eager else torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _lock:
            setting = _eager.pop()
            if not _eager:
                setting.__exit__(None, None, None)


def look_for_hooks() -> None:
    """Have a graph without hooks used only for models without hooks, from now on.

    The default is changed: what is set is set for one thread, which need not be the one that
    runs the model or removes the tracker. A value that the program set itself stays.
    """
    if not _before:
        entry = hook_guards()
        _before.append(entry.default)
        entry.default = False


def look_no_more() -> None:
    """Put PyTorch's own setting back once nothing is tracked."""
    if _before:
        hook_guards().default = _before.pop()


def has_graphs(model: torch.nn.Module) -> bool:
    """Tell whether graphs of a model's code are there, or may be."""
    codes = set()
    for module in model.modules():
        if is_compiled(module):
            codes |= entry_codes()
        code = getattr(module.forward, "__code__", None)
        if code is not None:
            codes.add(code)
    return have_graphs(codes)
