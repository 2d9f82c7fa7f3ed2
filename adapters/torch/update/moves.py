"""How far an update moves the weights, from a sample of each, in one step of so many."""

import math
import weakref
from typing import Any

import torch

from anynan._readings.readings import Rows
from anynan.torch.read.probes import plain
from anynan.torch.weights.optimizers import Held

# Elements of a weight that are kept, evenly spread; of a larger one a norm is what these suggest.
_SAMPLE = 1 << 16


class Moves:
    """Keep samples of the weights over one update.

    Args:
        every: One step in so many is looked at; None for none.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._kept: weakref.WeakKeyDictionary[Any, list[_Kept]] = weakref.WeakKeyDictionary()

    def before(self, optimizer: torch.optim.Optimizer, held: Held, rows: Rows) -> None:
        """Keep the weights as they are, if it is this step's turn."""
        if self._every is None or rows.step % self._every or optimizer in self._kept:
            return
        kept = []
        for site, p in zip(held.sites, held.parameters, strict=True):
            values = None if p.grad is None else _sample(p)
            if values is not None:
                kept.append((site.layer or "", weakref.ref(p), values.clone()))
        self._kept[optimizer] = kept

    def after(self, optimizer: torch.optim.Optimizer, rows: Rows | None) -> None:
        """Write how far they have moved into the step's rows."""
        kept = self._kept.pop(optimizer, None)
        if not kept or rows is None:
            return
        layers, norms = [], []
        with torch.no_grad():
            for layer, ref, old in kept:
                p = ref()
                new = None if p is None else _sample(p)
                if p is None or new is None or new.shape != old.shape:
                    continue
                wide = torch.float64 if old.dtype is torch.float64 else torch.float32
                start = old.to(wide)
                pair = torch.stack([(new.to(wide) - start).norm(), start.norm()]).double()
                norms.append(pair * math.sqrt(p.numel() / max(old.numel(), 1)))
                layers.append(layer)
            if norms:
                device = norms[0].device
                told = torch.stack([pair.to(device) for pair in norms]).tolist()
                for layer, (update, size) in zip(layers, told, strict=True):
                    rows.moved(layer, update, size)


_Kept = tuple[str, "weakref.ref[torch.Tensor]", torch.Tensor]


def _sample(p: torch.Tensor) -> torch.Tensor | None:
    values = plain(p)
    if values is None or not values.is_contiguous():
        return None
    flat, stride = values.detach().view(-1), -(-values.numel() // _SAMPLE)
    # Along a row and across them: columns differ.
    while stride > 1 and math.gcd(stride, values.shape[-1]) > 1:
        stride += 1
    return flat[::stride]
