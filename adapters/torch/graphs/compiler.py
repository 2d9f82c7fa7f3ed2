"""PyTorch's compiler: what it leaves to Python, and the graphs that it made already."""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_before: list[Any] = []  # the setting's default, while something is tracked
_frames = torch._C._dynamo.eval_frame


def run_outside(*functions: Any) -> None:
    """Let functions run as they are when a compiled module calls them.

    What PyTorch compiles around a module's own hooks is each of them alone; these, and what
    they call, are left to Python. Inlined in a graph they are still traced.
    """
    strategy = getattr(_frames, "_FrameExecStrategy", None)
    if strategy is None:  # before 2.7: they are compiled alone, and return at once
        return
    skip = _frames._FrameAction.SKIP
    for function in functions:
        _frames.set_code_exec_strategy(function.__code__, strategy(skip, skip))


def is_loaded() -> bool:
    """Tell whether anything can have been compiled."""
    return "torch._dynamo" in sys.modules


def eager() -> AbstractContextManager[Any]:
    """Run compiled modules and functions uncompiled inside."""
    if not is_loaded():
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def look_for_hooks() -> None:
    """Have a graph without hooks used only for models without hooks, from now on.

    The default is changed: what is set is set for one thread, which need not be the one that
    runs the model or removes the tracker. A value that the program set itself stays.
    """
    if not _before:
        entry = _setting()
        _before.append(entry.default)
        entry.default = False


def look_no_more() -> None:
    """Put PyTorch's own setting back once nothing is tracked."""
    if _before:
        _setting().default = _before.pop()


def _setting() -> Any:
    config: Any = torch._dynamo.config
    return config._config["skip_nnmodule_hook_guards"]


def count_graphs() -> int:
    """Count the graphs that were made so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def has_graphs(model: torch.nn.Module) -> bool:
    """Tell whether graphs of a model's code are there, or may be."""
    entries = getattr(_frames, "_debug_get_cache_entry_list", None)
    if entries is None:
        return True
    from torch._dynamo.external_utils import wrap_inline

    codes = set()
    for module in model.modules():
        if _is_compiled(module):
            # Each of these codes stands for everything that is compiled by way of it.
            codes |= {torch.nn.Module._call_impl.__code__, wrap_inline(has_graphs).__code__}
        code = getattr(module.forward, "__code__", None)
        if code is not None:
            codes.add(code)
    return any(entries(code) for code in codes)


def _is_compiled(module: torch.nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
