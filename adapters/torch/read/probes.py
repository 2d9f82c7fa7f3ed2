"""Reduce a tensor to its smallest and largest value, where it lives."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.autograd.forward_ad as _dual
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from anynan._arrays.access import blocks
from anynan._arrays.measures import describe
from anynan._arrays.tally import Tally
from anynan._base.summary import Summary
from anynan.torch.private import (
    StorageWeakRef,
    is_batch,
    is_transformed,
    level,
    raw_values,
    set_grad_enabled,
    within,
)

NATIVE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_NUMPY = NATIVE - {torch.bfloat16}
COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
FLOAT8 = frozenset(
    getattr(torch, name)
    for name in dir(torch)
    if name.startswith("float8_") and isinstance(getattr(torch, name), torch.dtype)
)
DTYPE_NAME = {dtype: str(dtype).removeprefix("torch.") for dtype in NATIVE | COMPLEX | FLOAT8}
DTYPE_MAX = {dtype: float(torch.finfo(dtype).max) for dtype in DTYPE_NAME}
_CHUNK = 1 << 18
_SINGLE = NATIVE - {torch.float64}
_BLOCK = 1 << 20
_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_aminmax = torch.aminmax
_grad_enabled = torch.is_grad_enabled
_strided = torch.strided


def plain(x: Any) -> torch.Tensor | None:
    """Return the values to look at as a dense, real, native float tensor without history.

    Returns:
        None for what is never bad (integers, booleans, empty, meta) and for what cannot be
        looked at here (inside a function transform, fake tensors).
    """
    if level() is not None:
        return None
    if type(x) is not torch.Tensor and type(x) is not torch.nn.Parameter:
        if isinstance(x, UninitializedParameter | UninitializedBuffer):  # no call made it yet
            return None
        x = _unwrap(x)
        if x is None:
            return None
    elif is_batch(x):
        return None
    elif x.is_nested:
        x = x.values()
    if x.dtype not in NATIVE:
        if x.dtype in COMPLEX:
            x = x.detach()
            x = torch.view_as_real(x.conj() if x.is_conj() else x)
        elif x.dtype not in FLOAT8:
            return None
    if x.layout is not torch.strided:
        x = _values(x)
        if x is None:
            return None
    if x.is_meta or x.numel() == 0:
        return None
    if not x.is_contiguous():
        x = _in_order(x)
    # A dual tensor's values are what forward-mode differentiation works on.
    return x.detach() if x.requires_grad or _dual._current_level >= 0 else x  # type: ignore[no-any-return]


def readable(x: Any) -> torch.Tensor | None:
    """Return ``plain`` values, None also where a tensor's class does not let them be reduced."""
    try:
        values = plain(x)
        if values is not None and type(values) is not _Tensor and type(values) is not _Parameter:
            ends(values)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return values


def local(x: torch.Tensor) -> torch.Tensor:
    """Return what holds the values: a DTensor's shard of this rank, what a transform wraps."""
    while isinstance(x, torch.Tensor) and is_transformed(x):
        x = within(x)
    if type(x) is torch.Tensor or not hasattr(x, "to_local"):
        return x
    return x.detach().to_local()  # type: ignore[attr-defined, no-any-return]


def same_memory(x: torch.Tensor) -> Callable[[Any], bool] | None:
    """Give what tells whether another tensor is of the same storage; None where it has none."""
    key = _storage(x)

    def is_of(other: Any) -> bool:
        mine = _storage(other)
        return mine is not None and mine == key

    return None if key is None else is_of


def _storage(x: Any) -> StorageWeakRef | None:
    try:
        return StorageWeakRef(local(x).untyped_storage())
    except (AttributeError, NotImplementedError, RuntimeError):
        return None


def _unwrap(x: Any) -> torch.Tensor | None:
    if not isinstance(x, torch.Tensor):
        return None
    if is_transformed(x):
        return None
    local = getattr(x, "to_local", None)
    if local is not None:  # a DTensor: its own shard is what this process may look at
        inner = local()
        return inner if isinstance(inner, torch.Tensor) else None
    if x.is_nested:  # what a narrowed one leaves out is not its own
        return x.values() if x.is_contiguous() else x.contiguous().values()
    # Of a masked tensor what is masked may hold anything, and it warns of each reduction.
    return None if hasattr(x, "fake_mode") or hasattr(x, "get_mask") else x


def _values(x: torch.Tensor) -> torch.Tensor | None:
    if x.layout is torch.sparse_coo:
        return raw_values(x) if not x.is_coalesced() else x.values()
    if x.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return x.values()
    return None


