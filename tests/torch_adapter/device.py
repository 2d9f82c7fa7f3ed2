"""A device that is not the CPU, on every machine: PyTorch lets one be written in Python.

Its tensors lie in the host's memory, and the CPU's kernels compute them. Whatever would make the
host wait for an accelerator is counted: a copy to the host, a number that is asked for, a shape
that depends on values. A tensor of the CPU is refused beside one of the device, as CUDA does.

PyTorch starts the threads of its backward passes with the first of them, and has one name for
such a device for as long as the process lives: `begin` comes before anything else, in a process
of its own.
"""

import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "slate"
_HOST = torch.device("cpu")
_KEPT: list[torch.library.Library] = []
_DEPENDS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# What takes indices or steps from the host beside values of the device.
_MIXED = {"index", "index_put_", "_index_put_impl_", "_copy_from", "set_"}
_set = torch.ops.aten.set_.source_Storage_storage_offset
_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_SKIPPED = (os.path.dirname(torch.__file__) + os.sep, __file__)


@dataclass(frozen=True, slots=True)
class Read:
    """Tell of one wait of the host for the device: how many numbers came, and who asked."""

    operation: str
    size: int
    where: str


reads: list[Read] = []


@contextmanager
def counted() -> Iterator[list[Read]]:
    """Collect the reads by the host that are made inside."""
    before, seen = len(reads), list[Read]()
    try:
        yield seen
    finally:
        seen += reads[before:]


def _read(op: Any, size: int) -> None:
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    where = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
    reads.append(Read(op.__name__, size, where))


# From the device's tensors to the host's that lie in the same memory, and back.


def _storage(memory: Any, device: torch.device) -> Any:
    """Make a storage over the memory of another one, which it does not keep alive."""
    make = torch._C._construct_storage_from_data_pointer
    return make(memory.data_ptr(), device, memory.nbytes())


def _inner(x: torch.Tensor) -> torch.Tensor:
    inner = torch.empty(0, dtype=x.dtype, device=_HOST)
    outer: Any = x.untyped_storage()
    memory = outer.held if hasattr(outer, "held") else _storage(outer, _HOST)
    return _set(inner, memory, x.storage_offset(), x.shape, x.stride())


def _lay(x: torch.Tensor, inner: torch.Tensor, storage: Any = None) -> torch.Tensor:
    """Have a tensor of the device show what one of the host's holds."""
    if storage is None:
        held = inner.untyped_storage()
        storage = _storage(held, torch.device(NAME, 0))
        storage.held = held  # for as long as PyTorch has the device's
    place = inner.storage_offset(), inner.shape, inner.stride()
    return _set.redispatch(_CPU_KEYS, x, storage, *place)


def _outer(inner: torch.Tensor, storages: dict[int, Any]) -> torch.Tensor:
    x = torch._C._acc.create_empty_tensor((0,), inner.dtype)
    return _lay(x, inner, storages.get(inner.untyped_storage()._cdata))


def _is_ours(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == NAME


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on the memory of its tensors."""
    with torch._C.DisableTorchFunction():
        flat, spec = tree_flatten((args, kwargs))
        name = op.overloadpacket.__name__
        ours = [x for x in flat if _is_ours(x)]
        if ours and name not in _MIXED:
            for x in flat:
                if isinstance(x, torch.Tensor) and not _is_ours(x) and x.dim():
                    raise RuntimeError("not all tensors are on the same device")
        inner = {id(x): _inner(x) for x in ours}
        storages = {inner[id(x)].untyped_storage()._cdata: x.untyped_storage() for x in ours}
        at_host = [_HOST if isinstance(x, torch.device) else inner.get(id(x), x) for x in flat]
        given, named = tree_unflatten(at_host, spec)
        # PyTorch hands a number that stands for a tensor to Python as a number.
        given = tuple(
            torch.scalar_tensor(x, dtype=torch.bool)
            if type(x) is bool and str(argument.type) == "Tensor"
            else x
            for x, argument in zip(given, op._schema.arguments, strict=False)
        )
        out = _with_own_numbers(op, given, named)
        for x in ours:  # an operation may give its `out=` another size
            made = inner[id(x)]
            if made.shape != x.shape or made.untyped_storage()._cdata not in storages:
                _lay(x, made)
        if _DEPENDS.intersection(op.tags):
            _read(op, _count(out))
        back = {id(made): x for x in ours if (made := inner[id(x)]) is not None}
        results, shape = tree_flatten(out)
        return tree_unflatten(
            [
                back.get(id(x)) if id(x) in back else _outer(x, storages)
                if isinstance(x, torch.Tensor) else x
                for x in results
            ],
            shape,
        )  # fmt: skip


def _count(out: Any) -> int:
    return sum(x.numel() if isinstance(x, torch.Tensor) else 1 for x in tree_flatten(out)[0])


def _with_own_numbers(op: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation; what it draws comes from the device's own generator."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return op(*args, **kwargs)
    before = torch.get_rng_state()
    torch.set_rng_state(BACKEND.state)
    try:
        return op(*args, **kwargs)
    finally:
        BACKEND.state = torch.get_rng_state()
        torch.set_rng_state(before)


def _copy_from(x: torch.Tensor, to: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        if not _is_ours(to):
            _read(torch.ops.aten._copy_from.default, x.numel())
        source = _inner(x) if _is_ours(x) else x
        (_inner(to) if _is_ours(to) else to).copy_(source)
        return to


def _set_storage(x: torch.Tensor, storage: Any) -> torch.Tensor:
    size = storage.nbytes() // x.element_size()
    return _set.redispatch(_CPU_KEYS, x, storage, 0, (size,), (1,))


def _clone(storage: Any) -> Any:
    """Copy a storage: PyTorch would ask C++ for the device's allocator, and there is none."""
    if storage.device.type != NAME:
        return _real_clone(storage)
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device=NAME).untyped_storage()
    return copy.copy_(storage)


