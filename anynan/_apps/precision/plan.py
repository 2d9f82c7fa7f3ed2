"""The plan: what to keep in float32, and the loss scale, tried by running with it."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from anynan._apps.precision.watch import Break, Row
from anynan._files.formats import Format

RUNS = 40  # so many runs a plan may take to be found
Line = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Plan:
    """Hold what to keep in float32.

    Attributes:
        layers: Paths of the layers; ``""`` is the whole model.
        lines: Lines outside of every layer that has a name, as file and number.
        elements: How many numbers of weights are in the layers.
        scale: The loss scale it was tried with.
        scales: The smallest and the largest loss scale that serve; None where there is no
            backward pass, or its gradients need none.
        finite: Whether the run with the plan in place was finite.
        distance: How far what it returned is from float32's, relative; None if not comparable.
        runs: How many runs it took.
        left: What still broke.
    """

    layers: tuple[str, ...]
    lines: tuple[Line, ...] = ()
    elements: int = 0
    scale: float = 1.0
    scales: tuple[float, float] | None = None
    finite: bool = False
    distance: float | None = None
    runs: int = 0
    left: tuple[Break, ...] = ()


@dataclass(slots=True)
class Trial:
    """Hold what a run with layers and lines kept came to."""

    breaks: Sequence[Break]
    distance: float | None = None


# Runs with layers and lines in float32, at a loss scale; True to go on past what breaks.
Run = Callable[[Collection[str], Collection[Line], float, bool], Trial]


def inside(layer: str | None, kept: Collection[str]) -> str | None:
    """Give which of the kept layers a layer is, or is in; None if it is in none."""
    if layer is None:
        return None
    return next((k for k in kept if not k or layer == k or layer.startswith(k + ".")), None)


def loss_scales(
    rows: Sequence[Row], form: Format, vanishing: float, kept: Collection[str] = ()
) -> tuple[float, float] | None:
    """Give the range of loss scales in which gradients neither overflow nor vanish.

    Args:
        rows: Of the float32 run.
        form: What the gradients are stored in.
        vanishing: The share of their elements, of those other than 0, that may become 0.
        kept: Layers whose gradients stay in float32.

    Returns:
        Powers of two; the first is above the second where no scale does both.
    """
    mine = [
        row.result
        for row in rows
        if row.phase == "backward" and row.result.largest and inside(row.layer, kept) is None
    ]
    if not mine:
        return None
    high = 2.0 ** math.floor(min(each.bits(form) for each in mine) - 1e-9)
    total = sum(int(each.powers.sum()) for each in mine)
    low = 2.0**-40
    while low < 2.0**60:
        lost = sum(each.flushed(form, low) * int(each.powers.sum()) for each in mine)
        if lost <= vanishing * total:
            break
        low *= 2
    return low, high


@dataclass(slots=True)
class Search:
    """Look for the smallest plan.

    Args:
        run: Runs with a plan in place.
        sizes: The layers that can be kept, with the elements of their weights.
        rows: Of the float32 run.
        form: The format asked about.
        vanishing: The share of the gradients' elements that may become 0.
    """

    run: Run
    sizes: Mapping[str, int]
    rows: Sequence[Row]
    form: Format
    vanishing: float
    runs: int = 0
    layers: dict[str, None] = field(default_factory=dict)
    lines: dict[Line, None] = field(default_factory=dict)

    def __call__(self, first: Sequence[Break]) -> Plan:
        """Search from what broke in a run without a plan."""
        # An update in the dtype needs weights of its own in float32: no layer helps it.
        breaks, scale = [each for each in first if each.phase != "optimizer"], self._scale()
        if scale != 1 and all(each.phase == "backward" for each in breaks):
            breaks = list(self._try(going=True).breaks)
        trial = Trial(breaks)
        while breaks and self.runs < RUNS // 2:
            before = (len(self.lines), tuple(self.layers))
            for each in breaks:
                self._keep(each)
            if before == (len(self.lines), tuple(self.layers)):
                break  # nothing is left that could be kept
            breaks = list(self._try(going=True).breaks)
        if not breaks:
            self._prune()
            trial = self._try(going=False)
        left = tuple(trial.breaks) if not breaks else tuple(breaks)
        return Plan(
            tuple(self.layers), tuple(self.lines), sum(self.sizes.get(k, 0) for k in self.layers),
            self._scale(), loss_scales(self.rows, self.form, self.vanishing, self.layers),
            not left, trial.distance, self.runs, left,
        )  # fmt: skip

    def _scale(self) -> float:
        """Choose a scale within the range, as near to none as can be."""
        found = loss_scales(self.rows, self.form, self.vanishing, self.layers)
        if found is None:
            return 1.0
        low, high = found
        return min(max(1.0, low), max(high / 2, 2.0**-20)) if self.form.name != "bfloat16" else 1.0

    def _try(self, *, going: bool) -> Trial:
        self.runs += 1
        return self.run(tuple(self.layers), tuple(self.lines), self._scale(), going)

    def _keep(self, broken: Break) -> None:
        """Keep the layer whose operation broke, or the line of what is in none."""
        held = inside(broken.layer, self.layers)
        wanted = broken.layer
        if held is not None:  # its result is beyond the dtype: who reads it is kept with it
            wanted = held.rpartition(".")[0] if held else None
        while wanted and wanted not in self.sizes:
            wanted = wanted.rpartition(".")[0]
        if wanted is None or wanted not in self.sizes:
            source = broken.source
            if source is not None and broken.layer is None and broken.phase != "backward":
                self.lines.setdefault((source.file, source.line))
            return
        for layer in [k for k in self.layers if inside(k, (wanted,)) is not None]:
            del self.layers[layer]
        if inside(wanted, self.layers) is None:
            self.layers[wanted] = None

    def _prune(self) -> None:
        """Drop what need not be kept: halves first, then one by one."""
        size = max(len(self.layers) // 2, 1)
        while self.runs < RUNS:
            names = list(self.layers)
            for at in range(0, len(names), size):
                kept = dict(self.layers)
                for name in names[at : at + size]:
                    self.layers.pop(name, None)
                if self.runs >= RUNS or self._try(going=False).breaks:
                    self.layers = kept
            if size == 1:
                break
            size //= 2