def _in_order(x: torch.Tensor) -> torch.Tensor:
    """View the same values in the order they lie in memory: reductions copy other views."""
    x = x.detach()
    strides = x.stride()
    if 0 in strides:  # an expanded dimension repeats its values
        x = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
    return x.permute(sorted(range(x.dim()), key=x.stride, reverse=True))


def ends_into(x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Write smallest and largest value into two scalars, of a tensor of the usual kind.

    Args:
        x: Any tensor of a native float dtype.
        pair: Two scalars of its dtype, on its device.

    Returns:
        False, and nothing is done, for what ``plain`` has to look at first.
    """
    if (
        type(x) is not _Tensor
        or x.layout is not _strided
        or level() is not None
        or _dual._current_level >= 0
        or not x.is_contiguous()
        or x.is_meta
    ):
        return False
    size = x.numel()
    if not size:
        return False
    # Out of the graph; a detached view would cost as much as the reduction.
    hidden = x.requires_grad and _grad_enabled()
    try:
        if hidden:  # inside: Ctrl-C may come as it returns
            set_grad_enabled(False)
        _aminmax(x, out=pair)
    except RuntimeError:  # nested, or one for many: asking each time would cost more
        return False
    finally:
        if hidden:
            set_grad_enabled(True)
    return True


def ends(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return smallest and largest value of a ``plain`` tensor, on its device, NaN carried."""
    if x.dtype in NATIVE:
        if x.is_contiguous():
            low, high = torch.aminmax(x)
            return low, high
        # aminmax would copy what is not contiguous; these two do not.
        return x.amin(), x.amax()
    # No reduction exists for float8: widen it a piece at a time.
    flat = x.reshape(-1)
    pieces = [
        torch.stack(torch.aminmax(flat[at : at + _CHUNK].to(torch.float32)))
        for at in range(0, flat.numel(), _CHUNK)
    ]
    both = torch.stack(pieces)
    return both[:, 0].amin(), both[:, 1].amax()


def read_ends(x: torch.Tensor) -> tuple[float, float]:
    """Return smallest and largest value of a ``plain`` tensor on the host."""
    low, high = ends(x)
    if x.device.type == "cpu":
        return low.item(), high.item()
    ((lo, hi),) = bring([torch.stack((low, high))])
    return lo, hi


def all_ends(values: list[torch.Tensor]) -> list[tuple[float, float]]:
    """Return both ends of each of many ``plain`` tensors on the host, in one read a device."""
    with torch.no_grad():
        return [(lo, hi) for lo, hi in bring([torch.stack(ends(x)) for x in values])]


def on_host(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """Bring a tensor's numbers to NumPy; what that has no dtype for in float32 or complex64."""
    x = x.detach() if x.layout is torch.strided else x.detach().to_dense()
    if x.is_floating_point() and x.dtype not in _NUMPY:
        x = x.float()
    elif x.dtype is torch.complex32:
        x = x.to(torch.complex64)
    found: np.ndarray[Any, Any] = x.cpu().resolve_conj().resolve_neg().numpy()
    return found


def _on_host(x: torch.Tensor) -> torch.Tensor:
    """Copy a small tensor to the host, waiting for its own stream only."""
    if not x.is_cuda:
        return x.to("cpu", copy=True)
    staged = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    staged.copy_(x, non_blocking=True)
    torch.cuda.current_stream(x.device).synchronize()
    return staged


def bring(tensors: list[torch.Tensor]) -> list[list[float]]:
    """Copy small tensors to the host, those of a device in one copy."""
    by_device: dict[torch.device, list[int]] = {}
    for i, x in enumerate(tensors):
        by_device.setdefault(x.device, []).append(i)
    found: list[list[float]] = [[]] * len(tensors)
    with torch.no_grad():
        for which in by_device.values():
            wide = any(tensors[i].dtype == torch.float64 for i in which)
            dtype = torch.float64 if wide else torch.float32
            flat = torch.cat([tensors[i].reshape(-1).to(dtype) for i in which])
            values = _on_host(flat).tolist()
            at = 0
            for i in which:
                found[i] = values[at : at + tensors[i].numel()]
                at += tensors[i].numel()
    return found


def nonfinite(x: Any) -> bool:
    """Tell whether a tensor holds a NaN or an Inf (one host read)."""
    values = plain(x)
    if values is None:
        return False
    low, high = read_ends(values)
    return not (-math.inf < low and high < math.inf)


def measure(x: Any) -> Summary:
    """Summarise a tensor block by block, where it lies if its device can."""
    if plain(x) is None and (x.is_meta or _unwrap(x) is None or x.layout is not torch.strided):
        name = str(x.dtype).removeprefix("torch.")
        return Summary(tuple(x.shape), name, str(x.device), int(x.numel()))
    local = _unwrap(x)
    inner = x if local is None else local
    values = inner if inner.layout is torch.strided else _values(inner)
    values = (inner if values is None else values).detach()
    if values.device.type != "cpu" and values.dtype in _SINGLE and values.numel():
        with suppress(RuntimeError, TypeError):  # a device without float64, or with no room
            return _measure_there(values)
    return describe(values)


def _measure_there(x: torch.Tensor) -> Summary:
    """Summarise a tensor on its device, block by block, and bring the numbers in one read."""
    limits, found = torch.finfo(x.dtype), []
    for block in blocks(x, _BLOCK):
        bad = ~block.isfinite()
        wide = block.double().masked_fill_(bad, 0)  # no square of them leaves float64
        size = wide.abs()
        numbers = (
            block.isnan().sum(), (block == math.inf).sum(), (block == -math.inf).sum(),
            (block == 0).sum(), ((size > 0) & (size < limits.tiny)).sum(),
            block.masked_fill(bad, math.inf).amin(), block.masked_fill(bad, -math.inf).amax(),
            wide.sum(), wide.square().sum(), bad.reshape(-1).byte().argmax(),
        )  # fmt: skip
        found.append(torch.stack([number.double() for number in numbers]))
    tally, first, start = Tally(), None, 0
    tally.top = np.log2(np.longdouble(limits.max))
    for block, row in zip(blocks(x, _BLOCK), bring(found), strict=True):
        part = Tally()
        *counts, part.lo, part.hi, total, squares, at = row
        part.nan, part.posinf, part.neginf, part.zero, part.subnormal = map(int, counts)
        part.finite = block.numel() - part.bad
        part.absmax = max(-part.lo, part.hi) if part.finite else 0.0
        part.sums = [(0, total, squares)]
        tally.merge(part)
        if first is None and part.bad:
            first = tuple(int(i) for i in np.unravel_index(start + int(at), x.shape))
        start += block.numel()
    return tally.summary(tuple(x.shape), DTYPE_NAME[x.dtype], str(x.device), first)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in NATIVE else x.to(torch.float32)


def _norm(x: torch.Tensor) -> Any:
    dtype = torch.float32 if x.dtype != torch.float64 else None
    return torch.linalg.vector_norm(_wide(x), dtype=dtype)


EXTRA: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda x: _wide(x).mean(dtype=torch.float32 if x.dtype != torch.float64 else None),
    "norm": _norm,
    "rms": lambda x: _norm(x) / math.sqrt(x.numel()),
}


def measure_bad(x: torch.Tensor) -> Summary:
    """Summarise a bad result, and point at its first NaN where it holds an Inf before that."""
    summary = measure(x)
    values = plain(x)
    mixed = summary.nan and summary.posinf + summary.neginf
    if not mixed or values is None or values.shape != x.shape:
        return summary
    at = int(values.isnan().reshape(-1).to(torch.uint8).argmax())
    first = np.unravel_index(at, values.shape)
    return replace(summary, first_bad=tuple(int(i) for i in first))


class Reader:
    """Read tensors natively: for ``anynan.check`` and ``summarize``, and for records."""

    measure = staticmethod(measure_bad)
    on_host = staticmethod(on_host)

    def owns(self, x: Any) -> bool:
        """Tell whether this is a tensor."""
        return isinstance(x, torch.Tensor)

    def probe(self, x: Any) -> tuple[float, float] | None:
        """Give both ends of a tensor, None if it holds nothing that could be bad."""
        values = plain(_unwrap(x) if x.is_nested else x)
        return None if values is None else read_ends(values)

    def summarize(self, x: Any) -> Summary:
        """Summarise a tensor, of a sparse one the stored elements."""
        return measure(x) if x.layout is _strided and not x.is_nested else describe(x)

    def is_finite(self, x: torch.Tensor, /) -> bool:
        """Tell whether a tensor holds neither NaN nor Inf."""
        span = self.span(x)
        return span is None or (math.isfinite(span[0]) and math.isfinite(span[1]))

    def span(self, x: torch.Tensor, /) -> tuple[float, float] | None:
        """Give the smallest and the largest value; None where there is none."""
        if x._is_zerotensor():  # a derivative that is 0 everywhere: it has no memory
            return None
        values = readable(x)
        return None if values is None else read_ends(values)


READER = Reader()
