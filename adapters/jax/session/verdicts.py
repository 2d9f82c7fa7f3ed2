"""Which readings of a program the policy calls bad, known before it runs."""

from typing import Any

import numpy as np

from anynan._readings.monitor import Monitor
from anynan._readings.readings import ProbePoint
from anynan.events import Phase
from anynan.jax.program.watch import Watch, Watches
from anynan.jax.read import probes


class ThresholdTable:
    """Ask the policy about a program's readings.

    Args:
        monitor: Knows what is bad, and what a replay found to be only placed.
        lenient: Phases of which nothing is bad, as where a loss scaler takes care of gradients.
    """

    def __init__(self, monitor: Monitor, lenient: tuple[Phase, ...] = ()) -> None:
        self._monitor, self._lenient = monitor, lenient

    def bad_words(self, point: ProbePoint) -> Any:
        """Say which words of a reading are bad."""
        found = np.zeros(4, bool)
        if point.phase == "input" or point.phase in self._lenient:
            return found  # data may hold them, until harm comes of it
        for word in (probes.NEGINF, probes.POSINF, probes.NAN):
            found[word] = self._monitor.is_bad(probes.KINDS[word], point.phase, point.layer)
        return found

    def table(self, watch: Watch) -> Any:
        """Say of each value which words make a step bad."""
        if not watch.restored:
            return np.zeros((1, 4), bool)
        masks = len(self._monitor.downgraded)
        if watch.table is None or watch.table[0] != masks:
            table = np.zeros((len(watch.values), 4), bool)
            for point in watch.points:
                table[watch.at[point.value]] |= self.bad_words(point)
            watch.table = masks, table
        return watch.table[1]

    def exact(self, watches: Watches) -> set[int]:
        """List the values where a NaN and Infs of both signs are judged differently."""
        program, known = watches.program, watches.known
        masks = len(self._monitor.downgraded)
        if known.masks != masks:
            # What only an operation says is expected is known to the rows, not to the policy.
            for point in program.every_step():
                bad = self.bad_words(point)
                if bad[probes.NAN] != bad[probes.POSINF] or program.excused(point.value):
                    known.exact.add(point.value)
            known.masks = masks
        return known.exact
