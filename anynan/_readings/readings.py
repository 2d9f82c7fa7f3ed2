"""Slots and readings of one step: plain numbers on the host, no array library."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from anynan._readings.policy import reading_kind
from anynan.events import Kind, Phase


@dataclass(frozen=True, slots=True)
class ProbePoint:
    """Name a value of a traced program that is read.

    Attributes:
        value: What the program knows it by: a number, or a tensor's name.
        layer: Layer path, None outside every layer.
        phase: Phase of the reading.
        tensor: Which tensor (``output``, ``grad``).
        call: Which call of the layer, where the program tells.
        parameter: Name of the weight it belongs to.
        buffer: True for what is carried along and not trained.
        dtype: Short name of its dtype, and the largest finite value of that.
    """

    value: Any
    layer: str | None
    phase: Phase
    tensor: str
    call: int = 0
    parameter: str | None = None
    buffer: bool = False
    dtype: tuple[str, float] = ("", 0.0)


@dataclass(slots=True)
class Site:
    """Name what one slot reads.

    Attributes:
        index: Position in the monitor's table.
        layer: Layer path, None outside every watched layer.
        phase: Phase of the reading.
        tensor: Which tensor (``output``, ``grad``, ``args[0]``).
        dtype: Short dtype name.
        dtype_max: The dtype's largest finite value, None where it has none.
        limit: Magnitude at which a reading needs judging.
        parameter: Name of the weight or buffer it belongs to.
        bound: True if the values only bound the tensor (a norm), so they can clear it but
            not condemn it.
        buffer: True for what no optimizer trains: it may hold NaN and Inf on purpose.
    """

    index: int
    layer: str | None
    phase: Phase
    tensor: str
    dtype: str
    dtype_max: float | None
    limit: float
    parameter: str | None = None
    bound: bool = False
    buffer: bool = False

    @property
    def place(self) -> tuple[Any, ...]:
        """Name what is read, however it is read: by its ends or by its norm."""
        return self.layer, self.phase, self.tensor, self.parameter


@dataclass(frozen=True, slots=True)
class Reading:
    """Give one slot's values for one step.

    Attributes:
        step: Step, from 0.
        order: Position in the step.
        call: Which call of the layer in the step.
        site: What was read.
        lo: Smallest value, NaN if any value is NaN, None if it was not read how large they are.
        hi: Largest value, NaN and None likewise.
        stats: Extra statistics asked for with ``stats=``.
        norm: L2 norm of a weight's gradient, None for all else.
    """

    step: int
    order: int
    call: int
    site: Site
    lo: float | None
    hi: float | None
    stats: tuple[float, ...] = ()
    norm: float | None = None

    @property
    def layer(self) -> str | None:
        """Give the layer path."""
        return self.site.layer

    @property
    def phase(self) -> Phase:
        """Give the phase."""
        return self.site.phase

    @property
    def kind(self) -> Kind | None:
        """Name the non-finite kind, None if the values are finite."""
        return None if self.lo is None or self.hi is None else reading_kind(self.lo, self.hi)

    def key(self, kind: Kind | None) -> tuple[str | None, str, Any]:
        """Give what readings that are bad in this way, in this place, are counted by."""
        return self.site.layer, self.site.phase, kind

    @property
    def absmax(self) -> float | None:
        """Give the largest magnitude, None if it was not read; a bound where it is a norm."""
        if self.lo is None or self.hi is None:
            return None
        return max(abs(self.lo), abs(self.hi)) if self.lo == self.lo else math.nan

    @property
    def headroom(self) -> float | None:
        """Give the bits left before overflow, None where that means nothing.

        Where the slot holds a norm there are at least as many.
        """
        absmax = self.absmax
        if self.site.dtype_max is None or not absmax or not math.isfinite(absmax):
            return None
        return round(math.log2(self.site.dtype_max) - math.log2(absmax), 6)


def known(lo: float, hi: float) -> tuple[float | None, float | None]:
    return (None, None) if lo > hi else (lo, hi)


def layer_norms(readings: Iterable[Reading]) -> dict[str, float]:
    """Give the gradient norm of each layer's own weights, from one step's readings."""
    # Read again in the same step (a closure, a second update), a weight counts once.
    weights = {
        reading.site.parameter: (reading.site.layer or "", reading.norm)
        for reading in readings
        if reading.norm is not None and reading.site.parameter is not None
    }
    layers: dict[str, list[float]] = {}
    for layer, norm in weights.values():
        layers.setdefault(layer, []).append(norm)
    return {layer: math.hypot(*norms) for layer, norms in layers.items()}
