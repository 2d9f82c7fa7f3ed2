"""Activation checkpointing: what is run again keeps the number of its first call.

Reentrant checkpointing is an ``autograd.Function``: its ``forward`` runs a region without a
graph, its ``backward`` runs it again with one. Both get the same context object, so the calls
noted under it in the first pass number those of the second, in the same order.
"""

import sys
import weakref
from types import FrameType
from typing import Any

import torch

_Context = torch.autograd.function.BackwardCFunction
# Between these and the region around them lies another run of the engine, or a saved tensor
# that non-reentrant checkpointing makes again.
_ENDS = frozenset({"_engine_run_backward", "unpack_hook"})


class _Region:
    """Note one region's calls, and how many of them were run again."""

    __slots__ = ("again", "calls", "root")

    def __init__(self, root: Any) -> None:
        self.root = root
        self.calls: dict[str, list[int]] = {}
        self.again: dict[str, int] = {}


class Regions:
    """Number layer calls, inside and outside checkpointed regions."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: weakref.WeakKeyDictionary[Any, _Region] | None = None

    def clear(self) -> None:
        """Forget the regions of a step."""
        self._held = None

    def number(
        self, calls: dict[str, int], path: str, *, again: bool, root: Any = None
    ) -> tuple[int, Any]:
        """Give the number and the root call of a call without a graph, or for a second time.

        Args:
            calls: How often each layer was called so far; counted on here.
            path: The layer.
            again: Whether a backward pass is running.
            root: The root call that runs.
        """
        around, region = self._around()
        call = calls.get(path, 0)
        if not again:
            calls[path] = call + 1
        else:
            known = None if region is None else region.calls.get(path)
            if region is None or not known:
                call = max(call - 1, 0)
            else:
                done = region.again.get(path, 0)
                region.again[path] = done + 1
                call = known[done % len(known)]
                root = region.root
        for context in around:
            self._note(context, root).calls.setdefault(path, []).append(call)
        return call, root

    def root(self) -> Any:
        """Give the root call that the region which runs again belongs to, None if unknown."""
        region = self._around()[1]
        return None if region is None else region.root

    def _note(self, context: Any, root: Any) -> _Region:
        if self._held is None:
            self._held = weakref.WeakKeyDictionary()
        region = self._held.get(context)
        if region is None:
            region = self._held[context] = _Region(root)
        return region

    def _around(self) -> tuple[list[Any], _Region | None]:
        around, behind = contexts()
        known = None if behind is None or self._held is None else self._held.get(behind)
        return around, known


def contexts() -> tuple[list[Any], Any]:
    """Return the contexts of the regions run for the first time, and of the one run again."""
    around: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        name = code.co_name
        if name in _ENDS:
            break
        if name in ("forward", "backward") and code.co_argcount and code.co_varnames[0] != "self":
            context = frame.f_locals.get(code.co_varnames[0])
            if isinstance(context, _Context):
                if name == "backward":
                    return around, context
                around.append(context)
        frame = frame.f_back
    return around, None


def inside() -> bool:
    """Tell whether a checkpointed region runs here for the first time, without a graph."""
    return not torch.is_grad_enabled() and bool(contexts()[0])
