"""Slots with a fixed place, for code that cannot choose one while it runs: compiled graphs.

Under ``torch.compile`` a hook is traced once and only its tensor operations stay, so each layer
has four scalars of its own: the ends of its outputs and of their gradients. They are widened by
``minimum`` and ``maximum``, which carry NaN and fuse with what computes the output; an opaque
custom operation would not fuse, and a Python counter or a name read in the hook would recompile.
"""

import math
from collections.abc import Iterable

import torch

from anynan.torch.probes import NATIVE

# Inductor takes inputs to be aligned to 16 bytes, and copies those that are not: each scalar
# has that much room.
_ROOM = 4
_LARGEST = torch.finfo(torch.float32).max
_EMPTY = (math.inf, -math.inf, math.inf, -math.inf)


class Ends:
    """Widen two scalars to the ends of every tensor shown; also a traced gradient hook."""

    __slots__ = ("high", "low")

    def __init__(self, low: torch.Tensor, high: torch.Tensor) -> None:
        self.low, self.high = low, high

    def __call__(self, x: torch.Tensor) -> None:
        """Take one tensor in. Traced: tensor operations only, nothing is read."""
        if x.dtype not in NATIVE:
            return
        x = x.detach()
        low, high = x.amin(), x.amax()
        if x.dtype is torch.float64:
            # The scalars are float32: what is finite stays finite in them.
            low = torch.where(low.isinf(), low, low.clamp(-_LARGEST, _LARGEST))
            high = torch.where(high.isinf(), high, high.clamp(-_LARGEST, _LARGEST))
        self.low.copy_(torch.minimum(self.low, low))
        self.high.copy_(torch.maximum(self.high, high))


class Fixed:
    """Hold one layer's fixed slots, and what a traced call of it leaves in Python.

    Attributes:
        path: The layer's path.
        forward: Ends of its outputs.
        backward: Ends of their gradients.
        ran: Dtype of its first output, set anew by each traced call.
        dtype: The dtype it last had.
    """

    __slots__ = ("backward", "dtype", "forward", "path", "ran")

    def __init__(self, path: str, forward: Ends, backward: Ends) -> None:
        self.path, self.forward, self.backward = path, forward, backward
        self.ran: torch.dtype | None = None
        self.dtype: torch.dtype | None = None


class FixedSlots:
    """Hold the fixed slots of the layers that live on one device."""

    def __init__(self, paths: Iterable[str], device: torch.device) -> None:
        self.paths = list(paths)
        with torch.inference_mode(False), torch.no_grad():
            self.empty = torch.tensor(_EMPTY, device=device).reshape(1, 4, 1)
            self.memory = self.empty.expand(len(self.paths), 4, _ROOM).contiguous()
            scalars = [_alone(x) for x in self.memory[:, :, 0].reshape(-1).unbind()]
