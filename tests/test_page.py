"""The page of a run: what it shows, that it stands alone, and how it behaves in a browser."""

import html.parser
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import anynan
from anynan._apps.compare.comparison import Comparison, Row
from anynan._apps.page.grid import BOTH, MOST, NAN, POSINF, TOP, UNREAD, ZERO, grids
from anynan._apps.page.page import page
from anynan._readings.history import Ring
from anynan._readings.step import Step
from anynan._runs.run import Run, of
from anynan._steps.tracked import inside
from tests.fake_adapter import track
from tests.fake_steps import training
from tests.steps import run_of, sites_of, step_of

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HALF = 65504.0


class Reader(html.parser.HTMLParser):
    """Collect what a page holds, and check that its elements close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "image", "rect", "line", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "image"):
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data


def failing(name: str = "blocks.0") -> Any:
    """Train for some steps until the second layer fails."""
    model, step = training(name)
    tracker = track(step, model=model)
    for i in range(5):
        tracker([1.0, 2.0 + i])
    with pytest.raises(anynan.NonFiniteError):
        tracker([1.0, -2.0])
    return tracker


def synthetic(steps: int, layers: int, value: Any, *, training: bool = False) -> Run:
    """Make a run of readings: ``value`` gives each layer's magnitudes at a step."""
    names = [f"layers.{i // 10}.part{i % 10}" for i in range(layers)]
    sites = sites_of(names, HALF)
    if training:
        sites += [replace(site, phase="backward", tensor="grad") for site in sites]
        weights = [replace(s, tensor="weight", parameter=s.layer) for s in sites[:layers]]
        sites += [replace(site, phase="backward", bound=True) for site in weights]
        sites += [replace(site, phase="parameter") for site in weights]
        sites = [replace(site, index=index) for index, site in enumerate(sites)]

    def step_at(step: int) -> Step:
        sizes = np.asarray(value(step, np.arange(len(sites))), np.float64).tolist()
        return step_of(step, *((site, -x, x) for site, x in zip(sites, sizes, strict=True)))

    return run_of(names, map(step_at, range(steps)))


def test_the_report_comes_first_then_picture_curves_and_numbers() -> None:
    text = page(of(inside(failing())))
    read = Reader(text)
    assert read.open == []
    words = read.words
    parts = ("NaN first appeared", "logarithm", "Headroom, layer by", "Growth", "The numbers")
    places = [words.index(part) for part in parts]
    assert places == sorted(places)
    assert len(text) < 500_000
    # A reader without scripts has the picture too.
    images = [str(held["href"]) for tag, held in read.tags if tag == "image"]
    assert {href.partition(",")[0] for href in images} == {"data:image/png;base64"}
    assert words.count("it began here") == 1


