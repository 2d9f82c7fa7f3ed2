"""How safely each layer would run in a narrower dtype."""

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from anynan._base.escaping import name as printed
from anynan._files.formats import Format, target_of

ONLY = "module outputs only"  # what is computed inside of a layer may need more
_PHASES = ("forward", "backward", "parameter")


@dataclass(frozen=True, slots=True)
class Headroom:
    """Say how much room a layer would have in a dtype.

    Attributes:
        layer: Layer path, empty for the model itself.
        dtype: The dtype asked about.
        over: Bits left before its largest magnitude would overflow; negative if it would. None
            where no magnitude was read, infinite where every number was zero.
        over_phase: Where that was seen: ``forward``, ``backward`` or ``parameter``.
        over_step: In which step.
        under: Bits before all of a tensor would become zero, from the smallest of the steps'
            largest magnitudes; negative if it would.
        under_phase: Where that was seen.
        under_step: In which step.
        whole: Whether every operation of the layer was measured, not its outputs alone.
    """

    layer: str
    dtype: str
    over: float | None = None
    over_phase: str = ""
    over_step: int = 0
    under: float | None = None
    under_phase: str = ""
    under_step: int = 0
    whole: bool = False

    @property
    def bits(self) -> float | None:
        """Give the smaller of both, None where no magnitude was read."""
        return None if self.over is None or self.under is None else min(self.over, self.under)

    def __str__(self) -> str:
        where = printed(self.layer) or "(the model itself)"
        if self.over is None or self.under is None:
            return f"{where}: not known, no magnitude was read"
        if math.isinf(self.over):
            return f"{where}: all zero" if self.whole else f"{where}: all zero; {ONLY}"
        largest = f"{self.over:.1f} bits"
        if self.over <= 0:
            largest = "overflows"
        text = f"{where}: {largest} at the top ({self.over_phase}, step {self.over_step})"
        if self.under <= 0:
            text += f", all zero at the bottom ({self.under_phase}, step {self.under_step})"
        else:
            text += f", {self.under:.1f} at the bottom ({self.under_phase})"
        told = self.whole or self.over <= 0 or self.under <= 0
        return text if told else f"{text}; {ONLY}"


@runtime_checkable
class ByOperation(Protocol):
    """Say what has looked at every operation: it knows more than the readings of a run."""

    def headroom(self, target: Format) -> list[Headroom]:
        """Give a line for each layer, the least safe first."""
        ...


def headroom(run: Any, dtype: Any) -> list[Headroom]:
    """Rank layers by how safely they would run in a narrower dtype, the least safe first.

    It uses the largest magnitudes that were read of outputs, gradients and, with
    ``parameters=True``, weights. What a layer computes inside (a sum of squares, a matrix
    product's accumulation) may need more than that, and a tensor's smaller numbers become zero
    before its largest does. A layer that is tight here will fail in that dtype; one with room
    here may still fail, so its line says "module outputs only". A report of ``anynan.precision``
    covers every operation: give it in place of a tracker.

    Args:
        run: A tracker, a run that was read from a file, or a report of ``anynan.precision``.
        dtype: A framework's dtype, or a name: ``float16``, ``bfloat16``, ``float8`` (which is
            ``float8_e4m3fn``) or ``float8_e5m2``.

    Returns:
        A line for each layer; those of which no magnitude was read come last.

    Raises:
        TypeError: If the run is none of these.
        ValueError: If the dtype is none of these.

    Example:
        >>> import torch, anynan
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Softmax(-1))
        >>> _ = model[0].weight.data.fill_(1e5)
        >>> with anynan.torch.track(model) as tracker:
        ...     _ = model(torch.ones(1, 2))
        >>> [found.layer for found in anynan.reports.headroom(tracker, "float16") if found.bits < 0]
        ['0']
    """
    target = target_of(dtype)
    if isinstance(run, ByOperation):
        return run.headroom(target)
    if not hasattr(run, "history"):
        msg = (
            "headroom() takes a tracker, a run or a report of anynan.precision, not "
            f"{type(run).__name__}: give what track() returned"
        )
        raise TypeError(msg)
    most: dict[str, tuple[float, str, int]] = {}
    least: dict[str, tuple[float, str, int]] = {}
    layers: dict[str, None] = {}
    for entries, largest, smallest in run.history.extremes():
        for order, site in enumerate(entries[0].sites):
            if site.layer is None or site.phase not in _PHASES:
                continue
            layers.setdefault(site.layer)
            if site.bound or largest[0][order] < 0:
                continue
            top, low = (
                (float(sizes[order]), site.phase, entries[at[order]].number)
                for sizes, at in (largest, smallest)
            )
            most[site.layer] = max(most.get(site.layer, top), top, key=_size)
            least[site.layer] = min(least.get(site.layer, low), low, key=_size)
    found = []
    for layer in layers:
        if layer not in most:
            found.append(Headroom(layer, target.name))
            continue
        if not most[layer][0]:
            found.append(Headroom(layer, target.name, math.inf, under=math.inf))
            continue
        (size, top_phase, top_step), (least_, low_phase, low_step) = most[layer], least[layer]
        over = math.log2(target.overflows) - math.log2(size)
        under = math.log2(least_) - math.log2(target.flushes)
        found.append(
            Headroom(layer, target.name, over, top_phase, top_step, under, low_phase, low_step)
        )
    return sorted(found, key=lambda each: (each.bits is None, each.bits or 0.0))


def _size(held: tuple[float, str, int]) -> float:
    return held[0]
