"""Slots with a fixed place, for code that cannot choose one while it runs: compiled graphs.

Under ``torch.compile`` a hook is traced once and only its tensor operations stay, so each layer
has two pairs of numbers of its own: the ends of its outputs and of their gradients. ``maximum``
widens them, which carries NaN and fuses with what computes the output; an opaque custom
operation would not fuse, and a counter or a name read in the hook would recompile.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from anynan.torch.private import is_transforming

# Inductor takes its inputs to be aligned to 16 bytes, and copies those that are not: a pair has
# the room of four numbers.
_ROOM = 4
_is_dynamo = torch.compiler.is_dynamo_compiling
_SIGNS = np.array([-1, 1], np.float32)
_LARGEST = torch.finfo(torch.float32).max


class Ends:
    """Widen a pair to the ends of each tensor shown; a gradient hook by itself.

    The pair is (-smallest, largest): one ``maximum`` widens both, and each tensor more that a
    graph takes in is one more to guard on.
    """

    __slots__ = ("pair",)

    def __init__(self, pair: torch.Tensor) -> None:
        self.pair = pair

    def __call__(self, x: torch.Tensor) -> None:
        """Take a tensor in; this is traced, so that only its operations are left."""
        x = x.detach()
        if x.is_complex():
            x = torch.view_as_real(x)
        if _is_dynamo():  # made where it is taken in; of a stack inductor makes a buffer and views
            ends = torch.select_scatter(x.amax().expand(2), -x.amin(), 0, 0)
        else:
            ends = torch.stack((-x.amin(), x.amax()))
        if x.dtype is torch.float64:
            # The pair is float32: what is finite must stay finite in it.
            ends = torch.where(ends.isinf(), ends, ends.clamp(-_LARGEST, _LARGEST))
        self.pair.copy_(torch.maximum(self.pair, ends))


def _hook(x: torch.Tensor, pair: torch.Tensor) -> None:
    x.register_hook(Ends(pair))


# ``register_hook`` in code that is being compiled makes Dynamo (2.13) forget attributes that the
# model sets on its own new objects, as transformers' caches: it then gives the graph up. This
# stays one node there, and what it does is traced below, where the backward pass is.
_library = torch.library.Library("anynan", "FRAGMENT")  # lives as long as this module
if not hasattr(torch.ops.anynan, "hook_gradient"):
    _library.define("hook_gradient(Tensor x, Tensor pair) -> ()")
    _library.impl("hook_gradient", _hook, "CompositeImplicitAutograd")
hook_gradient = torch.ops.anynan.hook_gradient.default
torch.fx.has_side_effect(hook_gradient)


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
        if is_transforming():  # a transform's values are those of no single call
            self.board.transformed = True
            return
        for x in _leaves(output):
            if not (x.is_floating_point() or x.is_complex()) or x.numel() == 0:
                continue
            if x.element_size() == 1 or x.device != self.board.device:
                self.board.unseen = True
                continue
            self.ran = x.dtype
            self.board.active = True
            self.forward(x)
            if backward and x.requires_grad:
                hook_gradient(x, self.backward.pair)


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
            self._memory = torch.full((len(paths), 2, _ROOM), -math.inf, device=device)
            self._host = self._memory.numpy() if device.type == "cpu" else None
            self._signs = torch.tensor([-1.0, 1.0], device=device)
            # Apart to the compiler, which would tie views of one tensor together; one to us.
            pairs = [_apart(x) for x in self._memory[:, :, :2].reshape(-1, 2).unbind()]
        self.layers = [
            Layer(self, Ends(forward), Ends(backward))
            for forward, backward in zip(pairs[::2], pairs[1::2], strict=True)
        ]

    def take(self) -> torch.Tensor:
        """Return what was written since the last time, shape (layers, 4), and start anew."""
        if self._host is not None:
            ends = self._host[:, :, :2] * _SIGNS
            self._host.fill(-math.inf)
            return torch.from_numpy(ends.reshape(-1, 4))
        with torch.no_grad():
            values = (self._memory[:, :, :2] * self._signs).reshape(-1, 4)
            self._memory.fill_(-math.inf)
        return values

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
    """Return a tensor over the same memory that torch takes for a tensor of its own."""
    # The tensor itself would ask Python code that knows few kinds of devices.
    alone: torch.Tensor = torch.from_dlpack(torch.utils.dlpack.to_dlpack(x))  # type: ignore[attr-defined]
    return alone


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    """Walk the tensors of an output; written so that it can be traced."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _leaves(getattr(value, name, None))


def _ending(paths: list[str]) -> list[str]:
    """Order layers as their calls end: what is inside before what is around it."""
    ordered: list[str] = []
    around: list[str] = []
    for path in paths:
        while around and around[-1] and not path.startswith(around[-1] + "."):
            ordered.append(around.pop())
        around.append(path)
    return ordered + around[::-1]
