"""The heat map of one panel, and curves, as SVG."""

import base64
import json
import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from html import escape
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from anynan._apps.page.grid import BOTH, FIRST, NAN, NEGINF, POSINF, STEPS, TOP, UNREAD, ZERO, Grid
from anynan._base.escaping import name as printed
from anynan._diagnosis.rules.evidence import plural

WIDTH, HEIGHT = 6, 14  # of a cell; where there are few, they are wider
_WIDEST, _ALL = 28, 640
OVER = 4
FULL = 128.0  # bits of headroom from which on the colour stays
_CHARACTER = 6.7
_LABEL = 44  # characters
# From little headroom to much: yellow to blue, told apart with any eyes, and in grey.
_SCALE = (
    (255, 234, 70),
    (203, 186, 105),
    (148, 142, 119),
    (102, 105, 112),
    (60, 77, 110),
    (0, 34, 78),
)
_LEVELS, _COARSE = 240, 4
_KINDS = {NAN: ("NaN", "×"), POSINF: ("+Inf", "▲"), NEGINF: ("-Inf", "▼"), BOTH: ("±Inf", "◆")}  # noqa: RUF001
_BAD = {NAN: (179, 18, 63), POSINF: (214, 64, 0), NEGINF: (147, 51, 168), BOTH: (120, 20, 20)}
_LINES = ("#3b6fd4", "#d4663b", "#2f9e6e", "#a04fc4", "#b08a1e", "#c43b74", "#4a9fb5", "#7a7a86")


def shown(layer: str | None) -> str:
    """Give a layer's name as the page prints it."""
    if layer is None:
        return "(outside every layer)"
    return printed(layer) or "(the model itself)"


@cache
def palette() -> tuple[tuple[int, int, int], ...]:
    """Give the colours of a picture: nothing, headroom from none to much, then what is bad."""
    colours = [(0, 0, 0)]
    for i in range(_LEVELS):
        at = i / (_LEVELS - 1) * (len(_SCALE) - 1)
        low, part = min(int(at), len(_SCALE) - 2), at - min(int(at), len(_SCALE) - 2)
        pairs = zip(_SCALE[low], _SCALE[low + 1], strict=True)
        red, green, blue = (round(a + (b - a) * part) for a, b in pairs)
        colours.append((red, green, blue))
    return (*colours, *_BAD.values())


def key() -> str:
    """Explain colours and marks."""

    def colour(parts: tuple[int, int, int]) -> str:
        return f"rgb{parts}"

    scale = ", ".join(colour(part) for part in _SCALE)
    texts = [
        (
            f'<span><i style="width:6em;background:linear-gradient(to right, {scale})"></i>'
            f"headroom in bits: 0 ... {FULL / 4:.0f} ... {FULL:.0f}+</span>"
        )
    ]
    texts += [
        f'<span><i style="background:{colour(_BAD[code])}">{mark}</i>{name}</span>'
        for code, (name, mark) in _KINDS.items()
    ]
    texts.append('<span><i class="unread"></i>not read</span>')
    texts.append("<span>outlined: where it began; hatched: bad because of it</span>")
    return f'<p class="key soft">{"".join(texts)}</p>'


