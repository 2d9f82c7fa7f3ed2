"""A comparison on one page: the answer, and each layer's ratio as a bar."""

import math
import os
from html import escape
from typing import TYPE_CHECKING

from anynan._base.escaping import name as printed
from anynan._runs.page import framed

if TYPE_CHECKING:
    from anynan._compare.comparison import Comparison, Row

_WIDTH, _HEIGHT, _LEFT = 640, 16, 8
_MOST = 1000


def write(found: "Comparison", path: str | os.PathLike[str]) -> None:
    """Write the page to a file.

    Raises:
        OSError: If it cannot be written.
    """
    said = found.sentence()
    title = said[:1].upper() + said[1:]
    text = found.report(rows=0).partition("\n")[2].strip("\n")
    rows = [row for row in found.rows if row.ratio is not None]
    parts = [f"<h1{' class=bad' if found.place else ''}>{escape(title)}</h1>"]
    if text:
        parts.append(f'<pre tabindex="0">{escape(text)}</pre>')
    parts += ["<h2>Every layer</h2>", _picture(found, rows[:_MOST]), _table(found, rows[:_MOST])]
    if len(rows) > _MOST:
        parts.append(f'<p class="soft">{len(rows) - _MOST} more are not shown.</p>')
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(framed(title, "\n".join(parts), still=True))


def _picture(found: "Comparison", rows: list["Row"]) -> str:
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


def _bounded(row: "Row") -> float:
    ratio = row.ratio or 0.0
    return min(max(ratio, 1e-2), 1e12)


def _table(found: "Comparison", rows: list["Row"]) -> str:
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
