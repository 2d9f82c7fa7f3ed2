"""How far an update moves the weights, from a sample of each, in one step of so many."""

import weakref
from typing import Any

import torch

from anynan._base.identity import ByIdentity
from anynan._readings.moves import due, moved, stride
from anynan._readings.step import Step
from anynan.torch.read.probes import bring, plain
from anynan.torch.weights.optimizers import Held


class Moves:
    """Keep samples of the weights over one update.

    Args:
        every: One step in so many is looked at; None for none.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._kept: ByIdentity[Any, list[_Kept]] = ByIdentity()

    def before(self, optimizer: Any, held: Held, gradients: list[Any], rows: Step) -> None:
        """Keep the weights as they are, if it is this step's turn."""
        if not due(self._every, rows.number) or optimizer in self._kept:
            return
        kept = []
        for site, p, grad in zip(held.sites, held.parameters, gradients, strict=True):
            values = None if grad is None else _sample(p)
            if values is not None:
                kept.append((site.layer or "", weakref.ref(p), values.clone()))
        self._kept[optimizer] = kept

    def after(self, optimizer: Any, rows: Step | None) -> None:
        """Write how far they have moved into the step's rows."""
        if self._every is None:
            return
        kept = self._kept.pop(optimizer, None)
        if not kept or rows is None:
            return
        weights, norms = [], []
        with torch.no_grad():
            for layer, ref, old in kept:
                p = ref()
                new = None if p is None else _sample(p)
                if p is None or new is None or new.shape != old.shape:
                    continue
                wide = torch.float64 if old.dtype is torch.float64 else torch.float32
                start = old.to(wide)
                norms.append(torch.stack([(new.to(wide) - start).norm(), start.norm()]).double())
                weights.append((layer, p.shape))
            if norms:
                moved(rows, weights, bring(norms))


_Kept = tuple[str, "weakref.ref[torch.Tensor]", torch.Tensor]


def _sample(p: torch.Tensor) -> torch.Tensor | None:
    values = plain(p)
    if values is None or not values.is_contiguous():
        return None
    return values.detach().view(-1)[:: stride(values.shape)]