def heat_map(
    name: str, title: str, grid: Grid, origin: tuple[str | None, int] | None,
    since: int | None = None,
) -> str:  # fmt: skip
    """Draw layers by steps.

    Args:
        name: Of the panel.
        title: What it shows.
        grid: Its codes.
        origin: Layer and step where it began, if that is in this panel.
        since: The step where it began, wherever: what is bad from there on is because of it.
    """
    labels = [shown(layer) for layer in grid.layers]
    short = [text if len(text) <= _LABEL else f"...{text[3 - _LABEL :]}" for text in labels]
    left = round(max(map(len, short)) * _CHARACTER) + 10
    rows, columns = grid.cells.shape
    cell = max(WIDTH, min(_WIDEST, _ALL // columns))
    width, height = left + columns * cell + 60, OVER + rows * HEIGHT + 22
    place = f'x="{left}" y="{OVER}" width="{columns * cell}" height="{rows * HEIGHT}"'
    parts = [
        f'<rect class="unread" {place}/>',
        f'<image href="{_picture(grid)}" {place} preserveAspectRatio="none"/>',
    ]
    parts += [
        f'<text x="{left - 6}" y="{OVER + i * HEIGHT + 11}" text-anchor="end">{escape(text)}</text>'
        for i, text in enumerate(short)
    ]
    parts += _marks(name, grid, left, cell, origin, since)
    end = 0.0
    for i in sorted({0, columns // 2, columns - 1}):
        step, x = str(grid.columns[i][0]), left + i * cell
        if x > end:
            parts.append(f'<text class="axis" x="{x}" y="{height - 6}">{step}</text>')
            end = x + (len(step) + 1) * _CHARACTER
    parts.append(
        f'<rect class="cursor origin" width="{cell}" height="{HEIGHT}" visibility="hidden"/>'
    )
    said = {
        "layers": labels,
        "limits": [None if math.isnan(limit) else limit for limit in grid.limits],
        "columns": grid.columns,
        "cells": base64.b64encode(zlib.compress(grid.cells.astype("<u2").tobytes(), 9)).decode(),
        "kinds": {UNREAD: "not read", ZERO: "all zero"} | {k: v[0] for k, v in _KINDS.items()},
        "top": TOP,
        "steps": STEPS,
        "left": left,
        "over": OVER,
        "width": cell,
        "height": HEIGHT,
    }
    data = json.dumps(said, separators=(",", ":")).replace("<", "\\u003c")
    size = f"{plural(rows, 'row')} by {plural(columns, 'column')} of steps"
    about = f"{title}: {size}; the table below has the numbers"
    return (
        f'<figure data-grid="{name}"><h3>{escape(title)}</h3><div class="scroll">'
        f'<svg width="{width}" height="{height}" role="img" tabindex="0" '
        f'aria-label="{escape(about)}">{"".join(parts)}</svg></div>'
        f'<p class="read" aria-live="polite"></p>'
        f'<script type="application/json">{data}</script></figure>'
    )


def inside(grid: Grid, groups: Grid, titles: Sequence[str]) -> str:
    """Show, folded, the layers of each group of several.

    Args:
        grid: Every layer.
        groups: The same, put together.
        titles: What is side by side in a row.
    """
    row_of = {layer: i for i, layer in enumerate(grid.layers)}
    width = grid.cells.shape[1] * WIDTH
    parts = []
    if len(titles) > 1:
        parts.append(f'<p class="soft">From left to right: {", ".join(titles)}.</p>')
    for title, layers in zip(groups.layers, groups.members, strict=True):
        if len(layers) < 2:
            continue
        paths = [shown(layer).split(".") for layer in layers]
        same = 0
        while all(len(path) > same + 1 and path[same] == paths[0][same] for path in paths):
            same += 1
        names = [".".join(path[same:]) for path in paths]
        pixels = _picture(grid.rows([row_of[layer] for layer in layers]), every=_COARSE)
        parts.append(
            f"<details><summary>{escape(shown(title))}</summary>"
            f'<div class="inside scroll"><pre>{escape(chr(10).join(names))}</pre><img alt="" '
            f'src="{pixels}" width="{width}" height="{len(layers) * HEIGHT}"></div></details>'
        )
    return f"<details><summary>Layer by layer</summary>{''.join(parts)}</details>"


def _picture(grid: Grid, every: int = 1) -> str:
    bits = np.nan_to_num(grid.bits(), nan=0.0)
    # The fewer bits are left, the more each one shows.
    levels = 1 + np.rint(np.sqrt(np.clip(bits / FULL, 0, 1)) * (_LEVELS - 1))
    levels = levels - levels % every
    pixels = np.where(grid.cells >= FIRST, np.maximum(levels, 1), 0)
    pixels = np.where(grid.cells == ZERO, _LEVELS, pixels).astype(np.uint8)
    for i, code in enumerate(_BAD):
        pixels[grid.cells == code] = 1 + _LEVELS + i
    used = sorted({0, *np.unique(pixels).tolist()})
    colours = palette()
    places = np.searchsorted(used, pixels).astype(np.uint8)
    return data_uri(places, [colours[i] for i in used])


def _marks(
    name: str, grid: Grid, left: int, wide: int, origin: tuple[str | None, int] | None,
    since: int | None,
) -> list[str]:  # fmt: skip
    """Mark every bad cell: those side by side, which are alike, by one rectangle."""
    columns = range(len(grid.columns))
    parts = [
        f'<pattern id="{name}-{code}" patternUnits="userSpaceOnUse" x="{left}" y="{OVER}" '
        f'width="{wide}" height="{HEIGHT}"><text class="mark" x="{left + wide / 2}" '
        f'y="{OVER + 11}">{mark}</text></pattern>'
        for code, (_, mark) in _KINDS.items()
    ]
    began = None
    if origin is not None:
        at = [i for i, (first, last) in enumerate(grid.columns) if first <= origin[1] <= last]
        rows = [i for i, layers in enumerate(grid.members) if origin[0] in layers]
        began = (rows[0], at[0]) if rows and at else None
    for row in np.flatnonzero((grid.cells >= BOTH).any(axis=1)).tolist():
        y = OVER + row * HEIGHT
        codes = [int(code) for code in grid.cells[row]]
        after = [
            since is not None and grid.columns[i][1] >= since and (row, i) != began for i in columns
        ]
        for (code, hatched), group in groupby(columns, lambda i: (codes[i], after[i])):  # noqa: B023
            cells = list(group)
            if code < BOTH:
                continue
            place = (
                f'x="{left + cells[0] * wide}" y="{y}" width="{len(cells) * wide}" '
                f'height="{HEIGHT}"'
            )
            parts.append(f'<rect {place} fill="url(#{name}-{code})"/>')
            if hatched:
                parts.append(f'<rect {place} fill="url(#hatch)"/>')
    if began is not None:
        x, y = left + began[1] * wide, OVER + began[0] * HEIGHT
        parts.append(
            f'<rect class="origin" x="{x}" y="{y}" width="{wide}" height="{HEIGHT}">'
            "<title>it began here</title></rect>"
        )
    return parts


def _power(value: float) -> str:
    """Spell a power of ten: ``1e+6``, ``3e+6``, ``0.32``."""
    if abs(value) < 3:
        return f"{10**value:.2g}"
    return f"{10 ** (value % 1):.2g}e{math.floor(value):+d}"


def _logarithms(points: Iterable[tuple[int, float]]) -> Iterator[tuple[int, float]]:
    return ((step, math.log10(value)) for step, value in points if 0 < value < math.inf)


def _label(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text class="axis" x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'


Curve = tuple[str, Sequence[tuple[int, float]]]


def curves(title: str, lines: Sequence[Curve], limit: tuple[str, float] | None = None) -> str:
    """Draw magnitudes over steps, on a logarithmic scale.

    Args:
        title: What they are.
        lines: Names, and steps with magnitudes.
        limit: A dtype and its largest value, drawn where it is near.
    """
    logs = ((name, list(_logarithms(points))) for name, points in lines)
    kept = [(name, points) for name, points in logs if len(points) > 1][: len(_LINES)]
    if not kept:
        return ""
    steps, values = zip(*(point for _, points in kept for point in points), strict=True)
    low, high = min(values), max(values)
    near = limit is not None and math.log10(limit[1]) - high < max(8.0, high - low)
    if near and limit is not None:
        high = max(high, math.log10(limit[1]))
    low, high = (low - 0.5, high + 0.5) if high - low < 1 else (low, high)
    first, last = min(steps), max(steps)
    width, height, left, right = 620, 200, 60, 10

    def place(step: float, value: float) -> tuple[float, float]:
        x = left + (step - first) / max(last - first, 1) * (width - left - right)
        return round(x, 1), round(10 + (high - value) / (high - low) * (height - 30), 1)

    parts = []
    for value in (low, (low + high) / 2, high):
        x, y = left - 6, place(first, value)[1] + 4
        parts.append(_label(x, y, "end", _power(value)))
    for step, anchor in ((first, "start"), (last, "end")):
        parts.append(_label(place(step, low)[0], height - 2, anchor, str(step)))
    if near and limit is not None:
        _, y = place(first, math.log10(limit[1]))
        parts.append(f'<line class="limit" x1="{left}" x2="{width - right}" y1="{y}" y2="{y}"/>')
    names = []
    for (name, points), colour in zip(kept, _LINES, strict=False):
        path = " ".join(f"{x},{y}" for x, y in (place(*point) for point in points))
        parts.append(f'<polyline class="curve" stroke="{colour}" points="{path}"/>')
        names.append(f'<span><i style="background:{colour}"></i>{escape(name)}</span>')
    if near and limit is not None:
        names.append(f"<span>dashed: the largest {escape(limit[0])}</span>")
    return (
        f'<figure><h3>{escape(title)}</h3><svg width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(title)}, steps {first} to {last}">{"".join(parts)}</svg>'
        f'<p class="key soft">{"".join(names)}</p></figure>'
    )


def data_uri(pixels: NDArray[np.uint8], palette: Sequence[tuple[int, int, int]]) -> str:
    """Return a PNG as a ``data:`` address; the palette's first colour is transparent.

    Example:
        >>> import numpy as np
        >>> from anynan._apps.page.picture import data_uri
        >>> data_uri(np.zeros((1, 1), np.uint8), [(0, 0, 0)])[:22]
        'data:image/png;base64,'
    """
    height, width = pixels.shape
    lines = np.zeros((height, width + 1), np.uint8)  # each begins with its filter: none
    lines[:, 1:] = pixels
    colours = bytes(part for colour in palette for part in colour)
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", colours),
        (b"tRNS", b"\0"),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    )
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(held)) + kind + held + struct.pack(">I", zlib.crc32(kind + held))
        for kind, held in parts
    )
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
