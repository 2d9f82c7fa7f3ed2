"""Put a run's report, picture and numbers together on one page."""

import math
import os
from html import escape

import numpy as np

from anynan._apps.page.grid import BOTH, NAN, NEGINF, PANELS, POSINF, Grid, beside, grids
from anynan._apps.page.picture import curves, heat_map, inside, key, shown
from anynan._base.escaping import name as printed
from anynan._diagnosis.rules.evidence import magnitude, plural
from anynan._reports.report import headline, render
from anynan._runs.narrower import ONLY
from anynan._runs.overview import outlook, overview
from anynan._runs.record import Record
from anynan.events import Event

ROWS = 1000  # of a picture; more layers are put together under their parents
# In all pictures together, and in those that are folded; more have fewer columns.
CELLS, FOLDED = 128_000, 1_280_000
LISTED = 1000  # rows of a table, and of all tables of a model so large that it needs three
_CURVES = 8
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_BAD = {NAN: "NaN", POSINF: "+Inf", NEGINF: "-Inf", BOTH: "±Inf"}
_HATCH = (
    '<svg width="0" height="0" aria-hidden="true"><defs><pattern id="hatch" width="4" height="4" '
    'patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="1.4" height="4" '
    'fill="#fff" fill-opacity=".65"/></pattern></defs></svg>'
)


def write(run: Record, path: str | os.PathLike[str]) -> None:
    """Write the page to a file.

    Raises:
        OSError: If it cannot be written.
    """
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(page(run))


def page(run: Record) -> str:
    """Return the page: text first, then the picture, then the numbers behind it."""
    bad = [event for event in run.events if event.severity == "bad"]
    event = bad[0] if bad else None
    title = headline(event) if event is not None else "Nothing went bad"
    panels = grids(run)
    parts = [
        f"<h1{' class=bad' if bad else ''}>{escape(title)}</h1>",
        f'<p class="soft">{escape(_about(run))}</p>',
    ]
    if event is not None:
        parts.append(
            f'<pre tabindex="0">{escape(render(event).partition(chr(10))[2].strip(chr(10)))}</pre>'
        )
    told = outlook(run)
    pairs = (line.split(maxsplit=1) for line in told)
    items = "".join(f"<li><b>{escape(word)}</b>: {escape(text)}</li>" for word, text in pairs)
    parts += [f"<ul>{items}</ul>"] if items else []
    parts += _pictures(run, panels, event)
    parts += _growth(run, panels, event)
    parts += ["<h2>The run</h2>", f'<pre tabindex="0">{escape(overview(run, told))}</pre>']
    parts += _tables(panels)
    return framed(title, "\n".join(parts))


def framed(title: str, body: str, *, still: bool = False) -> str:
    """Put a body into a page that stands alone; one that is ``still`` has no script."""
    folder = os.path.dirname(__file__)
    style, script = (_text(os.path.join(folder, name)) for name in ("page.css", "page.js"))
    moved = "" if still else f"<script>\n{script}</script>\n"
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f"{body}\n</main>\n{moved}</body>\n</html>\n"
    )


def _text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _about(run: Record) -> str:
    steps = run.history.steps()
    parts = [printed(run.name)]
    if steps:
        parts.append(f"steps {steps[0]} to {steps[-1] if run.open is None else run.open.number}")
    parts += [f"{printed(name)} {printed(version)}" for name, version in run.versions.items()]
    return ", ".join(parts)


def _origin(event: Event | None, panel: str) -> tuple[str | None, int] | None:
    if event is None or event.phase not in PANELS[panel][1]:
        return None
    return event.layer, event.step


def _pictures(run: Record, panels: dict[str, Grid], event: Event | None) -> list[str]:
    if not panels:
        return ["<p>No step was read.</p>"]
    parts = [_HATCH, f"<h2>Headroom, layer by layer and step by step: {ONLY}</h2>", key()]
    drawn = {name: grid.grouped(ROWS) for name, grid in panels.items()}
    most = CELLS // sum(len(grid.layers) for grid in drawn.values())
    folded = FOLDED // sum(len(grid.layers) for grid in panels.values())
    for name, grid in panels.items():
        kept, origin = drawn[name].narrowed(most), _origin(event, name)
        since = None if event is None else event.step
        parts.append(heat_map(name, PANELS[name][0], kept, origin, since))
        if len(kept.layers) < len(grid.layers):
            text = (
                f"{len(grid.layers):,} layers in {plural(len(kept.layers), 'row')}: a row is what "
                "came nearest to overflow in it"
            )
            parts.append(f'<p class="soft">{text}</p>')
    if any(len(drawn[name].layers) < len(grid.layers) for name, grid in panels.items()):
        titles = [PANELS[name][0].lower() for name in panels]
        joined = beside([grid.narrowed(folded) for grid in panels.values()])
        parts.append(inside(joined, joined.grouped(ROWS), titles))
    if event is not None and not any("it began here" in part for part in parts):
        parts.append(
            f'<p class="soft">It began in {escape(shown(event.layer))}, step {event.step}: nothing '
            "was read just there, so it has no cell.</p>"
        )
    if len(run.history) > 1:
        single = most >= max(len(grid.columns) for grid in panels.values())
        latest = "The latest steps have a column each, earlier ones" if single else "Steps"
        parts.append(
            f'<p class="soft">{latest} are merged. Point at a cell, or use the arrow keys, '
            "to read it.</p>"
        )
    return parts


