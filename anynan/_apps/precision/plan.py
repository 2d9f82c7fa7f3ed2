"""The plan: what to keep in float32, and the loss scale, tried by running with it."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from anynan._apps.precision.watch import Break, Row
from anynan._files.formats import Format
from anynan._readings.patterns import within

RUNS = 40  # so many runs a plan may take to be found
Line = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Plan:
    """Hold what to keep in float32.

    Attributes:
        layers: Paths of the layers (``""`` is the whole model), each with whether its result is
            cast back.
        lines: Lines outside of every layer that has a name, as file and number.
        sizes: How many numbers of weights are in each of the layers.
        scale: The loss scale it was tried with.
        scales: The smallest and the largest loss scale that serve; None where there is no
            backward pass, or its gradients need none.
        finite: Whether the run with the plan in place was finite.
        distance: How far what it returned is from float32's, relative; None if not comparable.
        runs: How many runs it took.
        left: What still broke.
    """

    layers: Mapping[str, bool]
    lines: tuple[Line, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
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
    error: bool = False


def inside(layer: str | None, kept: Collection[str]) -> str | None:
    """Give which of the kept layers a layer is, or is in; None if it is in none."""
    if layer is None:
        return None
    return next((k for k in kept if within(layer, k)), None)


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
        run: Runs with layers and lines in float32, at a loss scale: ``going`` on past what breaks,
            with the framework's ``own`` kernels.
        sizes: The layers that can be kept, with the elements of their weights.
        tied: Gives the layers that share a weight with a layer.
        rows: Of the float32 run.
        form: The format asked about.
        vanishing: The share of the gradients' elements that may become 0.
        own: Whether the framework's kernels for the dtype run all the time, or in the end alone.
        replaces: Whether a run takes other results in an operation's place: for a loss scale, or
            for lines.
    """

    run: Callable[..., Trial]
    sizes: Mapping[str, int]
    tied: Callable[[str], Collection[str]]
    rows: Sequence[Row]
    form: Format
    vanishing: float
    own: bool = False
    replaces: bool = True
    runs: int = 0
    # Layer: whether its result is cast back to the dtype.
    layers: dict[str, bool] = field(default_factory=dict)
    lines: dict[Line, None] = field(default_factory=dict)
    _closed: set[str] = field(default_factory=set)
    _read: set[str] = field(default_factory=set)

    def __call__(self, first: Sequence[Break]) -> Plan:
        """Search from what broke in a run without a plan."""
        # An update in the dtype needs weights of its own in float32: no layer helps it.
        breaks: Sequence[Break] = [each for each in first if each.phase != "optimizer"]
        if self._scale() != 1 and all(each.phase == "backward" for each in breaks):
            breaks = self._try(going=True).breaks
        while breaks and self.runs < RUNS // 2:
            before = (dict(self.lines), dict(self.layers))
            taken: list[str] = []
            for each in breaks:
                around = () if each.layer is None else (each.layer,)
                # What breaks in or around a layer that broke may come of that.
                if all(inside(layer, around) is None for layer in taken):
                    self._keep(each)
                    taken += around
            if before == (self.lines, self.layers):
                break  # nothing is left that could be kept
            trial = self._try(going=True)
            while trial.error and self.runs < RUNS // 2 and self._widen(before[1]):
                trial = self._try(going=True)
            breaks = trial.breaks
        distance = None
        if not breaks:
            self._prune()
            self.own = True
            trial = self._try(going=False)
            breaks, distance = trial.breaks, trial.distance
        return Plan(
            dict(self.layers), tuple(self.lines), {k: self.sizes.get(k, 0) for k in self.layers},
            self._scale(), loss_scales(self.rows, self.form, self.vanishing, self.layers),
            not breaks, distance, self.runs, tuple(breaks),
        )  # fmt: skip

    def _scale(self) -> float:
        """Choose a scale within the range, as near to none as can be."""
        found = loss_scales(self.rows, self.form, self.vanishing, self.layers)
        if found is None or self.form.name == "bfloat16" or not self.replaces:
            return 1.0
        return min(max(1.0, found[0]), max(found[1] / 2, 2.0**-20))

    def _try(self, *, going: bool) -> Trial:
        self.runs += 1
        lines, scale = tuple(self.lines), self._scale()
        return self.run(self.layers, lines, scale, going=going, own=self.own)

    def _keep(self, broken: Break) -> None:
        """Keep the layer whose operation broke, or the line of what is in none."""
        held = inside(broken.layer, self.layers)
        if held is not None and self.layers[held] and held not in self._closed:
            self.layers[held] = False  # its result is beyond the dtype
        elif held is not None:  # so is its reader's operand
            self._add(held.rpartition(".")[0] if held else None)
        elif (maker := self._maker(broken)) is not None:  # its result may do, in float32
            self._add(maker)
            self.layers[maker] = False
        elif not self._add(broken.layer) and broken.layer is None and broken.phase != "backward":
            source = broken.source
            if source is not None and self.replaces:
                self.lines.setdefault((source.file, source.line))

    def _maker(self, broken: Break) -> str | None:
        """Give the layer inside that ran right before what broke, if it was not tried yet."""
        rows, layer = list(self.rows), broken.layer
        at = next((i for i, row in enumerate(rows) if row.place == broken.place), 0)
        while at and rows[at].layer == layer:
            at -= 1
        found = rows[at].layer if rows else None
        if layer is None or found is None or broken.phase != "forward" or found == layer:
            return None
        new = found in self.sizes and not {found} & {*self._closed, *self.layers}
        return found if new and inside(found, (layer,)) is not None else None

    def _reader(self, layer: str) -> str | None:
        """Give the next layer with weights that runs behind one; None the second time."""
        if layer in self._read:
            return None
        self._read.add(layer)
        mine = [i for i, row in enumerate(self.rows) if inside(row.layer, (layer,)) is not None]
        forward = [i for i in mine if self.rows[i].phase == "forward"]
        behind = self.rows[forward[-1] + 1 :] if forward else ()
        return next(
            (
                row.layer
                for row in behind
                if row.layer and self.sizes.get(row.layer) and inside(layer, (row.layer,)) is None
            ),
            None,
        )

    def _add(self, layer: str | None) -> bool:
        """Keep a layer, or the first around it that can be kept."""
        while layer and layer not in self.sizes:
            layer = layer.rpartition(".")[0]
        if layer is None or layer not in self.sizes:
            return False
        # What is around it may hold its weight without reading it: a run tells.
        tied = [each for each in self.tied(layer) if inside(layer, (each,)) is None]
        for each in (layer, *tied):
            if inside(each, self.layers) is None:
                within = [k for k in self.layers if inside(k, (each,)) is not None]
                for inner in within:
                    del self.layers[inner]
                self.layers[each] = True
        return True

    def _widen(self, before: Mapping[str, bool]) -> bool:
        """Undo what a run could not be made with; False if there is nothing to do."""
        opened = [k for k, back in self.layers.items() if not back and k not in self._closed]
        opened = opened[:1]  # one by one: the others may be right
        if opened and (reader := self._reader(opened[0])) is not None:
            return self._add(reader)
        for layer in opened:  # what reads the result does not take float32
            self._closed.add(layer)
            self.layers[layer] = True
        added = opened or [k for k in self.layers if k and k not in before]
        widened = [self._add(k.rpartition(".")[0]) for k in added if k]
        return any(widened)

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