_real_clone = torch.UntypedStorage.clone
# What PyTorch has no way to compute on a device that it does not know.
_ALSO = {
    "_copy_from": _copy_from,
    "set_.source_Storage": _set_storage,
    "set_.source_Storage_storage_offset": functools.partial(_set.redispatch, _CPU_KEYS),
}


def _keep(state: torch.Tensor, device: Any = 0) -> None:
    BACKEND.state = state.clone()


# The module `torch.slate`.
BACKEND = SimpleNamespace(
    state=torch.Generator().manual_seed(0).get_state(),
    is_initialized=lambda: True,
    is_available=lambda: True,
    current_device=lambda: 0,
    device_count=lambda: 1,
    _is_in_bad_fork=lambda: False,
    manual_seed_all=lambda seed: _keep(torch.Generator().manual_seed(seed).get_state()),
    get_rng_state=lambda device=0: BACKEND.state.clone(),
    set_rng_state=_keep,
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
)


# An exception that ends a backward pass: C++ asks the guard for its type with the exception set in
# the thread, and would end the process, so it is taken there and raised where the pass began.

_pending = ctypes.pythonapi.PyErr_Occurred  # ctypes raises what is set as it returns
_taken: list[BaseException] = []


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        try:
            _pending()
        except BaseException as error:
            _taken.append(error)
        return torch._C._autograd.DeviceType.PrivateUse1


class _Engine:
    real = torch.autograd.Variable._execution_engine

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.real.run_backward(*args, **kwargs)
        except SystemError:
            if not _taken:
                raise
        raise _taken.pop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


# Autocast: what is computed in half precision, and what in float32.
_HALF = ("linear", "matmul", "mm", "addmm", "bmm")
_FULL = ("exp", "log", "layer_norm", "cross_entropy_loss", "nll_loss", "sum")


def _cast(op: Any, dtype: torch.dtype | None) -> Any:
    exclude = torch._C._ExcludeDispatchKeyGuard
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(x: Any) -> Any:
        floats = _is_ours(x) and x.dtype in (torch.float16, torch.bfloat16, torch.float32)
        return x.to(dtype or torch.get_autocast_dtype(NAME)) if floats else x

    def run(*args: Any, **kwargs: Any) -> Any:
        with exclude(keys), torch._C.DisableTorchFunction():
            flat, spec = tree_flatten((args, kwargs))
            given, named = tree_unflatten([cast(x) for x in flat], spec)
            return op(*given, **named)

    for function in (cast, run):  # a report names the line that called the library
        function.__code__ = function.__code__.replace(co_filename=torch.__file__)
    return run


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def begin() -> None:
    """Set the device up, once in a process and before anything else."""
    _setup_privateuseone_for_python_backend(NAME, BACKEND, device_guard=_Guard())
    torch.autograd.Variable._execution_engine = _Engine()
    torch.UntypedStorage.clone = _clone
    every = torch.library.Library("_", "IMPL")
    every.fallback(_run, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for name, function in _ALSO.items():
        aten.impl(name, function, "PrivateUse1")
    for names, dtype in ((_HALF, None), (_FULL, torch.float32)):
        for name in names:
            aten.impl(name, _cast(_op(name), dtype), "AutocastPrivateUse1")
    _KEPT.extend([every, aten])
