"""The table of slots, what in it left its limits, and what led to a bad layer."""

import math
from collections.abc import Iterable, Sequence
from threading import RLock
from typing import Any

import numpy as np

from anynan._readings.history import Ring
from anynan._readings.patterns import within
from anynan._readings.policy import Policy
from anynan._readings.readings import ProbePoint, Site
from anynan._readings.step import Step
from anynan.events import Kind, Phase


class Monitor:
    """Keep the table of slots, judge readings against the policy, remember what passed."""

    def __init__(self, policy: Policy, history: int) -> None:
        self.policy = policy
        self.sites: list[Site] = []
        self.history = Ring(history)
        self.downgraded: dict[tuple[str | None, str, str], str] = {}
        self._table: dict[tuple[Any, ...], Site] = {}
        self._lock = RLock()

    def site(
        self, layer: str | None, phase: Phase, tensor: str, dtype: str, dtype_max: float | None, *,
        parameter: str | None = None, bound: bool = False, buffer: bool = False,
    ) -> Site:  # fmt: skip
        """Return the slot for this tensor, made once."""
        key = (layer, phase, tensor, dtype, parameter, bound)
        found = self._table.get(key)
        if found is None:
            with self._lock:
                found = self._table.get(key)
                if found is None:
                    limit = self.policy.limit(layer, dtype_max)
                    found = Site(
                        len(self.sites), layer, phase, tensor, dtype, dtype_max, limit,
                        parameter, bound, buffer,
                    )  # fmt: skip
                    self.sites.append(found)
                    self._table[key] = found
        return found

    def sites_of(
        self, points: Sequence[ProbePoint], dtypes: Iterable[tuple[str, float]]
    ) -> list[Site]:
        """Return the slots of values of a traced program.

        Args:
            points: The values.
            dtypes: Short name of each one's dtype, and its largest finite value.
        """
        return [
            self.site(x.layer, x.phase, x.tensor, *dtype, parameter=x.parameter, buffer=x.buffer)
            for x, dtype in zip(points, dtypes, strict=True)
        ]

    def is_bad(self, kind: Kind, phase: Phase, layer: str | None) -> bool:
        """Tell whether a kind is bad in a place for sure: neither allowed nor seen to be a mask."""
        judged = self.policy.weigh(kind, phase, layer)
        excused = self.policy.allowed(kind, phase, layer) or (layer, phase, kind) in self.downgraded
        return judged is not None and judged[1] == "bad" and not excused

    def flagged(self, rows: Step) -> list[int]:
        """List the rows not judged yet whose values leave their slot's limits, in order."""
        start, rows.judged = rows.judged, len(rows.lo)
        if start == rows.judged:
            return []
        lo = np.asarray(rows.lo[start:])
        hi = np.asarray(rows.hi[start:])
        limit = np.fromiter((site.limit for site in rows.sites[start:]), np.float64, len(lo))
        inside = (lo >= -limit) & (hi <= limit)
        return [int(i) + start for i in np.flatnonzero(~inside)]

    def trail(
        self, rows: Step, upto: int, layer: str | None, phase: Phase = "forward",
        call: int | None = None,
    ) -> tuple[tuple[str, float | None], ...]:  # fmt: skip
        """Give what led to a bad layer in the same pass, with magnitudes; the layer comes last.

        Shown are the layers beside the failing one and beside each layer around it: what a
        reader would follow from the input to the failure, or in a backward pass from the loss.

        Args:
            rows: The step's readings.
            upto: Order of the reading that failed.
            layer: The layer it began in.
            phase: Which pass, ``forward`` or ``backward``.
            call: Which call of the layer; None for the last there is.
        """
        if layer is None:
            return ()
        orders = _of_pass(rows, min(upto + 1, len(rows.lo)), phase)
        own = [
            order
            for order in orders
            if rows.sites[order].layer == layer and call in (None, rows.calls[order])
        ]
        if own:
            shown = _beside(rows, orders[: orders.index(own[-1]) + 1], layer)
        else:  # what failed is bad because of it, and comes after it
            shown = _beside(rows, [order for order in orders if order != upto], layer)
        if shown and not own:  # it had not ended yet
            shown.pop(layer, None)
            shown[layer] = 0, None
        return tuple((name, value) for name, (_, value) in shown.items())


def _of_pass(rows: Step, upto: int, phase: Phase) -> list[int]:
    """Give the readings of outputs in a pass, or of weights where no output was read."""
    orders = [
        order
        for order, site in enumerate(rows.sites[:upto])
        if site.phase == phase and site.layer is not None and not site.bound
    ]
    # Where no gradient of an output is read, those of the weights tell the way.
    return [order for order in orders if rows.sites[order].parameter is None] or orders


def _beside(rows: Step, orders: list[int], layer: str) -> dict[str, tuple[int, float | None]]:
    """Give the last call and the size of each layer beside one, and beside those around it."""
    parts = layer.split(".")
    around = {".".join(parts[:depth]) for depth in range(len(parts) + 1)}
    shown: dict[str, tuple[int, float | None]] = {}
    # Layers whose call is over, going forward, or begins, going backward: what was inside of it
    # before belongs to another call.
    over: set[str] = set()
    for order in orders:
        path, value = rows.sites[order].layer or "", rows.reading(order).absmax
        for outer in [outer for outer in over if outer != path and within(path, outer)]:
            shown = {n: held for n, held in shown.items() if n == outer or not within(n, outer)}
            over.discard(outer)
        if path in around and path != layer:
            over.add(path)
        beside = path not in around and path.rpartition(".")[0] in around
        beside = beside and not (layer and within(path, layer))
        if value is not None and (path == layer or beside):
            call = rows.calls[order]
            before = shown.pop(path, (call, 0.0))
            shown[path] = call, _finite(value, before[1] if before[0] == call else 0.0)
    return shown


def _finite(value: float, before: float | None) -> float | None:
    """Give the larger one, None where one is not finite."""
    return None if before is None or not math.isfinite(value) else max(value, before)
