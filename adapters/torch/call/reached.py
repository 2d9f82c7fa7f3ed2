"""What the code of a step reaches beside its model: kept when a call begins, given to a replay."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from anynan._reach import Holder, Kept, Kinds, Reach, fixed, is_own, weak
from anynan._steps.tracked import Handle
from anynan.torch.call.discovery import GENERATORS, OPEN
from anynan.torch.call.models import Models
from anynan.torch.private import (
    LoaderIterator,
    buffers_of,
    hooks_around,
    is_compiled_function,
    is_hooked_before,
    version,
)
from anynan.torch.read.hooks import Hook
from anynan.torch.read.probes import nonfinite

# Elements of a tensor that is copied when a step begins, bytes of an array, and how many of them.
SMALL = 1024
BYTES = 2**16
MANY = 200


def _inner(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a loader holds of the program's."""
    if issubclass(type(value), DataLoader):
        for name in ("dataset", "generator", "sampler"):
            yield name, getattr(value, name, None)
        yield "sampler.generator", getattr(value.sampler, "generator", None)


KINDS = Kinds(
    arrays=(np.ndarray, torch.Tensor),
    generators=GENERATORS,
    iterators=(LoaderIterator,),
    modules=(torch.nn.Module,),
    passed=lambda value: issubclass(type(value), (*OPEN, Handle)),
    inner=_inner,
)


class Began:
    """Hold what a call began with, beside its arguments.

    Tensors and arrays are copied where they are small; a larger one that the call overwrites is
    named where it is missed.

    Args:
        reach: What its code reaches.
        kept: Plain state, containers and generators.
        holders: Where tensors and arrays are held.
    """

    __slots__ = ("_arrays", "_kept", "_reach")

    def __init__(self, reach: Reach, kept: Kept, holders: list[Holder]) -> None:
        self._reach, self._kept = reach, kept
        self._arrays = [_array(holder) for holder in holders[:MANY]]

    def put_back(self) -> list[str]:
        """Let the next run find what this call found.

        Returns:
            What it will find otherwise.
        """
        lost = self._reach.put_back(self._kept)
        for holder, x, count, content in self._arrays:
            if content is None:
                if isinstance(x, torch.Tensor) and count != version(x):
                    lost.append(f"{holder.name} (written in place, too large to keep)")
            elif x is None:
                _refill(holder.get(), content)
            else:
                tensor = isinstance(content, torch.Tensor)
                holder.set(_copy(content, x) if tensor else content.copy())
        return lost

    def wrote(self) -> dict[int, bool]:
        """Tell of the tensors held, by id, whether the call wrote what it did not find bad."""
        found = {}
        for holder, x, count, content in self._arrays:
            held = holder.get()
            if isinstance(held, torch.Tensor):
                was_bad = isinstance(content, torch.Tensor) and nonfinite(content)
                found[id(held)] = not was_bad and (held is not x or version(held) != count)
        return found


class Reached(Reach):
    """Keep what a session's calls can reach.

    Args:
        fn: The step's function; None for a model, whose own attributes are looked at alone.
    """

    def __init__(self, fn: Callable[..., Any] | None) -> None:
        super().__init__(fn, KINDS)
        self._buffers: list[Holder] = []
        self._models = -1
        # PyTorch traces a compiled function for what it finds in its cells.
        self._lends = fn is not None and not is_compiled_function(fn)

    def begin(self, models: Models, given: list[tuple[str, Any]]) -> Began:
        """Take what a call begins with.

        Args:
            models: The models it runs.
            given: Its arguments by name.
        """
        if self.is_due() or self._models != len(models.hooked):
            self._models = len(models.hooked)
            found = [
                (name or "model", module)
                for _, model in models.living()
                for name, module in model.named_modules()
            ]
            self.search([weak(name, module) for name, module in found])
            self._buffers = [
                Holder(f"{path}.{name}", partial(_buffers, weakref.ref(module)), name)
                for path, module in found
                if is_own(type(module)) or is_hooked_before(module)
                for name in buffers_of(module)
            ]
        plain = [(name, value) for name, value in given if type(value) is not torch.Tensor]
        return Began(self, self.now(plain), self._buffers + self.arrays)

    def lending(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Have iterators keep what the call takes from them."""
        return super().lending(args, kwargs) if self._lends else nullcontext((args, kwargs))

    def hold(self) -> Callable[[], None]:
        """Note the present state; what is returned puts it back after a replay.

        Until then tensors and arrays are copies: the program's graph may have saved the originals.
        """
        present = self.now()
        swapped, weights = [], []
        for holder in self.arrays:
            x = holder.get()
            copied: Any = None
            if isinstance(x, np.ndarray):
                copied = x.copy()
            elif isinstance(x, torch.Tensor) and not x.requires_grad:
                copied = _copy(x, x)
            elif _is_weight(x):
                weights.append((x, x.detach().clone()))
            if copied is not None and holder.set(copied):
                swapped.append((holder, x))

        def put_back() -> None:
            for holder, x in swapped:
                holder.set(x)
            for x, content in weights:
                _refill(x, content)
            lost = present.put_back()
            if lost:
                raise RuntimeError("; ".join(lost))

        return put_back


def reached_by(*functions: Any) -> Reached:
    """Search now for what functions reach: what runs them again leaves that as it is."""
    reached = Reached(None)
    own = [x for x in functions if not isinstance(x, Hook)]
    reached.search([fixed("", x) for x in own])
    return reached


def reached_by_layers(models: Models) -> Reached:
    """Search now for what the code of layers reaches, and hooks on them, beside what they hold."""
    modules = [module for _, model in models.living() for module in model.modules()]
    code = [module.forward for module in modules if is_own(type(module))]
    return reached_by(*code, *hooks_around(modules))


def _buffers(ref: "weakref.ref[torch.nn.Module]") -> Any:
    module = ref()
    return None if module is None else buffers_of(module)


def _array(holder: Holder) -> tuple[Holder, Any, int, Any]:
    """Take one tensor or array as it is: itself, its version, and a copy if it is small.

    A weight stays itself, whatever it holds: graphs and optimizers know it.
    """
    x = holder.get()
    if _is_weight(x):
        return holder, None, 0, x.detach().clone()
    if isinstance(x, np.ndarray):
        return holder, x, 0, x.copy() if x.nbytes <= BYTES and x.dtype != object else None
    if not isinstance(x, torch.Tensor) or x.requires_grad:
        return holder, None, 0, None
    return holder, x, version(x), x.clone() if _is_small(x) else None


def _copy(x: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Copy a tensor for a second run, which may ask what it is a copy of."""
    copied: Any = x.clone()
    copied.anynan_copy_of = weakref.ref(of)
    return copied  # type: ignore[no-any-return]


def _is_small(x: torch.Tensor) -> bool:
    """Tell whether a copy of a tensor costs little."""
    small = x.numel() <= SMALL and x.device.type == "cpu"
    return small and type(x) is torch.Tensor and x.layout is torch.strided


def _is_weight(x: Any) -> bool:
    """Tell whether it is a small weight in no module, which a step may update by hand."""
    try:
        return isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf and _is_small(x)
    except RuntimeError:  # a view that a write has spoiled says nothing of its graph
        return False


def _refill(x: Any, content: torch.Tensor) -> None:
    """Have a weight hold this; what a graph has saved of it is none the wiser."""
    if _is_weight(x) and x.shape == content.shape:
        x.data.copy_(content)
