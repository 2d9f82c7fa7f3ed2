"""Every part of PyTorch that is not public, by what it is used for: an upgrade looks here first.

Plain names stand for PyTorch's own functions, without a call in between, since hooks call them
for every reading. Two values are read where they are needed for that reason, too:
``forward_ad._current_level`` in ``read/probes.py`` and the two flags of ``compiler`` in
``step/hooks.py``. ``watcher.py`` and ``operands.py`` of ``replay/``
read what nodes, storages and operators hold: ``_sequence_nr``, ``_saved_*``, ``_cdata``,
``_schema`` and ``_unsafe_preserve_version_counter``.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from operator import attrgetter, methodcaller
from types import CodeType
from typing import Any

import torch
from torch._functorch import apis, eager_transforms
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data.dataloader import _BaseDataLoaderIter

__all__ = [
    "BatchNorm", "DispatchMode", "FunctionMode", "LoaderIterator", "StorageWeakRef", "current_mode",
    "tree_leaves", "tree_map", "without_modes",
]  # fmt: skip

BatchNorm = _BatchNorm
"""The class of all batch normalisations: training writes their running statistics."""
FunctionMode = TorchFunctionMode
"""The class of what sees every function of PyTorch that the program calls."""
LoaderIterator = _BaseDataLoaderIter
"""The class of what a data loader gives to iterate over: it cannot be run again."""

# Autograd.

task = torch._C._current_graph_task_id
"""Give the number of the backward pass that runs in this thread, -1 for none."""
sequence = torch._C._autograd._get_sequence_nr
"""Give the number that the next node of the graph gets: it ties a node to its operation."""
node = torch._C._current_autograd_node
"""Give the node whose backward runs in this thread."""
node_number: Callable[[Any], int] = methodcaller("_sequence_nr")
"""Give the number that a node got when it was made."""
set_grad_enabled = torch._C._set_grad_enabled
"""Switch the grad mode at less cost than its context manager."""


def nodes_before(node: Any) -> list[Any]:
    """List the nodes of the graph that a node hands gradients to."""
    return [each for each, _ in node.next_functions if each is not None]


@lru_cache(maxsize=4096)
def arguments_of(operator: Any) -> tuple[Any, ...]:
    """List the arguments that an operator declares: their names, their types, how to pass them."""
    return tuple(operator._schema.arguments)


@lru_cache(maxsize=4096)
def returns_of(operator: Any) -> tuple[str, ...]:
    """List the types that an operator declares to give."""
    return tuple(str(each.type) for each in operator._schema.returns)


def functional(operator: Any) -> Any:
    """Give the operator that computes the same as one that writes, and writes nothing."""
    name = operator._schema.name.rpartition("::")[2].rstrip("_")
    packet = getattr(torch.ops.aten, name)
    overload = operator._overloadname
    return getattr(packet, overload if overload in packet.overloads() else "default")


def version(x: torch.Tensor) -> int:
    """Count the writes to a tensor; -1 for one of inference mode, which keeps no count."""
    return -1 if x.is_inference() else x._version


writes: Callable[[torch.Tensor], int] = torch.Tensor._version.__get__  # type: ignore[attr-defined]
"""Count the writes to a tensor at least cost; one of inference mode raises."""

data_of: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]
"""Give a tensor of its own with the same memory; what is written to it counts for no version."""
sets_data: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
"""Put another tensor's memory in the place of its own; this counts for no version either."""


def set_version(x: torch.Tensor, count: int) -> None:
    """Set the count of writes back: autograd would refuse a tensor that was put back."""
    torch._C._autograd._unsafe_set_version_counter((x,), (count,))


def take_saved_tensors_hooks() -> list[Any]:
    """Take the program's hooks on saved tensors away: checkpointing counts what it is shown."""
    autograd, taken = torch._C._autograd, []
    while (hooks := autograd._top_saved_tensors_default_hooks(False)) is not None:
        taken.append(hooks)
        autograd._pop_saved_tensors_default_hooks()
    return taken


def give_saved_tensors_hooks(taken: list[Any]) -> None:
    """Give them back."""
    while taken:
        torch._C._autograd._push_saved_tensors_default_hooks(*taken.pop())


# Hooks on gradients.

_Called = Callable[[Any], None]
_set = dict.__setitem__


