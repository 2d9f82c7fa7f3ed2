"""What a comparison found, and how it is told."""

import math
import os
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from anynan._apps.compare.captures import Choice, Way
from anynan._base import products
from anynan._base.escaping import escaped
from anynan._base.escaping import name as printed
from anynan._base.tables import table
from anynan.events import Source

_WIDTH, _HEIGHT, _LEFT = 640, 16, 8  # of the page's picture
_MOST = 1000
BEYOND = 8.0  # times the floor: what rounding does not explain; measured in docs/benchmarks.md


@dataclass(frozen=True, slots=True)
class Row:
    """Hold how much one call of a layer differs between two runs.

    Attributes:
        layer: Its path in the first model.
        other: Its path in the second, None where it has no partner.
        kind: What the layer is in the first: the name of its class.
        call: Which call of it, from 0.
        way: ``forward`` or ``backward``.
        error: Relative L2 distance of what it made; None where nothing could be compared.
        floor: What rounding explains of it: how far the first run moves when weights and inputs
            move by one rounding unit.
        given: The same ratio as ``ratio``, of its inputs.
        local: The ratio where the second model's layer was given the first one's inputs; None
            where that was not tried.
        other_call: Which call of the second model's layer.
        broken: Where it made NaN or +Inf: ``first``, ``second``, ``both`` or nowhere.
        shapes: Of the first and the second, where their sizes differ.
    """

    layer: str
    other: str | None
    kind: str
    call: int
    way: Way
    error: float | None
    floor: float
    given: float | None
    local: float | None = None
    other_call: int = 0
    broken: str = ""
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def ratio(self) -> float | None:
        """How many times what rounding explains."""
        return None if self.error is None else self.error / self.floor


@dataclass(frozen=True, slots=True)
class Parting:
    """Hold the first operation whose result the second model does not have, and its counterpart.

    Attributes:
        last: The last operation whose result both have, None if there is none.
        name: The first model's operation.
        source: Its line.
        other: The second model's, None where it has none left.
        other_source: Its line.
    """

    last: str | None
    name: str | None
    source: Source | None
    other: str | None
    other_source: Source | None


