"""Layers by steps: how near to overflow each came, as a table of codes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from anynan._readings.readings import Site
from anynan._readings.step import Step
from anynan._runs.record import Record

if TYPE_CHECKING:
    from anynan._readings.history import Packed

T = TypeVar("T")
# A cell's code; the larger one wins where cells are put together. From FIRST on it tells the
# bits of headroom: TOP for none, and one less for each 32nd of a bit.
UNREAD, ZERO, FIRST, TOP, MOST = 0, 1, 2, 65_000, 65_531
BOTH, NEGINF, POSINF, NAN = 65_532, 65_533, 65_534, 65_535
STEPS = 32

LATEST, BEFORE = 64, 64  # columns of single steps, and of steps put together before them
PANELS = {
    "forward": ("Outputs", ("input", "forward", "loss")),
    "backward": ("Gradients", ("backward",)),
    "weights": ("Weights", ("parameter", "optimizer")),
}
_PANEL_OF = {phase: name for name, (_, phases) in PANELS.items() for phase in phases}


@dataclass(frozen=True, slots=True)
class Grid:
    """Hold one panel of the picture.

    Attributes:
        layers: Layer paths, in the order in which they ran; None is outside every layer.
        dtypes: Their dtypes, empty where there are several.
        limits: The largest finite value of each one's dtype, NaN where that is not known.
        columns: First and last step of each column.
        cells: A code for each layer and column.
        members: The layers that each row stands for.
    """

    layers: tuple[str | None, ...]
    dtypes: tuple[str, ...]
    limits: tuple[float, ...]
    columns: tuple[tuple[int, int], ...]
    cells: NDArray[np.uint16]
    members: tuple[tuple[str | None, ...], ...]

    def bits(self) -> NDArray[np.float64]:
        """Give each cell's headroom, NaN where there is none."""
        held = (self.cells >= FIRST) & (self.cells <= MOST)
        return np.where(held, (TOP - self.cells.astype(np.float64)) / STEPS, np.nan)

    def grouped(self, most: int) -> "Grid":
        """Put layers together under their parents until there are few enough."""
        depth = max((len(layer.split(".")) for layer in self.layers if layer), default=0)
        found = self
        while len(found.layers) > most and depth > 0:
            depth -= 1
            found = self._at(depth)
        few = len(self.layers) > len(found.layers) < most // 50
        if len(found.layers) > most or few:  # one level alone has too many
            count = len(self.layers)
            starts = [-(-i * count // most) for i in range(most)]
            names = [f"{self.layers[at] or ''} and on" for at in starts]
            found = self._joined([i * most // count for i in range(count)], names)
        return found

    def rows(self, chosen: Sequence[int]) -> "Grid":
        """Give some of the rows, as they are."""
        return Grid(
            tuple(self.layers[row] for row in chosen),
            tuple(self.dtypes[row] for row in chosen),
            tuple(self.limits[row] for row in chosen),
            self.columns,
            self.cells[list(chosen)],
            tuple(self.members[row] for row in chosen),
        )

    def narrowed(self, most: int) -> "Grid":
        """Put neighbouring columns together until there are few enough."""
        count = len(self.columns)
        width = -(-count // max(most, 1))
        if width < 2:
            return self
        starts = sorted({max(end - width, 0) for end in range(count, 0, -width)})
        ends = [*starts[1:], count]
        return replace(
            self,
            columns=tuple(
                (self.columns[start][0], self.columns[end - 1][1])
                for start, end in zip(starts, ends, strict=True)
            ),
            cells=np.maximum.reduceat(self.cells, starts, axis=1),
        )

    def _at(self, depth: int) -> "Grid":
        names = [None if x is None else ".".join(x.split(".")[:depth]) for x in self.layers]
        numbers: dict[str | None, int] = {}
        groups = [numbers.setdefault(name, len(numbers)) for name in names]
        return self._joined(groups, [f"{name}.*" if name else "*" for name in numbers])

    def _joined(self, groups: Sequence[int], names: Sequence[str]) -> "Grid":
        cells = np.zeros((len(names), self.cells.shape[1]), np.uint16)
        np.maximum.at(cells, np.asarray(groups), self.cells)
        inside: list[list[int]] = [[] for _ in names]
        for row, group in enumerate(groups):
            inside[group].append(row)
        pairs = list(zip(names, inside, strict=True))
        return Grid(
            tuple(self.layers[i[0]] if len(i) == 1 else f"{n} ({len(i)})" for n, i in pairs),
            tuple(self.dtypes[i[0]] if len(i) == 1 else "" for i in inside),
            tuple(self.limits[i[0]] if len(i) == 1 else np.nan for i in inside),
            self.columns,
            cells,
            tuple(tuple(layer for row in i for layer in self.members[row]) for i in inside),
        )


def beside(panels: Sequence[Grid]) -> Grid:
    """Put panels side by side, one row for each layer, with an empty column between them."""
    rows: dict[str | None, int] = {}
    for panel in panels:
        for layer in panel.layers:
            rows.setdefault(layer, len(rows))
    parts = []
    for panel in panels:
        part = np.zeros((len(rows), len(panel.columns) + 1), np.uint16)
        part[[rows[layer] for layer in panel.layers], :-1] = panel.cells
        parts.append(part)
    cells = np.hstack(parts)[:, :-1]
    members, steps = tuple((layer,) for layer in rows), ((0, 0),) * cells.shape[1]
    return Grid(tuple(rows), ("",) * len(rows), (np.nan,) * len(rows), steps, cells, members)


def grids(run: Record) -> dict[str, Grid]:
    """Return the panels that a run has readings for."""
    steps: list[Packed | Step] = [*run.history.entries()]
    if run.open is not None:
        steps.append(run.open)
    steps.sort(key=lambda entry: entry.number)
    columns, column_of = _columns([entry.number for entry in steps])
    rows: dict[str, dict[str | None, int]] = {name: {} for name in PANELS}
    dtypes: dict[tuple[str, int], set[tuple[str, float]]] = {}
    for site in _in_order(steps):
        name = _PANEL_OF.get(site.phase, "forward")
        row = rows[name].setdefault(site.layer, len(rows[name]))
        limit = np.nan if site.dtype_max is None else site.dtype_max
        dtypes.setdefault((name, row), set()).add((site.dtype, limit))
    cells = {name: np.zeros((len(found), len(columns)), np.uint16) for name, found in rows.items()}
    known: dict[int, _Order] = {}
    for entry in steps:
        read = len(entry.lo)
        order = known.get(id(entry.sites))
        if order is None or len(order.limits) != read:
            order = known[id(entry.sites)] = _Order(entry.sites[:read], rows)
        codes = _codes(entry, order.limits)
        for name, (orders, at) in order.places.items():
            np.maximum.at(cells[name][:, column_of[entry.number]], at, codes[orders])
    return {
        name: Grid(
            tuple(found),
            tuple(_one([dtype for dtype, _ in dtypes[name, row]], "") for row in found.values()),
            tuple(_one([x for _, x in dtypes[name, row]], np.nan) for row in found.values()),
            tuple(columns),
            cells[name],
            tuple((layer,) for layer in found),
        )
        for name, found in rows.items()
        if found
    }


def _in_order(steps: "Sequence[Packed | Step]") -> Iterable[Site]:
    """Give every slot, those of the last whole step first and in its order."""
    lists = {id(entry.sites): entry.sites for entry in reversed(steps[-LATEST:])}
    lists |= {id(entry.sites): entry.sites for entry in steps}
    seen: set[int] = set()
    for sites in sorted(lists.values(), key=len, reverse=True):
        for site in sites:
            if id(site) not in seen:
                seen.add(id(site))
                yield site


def _columns(steps: list[int]) -> tuple[list[tuple[int, int]], dict[int, int]]:
    """Give the latest steps a column each, and put those before together."""
    distinct = sorted(set(steps))
    early, late = distinct[:-LATEST], distinct[-LATEST:]
    width = -(-len(early) // BEFORE) or 1
    groups = [early[i : i + width] for i in range(0, len(early), width)]
    groups += [[step] for step in late]
    column_of = {step: i for i, group in enumerate(groups) for step in group}
    return [(group[0], group[-1]) for group in groups], column_of


class _Order:
    """Keep where the readings of a step go: most steps read the same slots."""

    def __init__(self, sites: list[Site], rows: dict[str, dict[str | None, int]]) -> None:
        limits = [np.nan if site.dtype_max is None else site.dtype_max for site in sites]
        with np.errstate(all="ignore"):
            self.limits = np.log2(np.asarray(limits, np.float64))
        found: dict[str, tuple[list[int], list[int]]] = {}
        for order, site in enumerate(sites):
            name = _PANEL_OF.get(site.phase, "forward")
            orders, at = found.setdefault(name, ([], []))
            orders.append(order)
            at.append(rows[name][site.layer])
        self.places = {
            name: (np.asarray(orders, np.intp), np.asarray(at, np.intp))
            for name, (orders, at) in found.items()
        }


def _codes(entry: "Packed | Step", limits: NDArray[np.float64]) -> NDArray[np.uint16]:
    low, high = np.asarray(entry.lo, np.float64), np.asarray(entry.hi, np.float64)
    with np.errstate(all="ignore"):
        size = np.maximum(np.abs(low), np.abs(high))
        bits = limits - np.log2(size)
        scaled = np.clip(TOP - np.rint(bits * STEPS), FIRST, MOST)
        codes = np.where(np.isfinite(bits), scaled, UNREAD).astype(np.uint16)
    codes[(low == 0) & (high == 0)] = ZERO
    codes[high == np.inf] = POSINF
    codes[low == -np.inf] = NEGINF
    codes[(low == -np.inf) & (high == np.inf)] = BOTH
    codes[low > high] = UNREAD
    codes[np.isnan(low) | np.isnan(high)] = NAN
    return codes


def _one(values: list[T], several: T) -> T:
    return values[0] if len(set(values)) == 1 else several