class _LastHooks(dict[Any, _Called]):
    """Hold a tensor's hooks as PyTorch calls them, in order, and keep our own behind the user's.

    The key of one of the user's is a number, that of our own is the hook itself.
    What a user's hook makes of a gradient is what the layers before get.
    """

    __slots__ = ("__weakref__",)

    def __setitem__(self, key: Any, hook: _Called) -> None:
        own = [known for known in self if known is self[known]]
        for known in own:
            del self[known]
        _set(self, key, hook)
        self.update(zip(own, own, strict=True))


def hook_last(x: torch.Tensor, hook: _Called) -> Any:
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


def own_hooks(x: torch.Tensor) -> list[_Called]:
    """List what ``hook_last`` put on a tensor itself."""
    hooks: Any = x._backward_hooks if x.grad_fn is not None else None
    return [hook for key, hook in hooks.items() if key is hook] if type(hooks) is _LastHooks else []


def hook_first(x: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Call a hook with the gradient that arrives at a tensor, before the tensor's other hooks."""
    x.register_hook(hook)
    hooks: Any = x._backward_hooks
    *others, last = list(hooks.items())
    hooks.clear()  # PyTorch runs them in the order they were put in
    hooks.update([last, *others])


# Tensors and modules.

foreach_norm = torch._foreach_norm
"""Give the norms of many tensors in one call."""
foreach_div = torch._foreach_div
"""Divide many tensors in one call."""
raw_values = torch.Tensor._values
"""Give the values of a sparse tensor that may name a place twice."""
buffers_of: Callable[[torch.nn.Module], dict[str, torch.Tensor | None]] = attrgetter("_buffers")
"""Give the dict in which a module keeps its buffers."""


def is_composite(func: Any) -> bool:
    """Tell whether an operator is made of others, which autograd would see in its place."""
    return bool(func._can_decompose())


def storage_number(x: torch.Tensor) -> int:
    """Give the number of a tensor's storage, the same for every view of it."""
    return int(x.untyped_storage()._cdata)


@contextmanager
def forward_hooks_apart(models: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Put what is registered inside into copies of the modules' dicts of forward hooks.

    After an exception PyTorch goes through such a dict itself, and raises over any change of it.
    """
    before = [(module, vars(module)["_forward_hooks"]) for m in models for module in m.modules()]
    try:
        for module, hooks in before:
            vars(module)["_forward_hooks"] = hooks.copy()
        yield
    finally:
        for module, hooks in before:
            vars(module)["_forward_hooks"] = hooks


_lookup = torch.nn.Module.__getattr__


def original(module: Any) -> Any:
    """Give the module that a compiled one was made of; anything else as it is."""
    if getattr(type(module), "__getattr__", None) is _lookup:  # a miss would cost an exception
        return module._modules.get("_orig_mod", module)
    return getattr(module, "_orig_mod", module)


def is_compiled_from(module: Any, name: str) -> bool:
    """Tell whether what a module is given under this name is what it is compiled from."""
    return name == "_orig_mod" and type(module).__name__ == "OptimizedModule"


def was_made(kind: type[torch.optim.Optimizer]) -> bool:
    """Tell whether there ever was an optimizer of a class: PyTorch marks its step then.

    A step that is written elsewhere may have been put there since.
    """
    own = "step" in vars(kind) and not kind.step.__module__.startswith("torch.")
    return own or hasattr(kind.step, "hooked")


# Modes and transforms.

is_tracing = torch._C._is_tracing
"""Tell whether ``torch.jit.trace`` runs."""
mode = torch._C._get_dispatch_mode
"""Give the dispatch mode of a kind that is entered, None for none."""
PROXY = torch._C._TorchDispatchModeKey.PROXY
"""The kind of mode under which ``make_fx`` builds a graph."""
level = torch._C._functorch.maybe_current_level
"""Give the level of the function transform that runs, None outside of all."""
_transform = torch._C._functorch.peek_interpreter_stack
_Transform = torch._C._functorch.CInterpreter
TRANSFORMS = (
    *((home, ("vmap", "grad", "grad_and_value")) for home in (torch.func, apis)),
    *((home, ("jacrev", "jacfwd", "hessian")) for home in (torch.func, eager_transforms)),
    (torch, ("vmap",)),
)
"""What turns a function into another one; ``functorch`` asks for it where it is written."""
is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
"""Tell whether a tensor stands for many, as inside ``vmap``."""
is_batch = torch._C._functorch.is_legacy_batchedtensor
"""Tell whether a gradient stands for many, as ``is_grads_batched=True`` asks for."""
within = torch._C._functorch.get_unwrapped
"""Give what a function transform has wrapped."""
current_mode = _get_current_dispatch_mode
"""Give the innermost dispatch mode that is entered."""
count_modes = torch._C._len_torch_dispatch_stack
"""Count the dispatch modes that are entered."""
unseen: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunction
"""Give a context in which function modes see nothing."""
undispatched: Callable[[], AbstractContextManager[Any]] = torch._C._DisableTorchDispatch
"""Give a context in which the modes of dispatch see nothing."""
without_modes: Callable[[], AbstractContextManager[Any]] = _disable_current_modes
"""Leave every dispatch mode inside."""


is_casting = torch._C._is_any_autocast_enabled
"""Tell whether any device's operations are cast by ``autocast``."""


def casts() -> dict[str, torch.dtype]:
    """Give the dtype that ``autocast`` casts to, for each kind of device where it does."""
    if not is_casting():
        return {}
    found = torch.accelerator.current_accelerator()
    kinds = ("cpu",) if found is None else ("cpu", found.type)
    return {
        kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)
    }


def is_transforming() -> bool:
    """Tell whether a function transform runs, in code that is being compiled, too."""
    return isinstance(_transform(), _Transform)


# Backward passes.


def backward_roots(thread: int | None = None) -> tuple[Any, ...]:
    """Give what the backward pass that runs now was asked for, the loss mostly.

    Args:
        thread: Number of the thread that asked for it; this one by default.
    """
    own = thread is None or thread == threading.get_ident()
    frame = sys._getframe(1) if own else sys._current_frames().get(thread or 0)
    while frame is not None:
        name = _ROOTS.get(frame.f_code)
        if name is not None:
            roots = frame.f_locals.get(name)
            return (roots,) if isinstance(roots, torch.Tensor) else tuple(roots or ())
        frame = frame.f_back
    return ()


_ROOTS = {torch.autograd.backward.__code__: "tensors", torch.autograd.grad.__code__: "outputs"}


# The compiler.

_frames = torch._C._dynamo.eval_frame
call_code: CodeType = torch.nn.Module._call_impl.__code__
"""The code through which every module is called."""


def is_compiler_loaded() -> bool:
    """Tell whether anything can have been compiled."""
    return "torch._dynamo" in sys.modules


def skip(code: CodeType) -> None:
    """Leave a function, and what it calls, to Python where a compiled module calls it."""
    nothing = _frames._FrameAction.SKIP
    _frames.set_code_exec_strategy(code, _frames._FrameExecStrategy(nothing, nothing))


class DispatchMode(TorchDispatchMode):
    """See every operation below autograd, past the compiler.

    PyTorch wraps the method of each such mode, so that it is not compiled: as the first operation
    comes it imports the compiler for that, which takes over a second, and each one pays a little.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        skip(cls.__torch_dispatch__.__code__)


def hook_guards() -> Any:
    """Give the setting by which a graph is used without a look for hooks; its default counts."""
    config: Any = torch._dynamo.config
    return config._config["skip_nnmodule_hook_guards"]


def count_graphs() -> int:
    """Count the graphs that were compiled so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def is_compiled(module: torch.nn.Module) -> bool:
    """Tell whether a module is run by way of the compiler."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


class FunctionModes:
    """Change the stack of function modes of this thread: all but its top is private."""

    count = staticmethod(torch._C._len_torch_function_stack)
    push = staticmethod(torch._C._push_on_torch_function_stack)
    _at = staticmethod(torch._C._get_function_stack_at)
    _pop = staticmethod(torch._C._pop_torch_function_stack)

    def has(self, mode: Any) -> bool:
        """Tell whether a mode is entered."""
        return any(self._at(i) is mode for i in range(self.count()))

    def insert(self, mode: Any) -> None:
        """Put a mode below the program's own, which leave in their own order."""
        modes = [self._pop() for _ in range(self.count())][::-1]
        # That of a default device has to be the first; ``with torch.device`` takes the last away.
        default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        first = bool(modes) and modes[0] is default
        for each in [*modes[:first], mode, *modes[first:]]:
            self.push(each)

    def remove(self, mode: Any) -> bool:
        """Take a mode out, wherever it is; tell whether it was there."""
        count = self.count()
        if not count:
            return False
        if count == 1:
            if self._at(0) is not mode:
                return False
            self._pop()
            return True
        if not self.has(mode):
            return False
        modes = [self._pop() for _ in range(count)][::-1]
        for each in modes:
            if each is not mode:
                self.push(each)
        return True


function_modes = FunctionModes()
"""The function modes of this thread."""


def hooks_around(modules: Iterable[torch.nn.Module]) -> Iterator[Any]:
    """Walk the functions that run around modules' calls, and as their weights get gradients."""
    held: list[Any] = []
    for each in (torch.nn.modules.module, *modules):
        held += [x for name, x in vars(each).items() if name.endswith("_hooks")]
        if isinstance(each, torch.nn.Module):
            for p in each._parameters.values():  # `parameters` may be a method of the program's own
                held += [
                    getattr(p, kind, None)
                    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks")
                ]
    for each in held:
        yield from each.values() if isinstance(each, dict) else ()


def is_hooked_before(module: torch.nn.Module) -> bool:
    """Tell whether a function runs before a module's call, as one that makes its weight anew."""
    lazy = isinstance(module, torch.nn.modules.lazy.LazyModuleMixin)  # its first call makes all
    return bool(module._forward_pre_hooks) and not lazy


EVALUATION = "torch._dynamo.eval_frame"
"""The module through which compiled code is called."""


def stand_before_compiled(tell: Callable[[bool, int], None]) -> None:
    """Call a function as compiled code begins and behind it.

    The setting that every call of compiled code makes is the place: it sees functions, modules
    and contexts, and those that were compiled before.

    Args:
        tell: Called with whether it begins, and a number for the call or context that says so:
            code inside that is not compiled ends and begins it, too, with a number of its own.
    """
    module: Any = sys.modules[EVALUATION]
    real = module._maybe_set_eval_frame
    ran: list[bool] = []

    def setting(callback: Any) -> Any:
        begins = callback is not None
        if begins:
            ran[:] = [True]
        elif not ran:  # nothing to end: every function that is never to be compiled comes by here
            return real(callback)
        frame = sys._getframe(1)
        context = frame.f_code.co_name in ("__enter__", "__exit__")
        number = id(frame.f_locals["self"] if context else frame)
        if begins:
            tell(True, number)
        before = real(callback)
        if not begins:
            tell(False, number)
        return before

    module._maybe_set_eval_frame = setting


def hands_over(file: str) -> bool:
    """Tell whether a file is PyTorch's own that shows a call to function modes."""
    return file == torch.overrides.__file__


def is_compiled_function(fn: Any) -> bool:
    """Tell whether ``torch.compile`` made a function."""
    return hasattr(fn, "_torchdynamo_orig_callable")


def have_graphs(codes: Iterable[CodeType]) -> bool:
    """Tell whether graphs of some code are there; True where this PyTorch cannot tell."""
    entries = getattr(_frames, "_debug_get_cache_entry_list", None)
    return entries is None or any(entries(code) for code in codes)


def entry_codes() -> set[CodeType]:
    """Give the codes each of which stands for everything that is compiled by way of it."""
    from torch._dynamo.external_utils import wrap_inline

    return {call_code, wrap_inline(have_graphs).__code__}


# Loss scalers.
scale_of: Callable[[Any], torch.Tensor | None] = attrgetter("_scale")
"""Give the scale on its device, None before the first loss: the public way reads it."""
work_of: Callable[[Any], dict[int, dict[str, Any]]] = attrgetter("_per_optimizer_states")
"""Give what a scaler did since its update, by optimizer; an update makes a new one."""


def set_scale(scaler: Any, scale: torch.Tensor | None) -> None:
    """Set the scale, where a second run needs that of the first."""
    scaler._scale = scale


# What a scaler calls before the first loss that it scales.
FIRST_SCALE = "_lazy_init_scale_growth_tracker"


# Processes.


def default_store() -> Any:
    """Give the store through which the processes found each other."""
    return torch.distributed.distributed_c10d._get_default_store()


def process_groups() -> list[Any]:
    """List the program's process groups."""
    return list(torch.distributed.distributed_c10d._world.pg_map)


def backends(group: Any) -> list[Any]:
    """List the backends of a process group."""
    found = []
    for kind in ("cpu", "cuda"):
        try:
            found.append(group._get_backend(torch.device(kind)))
        except RuntimeError:
            continue
    return found


def timeout(backend: Any) -> Any:
    """Give the longest wait of a backend, None where it does not say."""
    return getattr(getattr(backend, "options", None), "_timeout", None)


def set_timeout(backend: Any, limit: Any) -> None:
    """Set the longest wait of a gloo backend."""
    backend._set_default_timeout(limit)


def moved(inputs: Any, kwargs: Any, device: torch.device) -> tuple[Any, Any]:
    """Move a call's arguments as a data-parallel wrapper does."""
    from torch.distributed.utils import _to_kwargs

    args, named = _to_kwargs(inputs, kwargs, device, False)
    return args[0], named[0]