def test_the_numbers_are_those_of_the_history() -> None:
    tracker = failing()
    text = page(of(inside(tracker)))
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td class=n>(.*?)</td>", text)
    shown = {layer: float(bits) for layer, _, bits in rows[: len(rows) // 2] if bits}
    for layer in ("embed", "head"):
        seen = [r for r in tracker.history if r.layer == layer and r.phase == "forward"]
        assert shown[layer] == pytest.approx(min(r.headroom for r in seen), abs=0.06)


def test_hostile_names_stay_text() -> None:
    name = '</script><script>alert(1)</script>"><img src=x>\x1b[2J'
    text = page(of(inside(failing(name))))
    tags = [tag for tag, _ in Reader(text).tags]
    assert (tags.count("script"), tags.count("img")) == (1 + text.count("data-grid="), 0)
    assert "\x1b" not in text


def test_cells_tell_headroom_kind_and_what_was_not_read() -> None:
    held = [1.0, HALF, 0.0, math.nan, math.inf, 1e-7]
    grid = grids(synthetic(1, 6, lambda step, i: held))["forward"]
    bits = grid.bits()[:, 0]
    assert bits[0] == pytest.approx(math.log2(HALF), abs=0.02)
    assert bits[1] == 0
    assert grid.cells[2:5, 0].tolist() == [ZERO, NAN, BOTH]
    assert np.isnan(bits[2:5]).all()
    assert grid.cells[5, 0] < grid.cells[0, 0] < grid.cells[1, 0] == TOP < MOST < POSINF
    assert UNREAD not in grid.cells


def test_the_latest_steps_have_a_column_each() -> None:
    grid = grids(synthetic(500, 2, lambda step, i: [step + 1.0, 1.0]))["forward"]
    assert grid.columns[-64:] == tuple((step, step) for step in range(436, 500))
    assert grid.columns[0][0] == 0
    assert len(grid.columns) <= 128
    whole = [step for first, last in grid.columns for step in range(first, last + 1)]
    assert whole == list(range(500))
    # What is put together shows what came nearest to overflow.
    _, last = grid.columns[3]
    assert grid.bits()[0, 3] == pytest.approx(math.log2(HALF / (last + 1)), abs=0.02)


def test_many_layers_are_put_together_under_their_parents() -> None:
    run = synthetic(8, 10_000, lambda step, i: np.where((i == 7321) & (step == 5), math.nan, 1.0))
    grid = grids(run)["forward"]
    grouped, flat = grid.grouped(1000), grid.grouped(250)
    assert (grouped.layers[732], grouped.cells[732, 5]) == ("layers.732.* (10)", NAN)
    assert "layers.732.part1" in grouped.members[732]
    assert len(flat.layers) <= 250
    assert (grouped.cells == NAN).sum() == (flat.cells == NAN).sum() == 1
    assert sum(map(len, flat.members)) == 10_000


def test_a_history_is_walked_once_for_each_thing_that_is_told() -> None:
    run = synthetic(300, 300, lambda step, i: 1.0 + i, training=True)
    walk = patch.object(Ring, "entries", autospec=True, side_effect=Ring.entries)
    read = patch.object(Ring, "_reading", side_effect=Ring._reading)  # a static method
    with walk as walks, read as readings:
        page(run)
    assert 0 < walks.call_count <= 14
    # Single readings are made of the extremes and of the last step: not of every step.
    assert 0 < readings.call_count <= 4 * len(run.history.last())


WATCH = """
<script>
const problems = [];
addEventListener("error", (e) => problems.push(e.message));
addEventListener("unhandledrejection", (e) => problems.push(String(e.reason)));
addEventListener("securitypolicyviolation", (e) => problems.push(e.violatedDirective));
</script>
"""
ASK = """
<script>
setTimeout(() => {
  const figure = document.querySelector("figure[data-grid=forward]");
  const picture = figure.querySelector("svg");
  picture.focus();
  for (const key of KEYS) picture.dispatchEvent(new KeyboardEvent("keydown", { key }));
  const out = document.createElement("output");
  out.textContent = `${figure.querySelector(".read").textContent}|${problems.join(";")}`;
  document.body.append(out);
}, 500);
</script>
"""


def browsed(path: Path) -> subprocess.CompletedProcess[str]:
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
        "--virtual-time-budget=5000", f"--user-data-dir={path.parent / 'profile'}", "--dump-dom",
        path.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=True, timeout=120)


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_a_cell_is_read_with_the_keyboard_and_the_console_stays_empty(tmp_path: Path) -> None:
    text = page(of(inside(failing())))
    keys = ["ArrowDown", "ArrowDown", "ArrowLeft"]
    ask = ASK.replace("KEYS", repr(keys))
    text = text.replace("<head>", f"<head>{WATCH}").replace("</body>", f"{ask}</body>")
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    done = browsed(tmp_path / "page.html")
    (said,) = re.findall(r"<output>(.*?)</output>", done.stdout)
    read, _, problems = said.partition("|")
    assert problems == ""
    assert "CONSOLE" not in done.stderr
    assert re.fullmatch(r"\S+, step 4: \d+\.\d bits of headroom, magnitude \S+", read), read


def test_a_comparison_has_a_bar_for_every_layer_and_stands_alone(tmp_path: Path) -> None:
    name = "</svg><script>alert(1)</script>\x1b[2J"
    rows = [
        Row(layer, layer, "Linear", 0, "forward", error, 1e-7, 0.5)
        for layer, error in (("embed", 1e-7), (name, 1e-3), ("head", math.inf))
    ]
    compared = Comparison(rows[1], tuple(rows), notes=(f"{name} was seen",))
    compared.to_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    read = Reader(text)
    assert read.open == []
    bars = [float(held["width"] or 0) for tag, held in read.tags if tag == "rect"]
    assert len(bars) == 3
    assert bars[0] * 2 < bars[1] <= bars[2]
    assert not [tag for tag, _ in read.tags if tag == "script"]
    assert "\x1b" not in text
    assert not re.search(r"https?://(?!www\.w3\.org)|<link|@import|url\((?!#)", text)
    assert "10,000 times what rounding explains" in read.words
