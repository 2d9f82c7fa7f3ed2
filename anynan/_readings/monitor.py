"""The table of slots, what in it left its limits, and what led to a bad layer."""

import math
from threading import RLock
from typing import Any

import numpy as np

from anynan._readings.history import Ring
from anynan._readings.policy import Policy
from anynan._readings.readings import Site
from anynan._readings.step import Step
from anynan.events import Phase


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
        self,
        layer: str | None,
        phase: Phase,
        tensor: str,
        dtype: str,
        dtype_max: float | None,
        *,
        parameter: str | None = None,
        bound: bool = False,
        buffer: bool = False,
    ) -> Site:
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
        self,
        rows: Step,
        upto: int,
        layer: str | None,
        phase: Phase = "forward",
        call: int | None = None,
    ) -> tuple[tuple[str, float | None], ...]:
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
        parts = layer.split(".")
        around = {".".join(parts[:depth]) for depth in range(len(parts) + 1)}
        orders = [
            order
            for order, site in enumerate(rows.sites[: min(upto + 1, len(rows.lo))])
            if site.phase == phase and site.layer is not None and not site.bound
        ]
        # Where no gradient of an output is read, those of the weights tell the way.
        outputs = [order for order in orders if rows.sites[order].parameter is None]
        orders = outputs or orders
        own = [
            order
            for order in orders
            if rows.sites[order].layer == layer and call in (None, rows.calls[order])
        ]
        if not own:  # what failed is bad because of it, and comes after it
            orders = [order for order in orders if order != upto]
        shown: dict[str, tuple[int, float | None]] = {}
        # Layers whose call is over, going forward, or begins, going backward: what was inside
        # of it before belongs to another call.
        over: set[str] = set()
        for order in orders:
            path = rows.sites[order].layer or ""
            for outer in [outer for outer in over if _inside(path, outer)]:
                shown = {name: held for name, held in shown.items() if not _inside(name, outer)}
                over.discard(outer)
            if path in around and path != layer:
                over.add(path)
            value = rows.reading(order).absmax
            within = bool(layer) and _inside(path, layer)
            beside = path.rpartition(".")[0] in around and not within
            told = path == layer or (beside and path not in around)
            if told and value is not None:
                before = shown.pop(path, None)
                size = value if math.isfinite(value) else None
                if before is not None and before[0] == rows.calls[order]:
                    size = None if None in (size, before[1]) else max(value, before[1] or 0.0)
                shown[path] = rows.calls[order], size
            if own and order == own[-1]:
                break
        if shown and not own:  # it had not ended yet
            shown.pop(layer, None)
            shown[layer] = 0, None
        return tuple((name, value) for name, (_, value) in shown.items())


def _inside(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))
