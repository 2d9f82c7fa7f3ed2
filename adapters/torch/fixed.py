"""Slots with a fixed place, for code that cannot choose one while it runs: compiled graphs.

Under ``torch.compile`` a hook is traced once and only its tensor operations stay, so each layer
has four scalars of its own: the ends of its outputs and of their gradients. They are widened by
``minimum`` and ``maximum``, which carry NaN and fuse with what computes the output; an opaque
custom operation would not fuse, and a counter or a name read in the hook would recompile.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch

# Inductor takes its inputs to be aligned to 16 bytes, and copies those that are not.
_ROOM = 4
_depth = torch._C._functorch.get_dynamic_layer_stack_depth
_LARGEST = torch.finfo(torch.float32).max
_EMPTY = (math.inf, -math.inf, math.inf, -math.inf)


class Ends:
    """Widen two scalars to the ends of each tensor shown; a gradient hook by itself."""

    __slots__ = ("high", "low")

    def __init__(self, low: torch.Tensor, high: torch.Tensor) -> None:
        self.low, self.high = low, high

    def __call__(self, x: torch.Tensor) -> None:
        """Take a tensor in; this is traced, so that only its operations are left."""
        x = x.detach()
        if x.is_complex():
            x = torch.view_as_real(x)
        low, high = x.amin(), x.amax()
        if x.dtype is torch.float64:
            # The scalars are float32: what is finite must stay finite in them.
            low = torch.where(low.isinf(), low, low.clamp(-_LARGEST, _LARGEST))
            high = torch.where(high.isinf(), high, high.clamp(-_LARGEST, _LARGEST))
        self.low.copy_(torch.minimum(self.low, low))
        self.high.copy_(torch.maximum(self.high, high))


class Layer:
    """Hold one layer's fixed slots, and the marks that a traced call leaves in Python.

    Attributes:
        board: The board it is on.
        forward: Ends of its outputs.
        backward: Ends of their gradients.
        ran: Dtype of an output, set anew by each traced call and never read in one.
        dtype: The dtype last seen.
    """

    __slots__ = ("backward", "board", "dtype", "forward", "ran")

    def __init__(self, board: "Board", forward: Ends, backward: Ends) -> None:
        self.board, self.forward, self.backward = board, forward, backward
        self.ran: torch.dtype | None = None
        self.dtype: torch.dtype | None = None

    def trace(self, output: Any, backward: bool) -> None:
        """Take in a layer's outputs, in code that is being compiled."""
        if _depth():  # a transform's values are those of no single call
            self.board.transformed = True
            return
        for x in _leaves(output):
            if not (x.is_floating_point() or x.is_complex()) or x.numel() == 0:
                continue
            if x.element_size() == 1 or x.device != self.forward.low.device:
                self.board.unseen = True
                continue
            self.ran = x.dtype
            self.board.active = True
            self.forward(x)
            if backward and x.requires_grad:
                x.register_hook(self.backward)


class Board:
    """Hold the fixed slots of one model's layers on one device.

    Attributes:
        paths: The layers, in the order in which calls of them end.
        layers: Their slots.
        rank: Position of a layer in that order.
        active: True once compiled code wrote here.
        unseen: True if compiled code could not.
        transformed: True if it ran inside a function transform.
        plans: What its owner knows of each set of layers that ran.
    """

    def __init__(self, paths: list[str], device: torch.device) -> None:
        self.paths = _ending(paths)
        self.rank = {path: i for i, path in enumerate(self.paths)}
        self.device = device
        self.active = self.unseen = self.transformed = False
        self.plans: dict[bytes, Any] = {}
        with torch.inference_mode(False), torch.no_grad():
            self._empty = torch.tensor(_EMPTY, device=device).reshape(1, 4, 1)
            self._memory = self._empty.expand(len(paths), 4, _ROOM).contiguous()
            self._host = self._memory.numpy()[:, :, 0] if device.type == "cpu" else None
            # Apart to the compiler, which would tie views of one tensor together; one to us.
            scalars = [_apart(x) for x in self._memory[:, :, 0].reshape(-1).unbind()]
        self.layers = [
            Layer(self, Ends(*scalars[4 * i : 4 * i + 2]), Ends(*scalars[4 * i + 2 : 4 * i + 4]))
            for i in range(len(paths))
        ]

    def take(self) -> torch.Tensor:
        """Return what was written since the last time, shape (layers, 4), and start anew."""
        if self._host is not None:
            values = self._host.copy()
            self._host[:] = _EMPTY
            return torch.from_numpy(values)
        with torch.no_grad():
            values_there = self._memory[:, :, 0].clone()
            self._memory.copy_(self._empty.expand_as(self._memory))
        return values_there

    def calls(self, counts: dict[str, int]) -> bool:
        """Count the layers that ran since the last time; they may have run more than once.

        Args:
            counts: Calls in this step by path, counted on.

        Returns:
            True if one of them had run in this step before.
        """
        again = False
        for path, layer in zip(self.paths, self.layers, strict=True):
            if layer.ran is not None:
                if layer.ran is not layer.dtype:
                    self.plans.clear()
                layer.dtype, layer.ran = layer.ran, None
                count = counts[path] = counts.get(path, 0) + 1
                again = again or count > 1
        return again


def _apart(x: torch.Tensor) -> torch.Tensor:
    """Return a scalar over the same memory that torch takes for a tensor of its own."""
    alone: torch.Tensor = torch.from_dlpack(x)  # type: ignore[attr-defined]
    return alone


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    """Walk the tensors of an output; written so that it can be traced."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif hasattr(value, "__dataclass_fields__"):
        for item in vars(value).values():
            yield from _leaves(item)


def _ending(paths: list[str]) -> list[str]:
    """Order layers as their calls end: what is inside before what is around it."""
    ordered: list[str] = []
    around: list[str] = []
    for path in paths:
        while around and around[-1] and not path.startswith(around[-1] + "."):
            ordered.append(around.pop())
        around.append(path)
    return ordered + around[::-1]
