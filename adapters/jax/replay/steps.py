"""Steps that ran and are not judged yet."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from anynan._diagnosis.evidence import BadParameter, ReplayError
from anynan._readings import step as core
from anynan._readings.readings import ProbePoint
from anynan.jax.program.program import Form, Program
from anynan.jax.program.watch import Known, Watch
from anynan.jax.read import probes
from anynan.jax.read.donated import Copy, alive
from anynan.jax.read.readings import Path


@dataclass
class Step:
    """Hold what a step left behind, until it is judged.

    Attributes:
        watch: What ran.
        arrays: What went in; what was donated is gone.
        outs: What came out.
        words: The readings, on the device.
        rows: The rows they belong in.
        read: The readings on the host: word, smallest, largest and statistics of each value.
        meant: Places of the readings that are Inf and may be meant so, or NaN as it was placed.
        spoilt: Weights that a replay found to be spoilt by the update.
        copies: Those of what was donated, where they are kept.
        traced: The function, and its call without the arrays; None where that is not kept.
        moved: How far its update moved the weights; None where that is not looked at.
        partial: True where ``watch`` reads less than what ran: its rows are of more.
        since: What of other functions was remembered as bad before it ran.
        handed_on: True if it began with weights that the step before it is known to have spoilt.
        harmed: True if something was computed of NaN that it was given as the code wrote it.
    """

    watch: Watch
    arrays: list[Any]
    outs: list[Any]
    words: Any
    rows: core.Step
    read: Any = None
    meant: set[int] = field(default_factory=set)
    spoilt: list[BadParameter] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    traced: tuple[Callable[..., Any], Form] | None = None
    moved: Any = None
    partial: bool = False
    since: int = 0
    handed_on: bool = False
    harmed: bool = False

    @property
    def program(self) -> Program:
        """Give what it was."""
        return self.watch.program

    def without(self, paths: Mapping[Path, str]) -> "Step":
        """Give the same step, to be run again with some equations left shut.

        Args:
            paths: Where they are, and why.
        """
        program, old = self.program.without(paths), self.program.graph.values
        watch = Watch(program, (), Known())
        numbers = {(old[i].path, id(old[i].var)): at for i, at in self.watch.at.items()}
        read, meant = np.zeros((len(watch.values), max(watch.width, 3))), set[int]()
        read[:, 1:3] = probes.UNREAD
        for index, at in watch.at.items():
            value = program.graph.values[index]
            was = numbers.get((value.path, id(value.var)))
            if was is not None and self.read is not None:
                read[at] = self.read[was]
                meant |= {at} if was in self.meant else set()
        return replace(
            self, watch=watch, arrays=self.inputs(), read=read, meant=meant, partial=True
        )

    def order(self, point: ProbePoint) -> int:
        """Give the number of a reading, that of the first where it is not read."""
        same = [replace(x, value=point.value) == point for x in self.watch.points]
        return same.index(True) if True in same else 0

    def held(self, index: int) -> Any:
        """Give the array of a value that went in or came out, None if it is not at hand.

        Args:
            index: Number of the value.
        """
        argument = self.program.graph.values[index].argument
        if argument is not None:
            return alive(self.arrays[argument])
        results = self.program.graph.results
        at = results.index(index) if self.outs and index in results else None
        # In the place of a state that is bad the old one may have been put.
        return None if at is None or at in self.watch.restored else alive(self.outs[at])

    def inputs(self) -> list[Any]:
        """Give the arrays to run the step with again.

        Raises:
            ReplayError: If they were donated and did not come back.
        """
        found = [alive(x) for x in self.arrays]
        back = {source: i for i, source in self.watch.restored.items()}
        for i, array in enumerate(found):
            if array is None and i in back and self.outs:
                found[i] = alive(self.outs[back[i]])
            if found[i] is None:
                msg = (
                    f"{self.program.leaves[i].name} was donated to the step, so the step cannot "
                    "be run again: track(..., advanced=anynan.Advanced(keep_inputs=True)) keeps "
                    "what is donated, or leave out donate_argnums for one run, and the report "
                    "names the operation"
                )
                raise ReplayError(msg)
        return found


def weakly(arrays: list[Any]) -> list[Any]:
    """Hold arrays without keeping them alive."""
    return [weakref.ref(x) if isinstance(x, jax.Array) else x for x in arrays]
