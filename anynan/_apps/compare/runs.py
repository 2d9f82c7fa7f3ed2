"""Compare what two runs saw, step by step, from their histories."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from anynan._apps.compare.messages import ONLY_GROSS
from anynan._base.messages import left
from anynan._diagnosis.rules.evidence import plural
from anynan._runs.run import Run

GROSS = 0.1  # doublings: 7 %; the ends of an array say no more of the rest of it


@dataclass(frozen=True, slots=True)
class Apart:
    """Hold where two histories part first.

    Attributes:
        step: The step.
        layer: The layer, None outside of all.
        phase: What was read.
        tensor: Of what.
        call: Which call, from 0.
        first: The largest magnitude in the first run, or its norm.
        second: In the second.
        before: The largest difference of all readings before, as a share.
        steps: How many steps both have.
        missing: How many slots only one of them has.
    """

    step: int | None
    layer: str | None
    phase: str
    tensor: str
    call: int
    first: float
    second: float
    before: float
    steps: int
    missing: int

    def report(self, ignore: Iterable[str] = ()) -> str:
        """Return the answer in words, without the notes that are ignored."""
        missing = (
            f"; {plural(self.missing, 'reading')} only one of them has" if self.missing else ""
        )
        if self.step is None:
            said = (
                f"No gross difference in {plural(self.steps, 'step')}: the largest is "
                f"{100 * self.before:.2g} %{missing}"
            )
        else:
            where = "outside every layer" if self.layer is None else f"`{self.layer or '(model)'}`"
            call = f", call {self.call + 1}" if self.call else ""
            said = (
                f"The runs first differ at step {self.step} in {where}{call}: {self.phase} "
                f"{self.tensor} {self.first:.4g} against {self.second:.4g}; everything before "
                f"is within {100 * self.before:.2g} %{missing}"
            )
        return "\n\n".join([said, *(f"  note  {x}" for x in left([ONLY_GROSS()], ignore))])


def compare_runs(a: Run, b: Run) -> Apart:
    """Find the first step and layer in which two runs part.

    Args:
        a: What ``anynan.load`` gave for the first.
        b: For the second.
    """
    before, missing = 0.0, 0
    theirs = dict(_steps(b))
    both = 0
    for step, mine in _steps(a):
        others = theirs.get(step)
        if others is None:
            continue
        both += 1
        missing += len(mine.keys() ^ others.keys())
        for key, x in mine.items():
            y = others.get(key)
            if y is None:
                continue
            far = _far(x, y)
            if far > GROSS:
                layer, phase, tensor, call = key
                return Apart(step, layer, phase, tensor, call, x, y, before, both, missing)
            before = max(before, 2**far - 1)
    return Apart(None, None, "", "", 0, 0.0, 0.0, before, both, missing)


def _steps(run: Run) -> Iterator[tuple[int, dict[tuple[Any, ...], float]]]:
    found: dict[int, dict[tuple[Any, ...], float]] = {}
    for reading in run.history:
        size = reading.absmax if reading.norm is None else reading.norm
        if size is not None:
            site = reading.site
            key = site.layer, site.phase, site.tensor, reading.call
            found.setdefault(reading.step, {})[key] = size
    yield from found.items()


def _far(x: float, y: float) -> float:
    """Return how many doublings two sizes are apart."""
    if x == y or (math.isnan(x) and math.isnan(y)):
        return 0.0
    if not (math.isfinite(x) and math.isfinite(y)) or min(x, y) <= 0:
        return math.inf
    return abs(math.log2(x / y))