def _growth(run: Record, panels: dict[str, Grid], event: Event | None) -> list[str]:
    """Draw the layers that led there, or those nearest to overflow, and the gradient's norm."""
    panel = "backward" if event is not None and event.phase == "backward" else "forward"
    parts = [_magnitudes(panels[panel], event)] if panel in panels else []
    parts.append(curves("Gradient norm", [("all weights", run.history.norms())]))
    moved = [(step, update) for step, update, _ in run.history.updates()]
    parts.append(curves("Update norm", [("all weights", moved)]))
    drawn = [part for part in parts if part]
    return ["<h2>Growth</h2>", *drawn] if drawn else []


def _magnitudes(grid: Grid, event: Event | None) -> str:
    trail = [] if event is None else [layer for layer, _ in event.trail if layer in grid.layers]
    at = [grid.layers.index(layer) for layer in trail[-_CURVES:]] or _tightest(grid)[:_CURVES]
    bits = grid.bits()
    last = [column[1] for column in grid.columns]
    lines = []
    for row in at:
        sizes = grid.limits[row] * np.exp2(-bits[row])
        points = [(s, float(v)) for s, v in zip(last, sizes, strict=True) if v == v]
        lines.append((shown(grid.layers[row]), points))
    known = {(grid.dtypes[row], grid.limits[row]) for row in at}
    limit = known.pop() if len(known) == 1 else None
    return curves("Largest magnitudes", lines, None if limit and limit[1] != limit[1] else limit)


def _tightest(grid: Grid) -> list[int]:
    best = np.nan_to_num(grid.bits(), nan=np.inf).min(axis=1)
    return [int(row) for row in np.argsort(best, kind="stable") if math.isfinite(best[row])]


def _tables(panels: dict[str, Grid]) -> list[str]:
    parts = ["<h2>The numbers</h2>"] if panels else []
    many = sum(len(grid.layers) for grid in panels.values()) > 3 * LISTED
    listed = LISTED // len(panels) if many else LISTED
    for name, grid in panels.items():
        bits = grid.bits()
        rows = []
        for row, layer in enumerate(grid.layers[:listed]):
            known = np.flatnonzero(~np.isnan(bits[row]))
            cells = [shown(layer), grid.dtypes[row] or "several", "", "", "", ""]
            if known.size:
                best = known[np.argmin(bits[row, known])]
                cells[2] = f"{bits[row, best]:.1f}"
                cells[3] = _when(grid.columns[best])
                cells[4] = _size(grid.limits[row], bits[row, known[-1]])
            held = [_BAD[code] for code in _BAD if (grid.cells[row] == code).any()]
            cells[5] = ", ".join(held)
            classes = ("", "", " class=n", " class=n", " class=n", " class=bad")
            pairs = zip(cells, classes, strict=True)
            rows.append("<tr>" + "".join(f"<td{c}>{escape(x)}</td>" for x, c in pairs) + "</tr>")
        heads = ("layer", "dtype", "least headroom, bits", "at step", "last magnitude", "bad")
        more, unfolded = len(grid.layers) - listed, " open" if len(grid.layers) <= 40 else ""
        note = f'<p class="soft">and {plural(more, "more layer")}</p>' if more > 0 else ""
        head = "".join(f'<th scope="col">{head}</th>' for head in heads)
        parts.append(
            f"<details{unfolded}><summary>{PANELS[name][0]}</summary>"
            f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{''.join(rows)}</tbody></table>{note}</div></details>"
        )
    return parts


def _when(column: tuple[int, int]) -> str:
    return str(column[0]) if column[0] == column[1] else f"{column[0]} to {column[1]}"


def _size(limit: float, bits: float) -> str:
    return "" if math.isnan(limit) else magnitude(float(limit * 2.0**-bits))