@dataclass(frozen=True, slots=True)
class Turn:
    """Hold a discrete choice that the two runs made differently.

    Attributes:
        choice: The first run's.
        share: The share of its elements that differ; None where the second run draws too, but
            nothing of that shape.
        rounding: Whether a rounding unit alone changes the choice in the first run.
        held: Whether the second run was held to the first one's choice.
    """

    choice: Choice
    share: float | None
    rounding: bool
    held: bool = False

    @property
    def differs(self) -> bool:
        """Tell whether this is a difference between the models, not rounding or chance."""
        return not self.rounding and not (self.held and self.choice.drawn)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Hold where two runs first differ.

    Attributes:
        place: The first layer that differs: its inputs agree, its outputs do not. None if
            everything that was compared is within what rounding explains.
        rows: Every call of a layer, in order: the forward pass, then the backward pass.
        operation: Which operation of that layer's own code differs first, if it is known.
        weights: Weights of the two models that differ, by the first model's names, with the
            relative distance.
        settings: Of that layer, those that differ: name, the first one's, the second one's.
        turns: Discrete choices that differ.
        holes: What has no partner or could not be compared.
        unit: The unit roundoff of the coarser side.
        notes: What else was not seen.
        limit: The ratio beyond which rounding is no explanation.
    """

    place: Row | None
    rows: tuple[Row, ...]
    operation: Parting | None = None
    weights: tuple[tuple[str, float], ...] = ()
    settings: tuple[tuple[str, Any, Any], ...] = ()
    turns: tuple[Turn, ...] = ()
    holes: tuple[str, ...] = ()
    unit: float = 0.0
    notes: tuple[str, ...] = field(default=())
    limit: float = BEYOND

    @property
    def ratio(self) -> float:
        """Return the largest ratio of all that was compared."""
        return max((row.ratio for row in self.rows if row.ratio is not None), default=0.0)

    @property
    def differs(self) -> bool:
        """Tell whether the two differ by more than rounding explains; ``sys.exit`` takes it."""
        forward = [row for row in self.rows if row.way == "forward"]
        misfit = bool(forward) and forward[-1].shapes is not None
        return self.place is not None or misfit or any(turn.differs for turn in self.turns)

    @property
    def shapes(self) -> Row | None:
        """Return the first call that makes another number of elements in the second model."""
        return next((row for row in self.rows if row.shapes is not None), None)

    @property
    def sensitive(self) -> tuple[Row, ...]:
        """Return the layers that are beyond the limit by themselves, most sensitive first."""
        found = [row for row in self.rows if row.local is not None and row.local > self.limit]
        return tuple(sorted(found, key=lambda row: -(row.local or 0.0)))

    def __str__(self) -> str:
        return self.report()

    def sentence(self) -> str:
        """Return the answer in a sentence."""
        bad = next((row for row in self.rows if row.broken == "both"), None)
        if bad is None:
            return self._answer()
        way = "" if bad.way == "forward" else " of the backward pass"
        return f"{self._answer()}; both made NaN or Inf, first{way} in {_layer(bad.layer)}"

    def _answer(self) -> str:
        compared = [row for row in self.rows if row.ratio is not None]
        if self.place is None and self.shapes is not None:
            first, second = self.shapes.shapes or ((), ())
            where = _layer(self.shapes.layer)
            return (
                f"shapes differ first in {where}: it makes {first} in the first model and "
                f"{second} in the second"
            )
        if not compared:
            return "nothing could be compared: no layer of the two has a partner"
        if self.place is not None:
            return self._answer_of(self.place)
        turned = next((turn for turn in self.turns if turn.differs), None)
        if turned is not None:
            choice = turned.choice
            within = self._within(len(compared))
            rest = f"within {times(within)} what rounding explains" if within else "identical"
            return (
                f"everything{'' if turned.held else ' before'} is {rest}, but "
                f"`{choice.name}` in {_layer(choice.layer)} "
                f"{'draws' if choice.drawn else 'chooses'} otherwise"
            )
        if not self.ratio:
            return "no difference: everything that was compared is identical"
        return f"no difference: everything is within {times(self.ratio)} what rounding explains"

    def _answer_of(self, row: Row) -> str:
        before = self._within(self.rows.index(row))
        where = _layer(row.layer)
        if row.call:
            where += f", call {row.call + 1}"
        if row.other is not None and row.other != row.layer:
            call = f", call {row.other_call + 1}," if row.other_call != row.call else ""
            where += f" ({_layer(row.other)}{call} of the second)"
        way = "" if row.way == "forward" else " of the backward pass"
        if row.way == "backward" and row.given is None:
            where = f"the gradient that arrives at {where}"
        rest = f"within {times(before)} that" if before else "identical"
        return f"first{way} in {where}, {_far(row)}; everything before is {rest}"

    def _within(self, count: int) -> float:
        ratios = [row.ratio for row in self.rows[:count] if row.ratio is not None]
        if self.place is not None:
            ratios = [ratio for ratio in ratios if ratio <= self.limit]
        return max(ratios, default=0.0)

    def report(self, rows: int = 12) -> str:
        """Return the answer, the table around the place, and what was not compared.

        Args:
            rows: How many rows of the table at most.
        """
        said = self.sentence()
        lines = [said[:1].upper() + said[1:], ""]
        if self.place is not None:
            lines += self._cause()
        lines += _table(self._shown(rows))
        for turn in [turn for turn in self.turns if not turn.choice.gate][:3]:
            lines.append(_turned(turn))
        if self.sensitive:
            named = ", ".join(
                f"{_layer(row.layer)} {times(row.local)}" for row in self.sensitive[:5]
            )
            lines.append(f"  sensitive  by themselves, given the first model's inputs: {named}")
        lines += [f"  not compared  {hole}" for hole in self.holes[:5]]
        if len(self.holes) > 5:
            lines.append(f"  not compared  and {len(self.holes) - 5} more")
        lines += [f"  note  {note}" for note in self.notes]
        return "\n".join(map(escaped, lines)).rstrip()

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the answer, a picture of every layer's ratio and the table to one HTML file.

        Raises:
            OSError: If it cannot be written.
        """
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            file.write(_page(self))

    def _cause(self) -> list[str]:
        lines = []
        found = self.operation
        row = self.place
        assert row is not None
        mine = [item for item in self.weights if item[0].rpartition(".")[0] == row.layer]
        for name, far in mine[:3]:
            said = f"differs by {_share(far)}"
            if not math.isfinite(far):
                said = "is nowhere in the second"
                if math.isnan(far):
                    said = "holds NaN or Inf in one of the two, and not in the other"
            lines.append(f"  weight  {printed(name)} {said}")
        for name, x, y in self.settings[:3]:
            first, second = reprlib.repr(x), reprlib.repr(y)
            lines.append(f"  setting {name} is {first} in the first, {second} in the second")
        if not mine and found is not None:
            if found.last is not None:
                lines.append(f"  agree   up to {found.last}")
            if found.name is not None:
                lines.append(f"  first   {found.name}{_at(found.source)}")
            if found.other is not None:
                lines.append(f"  second  {found.other}{_at(found.other_source)}")
        return [*lines, ""] if lines else []

    def _shown(self, most: int) -> Sequence[Row]:
        if not most:
            return ()
        compared = [row for row in self.rows if row.ratio is not None]
        if self.place is None:
            worst = sorted(compared, key=lambda row: -(row.ratio or 0.0))[:most]
            return [row for row in compared if row in worst]
        at = compared.index(self.place)
        start = max(0, min(at - most // 2, len(compared) - most))
        return compared[start : start + most]


def _far(row: Row) -> str:
    """Say how far a row is apart."""
    if row.ratio == math.inf:
        if row.broken in ("first", "second"):
            return f"which makes NaN or Inf in the {row.broken} model alone"
        if row.broken:
            return "which makes NaN or Inf in other places"
        return "which is 0 in the first model alone"
    return f"{times(row.ratio)} what rounding explains"


def _table(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    cells = [("layer", "", "apart", "rounding", "ratio")]
    for row in rows:
        call = f" #{row.call}" if row.call else ""
        way = "" if row.way == "forward" else "backward"
        cells.append(
            (f"{row.layer or '(model)'}{call}", way, f"{row.error:.1e}", f"{row.floor:.1e}",
             f"{row.ratio:.1f}")
        )  # fmt: skip
    return [*(f"  {line}" for line in table(cells, right=(2, 3, 4))), ""]


def _turned(turn: Turn) -> str:
    choice = turn.choice
    drawn = "draws" if choice.drawn else "choices"
    said = f"{_share(turn.share)} of its {drawn} differ" if turn.share is not None else (
        "the second model draws in another way"
    )  # fmt: skip
    why = [
        "a rounding unit alone turns it, too" if turn.rounding else "",
        f"the second model was held to the first one's {drawn}"
        if turn.held
        else "what comes after was not compared",
    ]
    return "; ".join(
        [f"  turn    {choice.name} in {_layer(choice.layer)}{_at(choice.source)}: {said}",
         *filter(None, why)]
    )  # fmt: skip


def times(ratio: float | None) -> str:
    """Spell a ratio as people say it."""
    if ratio is None:
        return "-"
    if math.isinf(ratio):
        return "infinitely many times"
    return f"{ratio:.1f} times" if ratio < 10 else f"{ratio:,.0f} times"


def _share(value: float) -> str:
    return f"{100 * value:.2g} %" if value < 1 else f"{value:.3g} times its size"


def _layer(path: str) -> str:
    return f"`{printed(path)}`" if path else "the model's own code"


def _at(source: Source | None) -> str:
    """Say where: a model that is a library's has its line there."""
    if source is None:
        return ""
    if source.via is not None:
        return f"  {source.via}" + (f": {source.via_text}" if source.via_text else "")
    return f"  {source.place} in {source.function}: {source.text}"


def _page(found: Comparison) -> str:
    """Put the answer, a picture and a table on one page."""
    framed: Any = products.part("page", "page").framed
    said = found.sentence()
    title = said[:1].upper() + said[1:]
    text = found.report(rows=0).partition("\n")[2].strip("\n")
    rows = [row for row in found.rows if row.ratio is not None]
    parts = [f"<h1{' class=bad' if found.place else ''}>{escape(title)}</h1>"]
    if text:
        parts.append(f'<pre tabindex="0">{escape(text)}</pre>')
    parts += [
        "<h2>Every layer</h2>",
        _picture(found, rows[:_MOST]),
        _html_table(found, rows[:_MOST]),
    ]
    if len(rows) > _MOST:
        parts.append(f'<p class="soft">{len(rows) - _MOST} more are not shown.</p>')
    page: str = framed(title, "\n".join(parts), still=True)
    return page


def _picture(found: Comparison, rows: list[Row]) -> str:
    """Draw the ratios, on a scale of powers of ten, in the order of execution."""
    top = max([math.log10(_bounded(row)) for row in rows] + [math.log10(found.limit) + 1, 2.0])
    low = -2.0

    def x(ratio: float) -> float:
        at = max(math.log10(ratio), low) if ratio > 0 else low
        return round(_LEFT + (at - low) / (top - low) * (_WIDTH - 2 * _LEFT), 1)

    height = 6 * len(rows) + _HEIGHT
    limit = x(found.limit)
    told = "How many times what rounding explains each layer is apart"
    size = f'viewBox="0 0 {_WIDTH} {height}" width="100%"'
    drawn = [f'<svg role="img" aria-label="{told}" {size}>']
    for i, row in enumerate(rows):
        beyond = (row.ratio or 0.0) > found.limit
        colour = "#c0392b" if row is found.place else "#e59866" if beyond else "#5499c7"
        end = x(_bounded(row))
        title = f"{printed(row.layer) or '(model)'} {row.way}: {row.ratio:.3g}"
        drawn.append(
            f'<rect x="{_LEFT}" y="{6 * i}" width="{max(end - _LEFT, 1)}" height="5" '
            f'fill="{colour}"><title>{escape(title)}</title></rect>'
        )
    drawn.append(
        f'<line x1="{limit}" x2="{limit}" y1="0" y2="{height - _HEIGHT}" stroke="currentColor" '
        f'stroke-dasharray="3 3"/><text x="{limit}" y="{height - 3}" font-size="11" '
        f'text-anchor="middle" fill="currentColor">{found.limit:g} times</text></svg>'
    )
    return "".join(drawn)


def _bounded(row: Row) -> float:
    ratio = row.ratio or 0.0
    return min(max(ratio, 1e-2), 1e12)


def _html_table(found: Comparison, rows: list[Row]) -> str:
    heads = ("layer", "of the second", "pass", "apart", "rounding", "ratio")
    head = "".join(f"<th>{text}</th>" for text in heads)
    lines = [f"<table><thead><tr>{head}</tr></thead><tbody>"]
    for row in rows:
        cells = (
            f"{printed(row.layer) or '(model)'}{f' #{row.call}' if row.call else ''}",
            printed(row.other or ""), row.way, f"{row.error:.2e}", f"{row.floor:.2e}",
            f"{row.ratio:.1f}",
        )  # fmt: skip
        mark = " class=bad" if row is found.place else ""
        lines.append(
            f"<tr{mark}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
        )
    return "\n".join([*lines, "</tbody></table>"])
