"""One training that fails: looked at, kept, foretold, shown again, scanned."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anynan
from anynan._cli.commands import main

pytest.importorskip("safetensors")

X = np.ones((8, 4), np.float32)
RATE, MOST = 0.2, 200


@dataclass
class Failed:
    """Hold what a training left behind.

    Attributes:
        tracker: It is over, and can be asked.
        folder: Where ``run.jsonl`` and ``bundle`` are.
        event: What ended the training.
        reports: What was said on the way, every fourth step.
        files: Weights that were saved after training went on without anybody looking.
    """

    tracker: Any
    folder: Path
    event: anynan.Event
    reports: list[str]
    files: list[Path]


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Failed]:
    """Train; the weights grow by a tenth in every step, and their product is float16."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    base: Any = torch.nn.Module

    class Grow(base):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(4))

        def forward(self, x: Any) -> Any:
            return (x * self.w).half()

    folder = tmp_path_factory.mktemp("torch")
    model = torch.nn.Sequential()
    model.add_module("grow", Grow())
    optimizer = torch.optim.SGD(model.parameters(), RATE)

    def step() -> None:
        optimizer.zero_grad()
        (-model(torch.from_numpy(X)).float().square().mean()).backward()
        optimizer.step()

    tracker = anynan.torch.track(model, save=folder / "bundle")
    tracker.to_jsonl(folder / "run.jsonl")
    reports = []
    with pytest.raises(anynan.NonFiniteError) as caught:
        for number in range(MOST):
            step()
            if number % 4 == 0:
                reports.append(tracker.report())
    tracker.remove()
    for _ in range(4):
        step()
    files = [folder / "weights.pt", folder / "weights.safetensors"]
    torch.save(model.state_dict(), files[0])
    save_file(model.state_dict(), files[1])
    yield Failed(tracker, folder, caught.value.event, reports, files)
    tracker.remove()


def test_the_page(failed: Failed) -> None:
    failed.tracker.to_html(failed.folder / "page.html")
    text = (failed.folder / "page.html").read_text(encoding="utf-8")
    assert "<h1 class=bad>+Inf first appeared" in text
    assert text.count("<title>it began here</title>") == 1
    assert len(text) < 500_000
    (layer,) = re.findall(r"<tr><td>grow</td>.*?</tr>", text.partition(">Outputs</summary>")[2])[:1]
    assert "float16" in layer and "+Inf" in layer


def test_the_file_and_its_report(failed: Failed, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(failed.folder / "run.jsonl")
    main(["report", path, "--html", str(failed.folder / "again.html")])
    out = capsys.readouterr().out
    assert "+Inf first appeared" in out
    assert "grow" in out
    assert "65,504" in out
    read = anynan.load(path)
    assert read.events[0] == failed.tracker.events[0]
    assert read.history.steps() == failed.tracker.history.steps()
    assert "it began here" in (failed.folder / "again.html").read_text(encoding="utf-8")


def test_it_was_foretold(failed: Failed) -> None:
    told = [re.search(r"float16 overflows in grow in about (\d+) steps", x) for x in failed.reports]
    first = next(at for at, found in enumerate(told) if found)
    ahead = failed.event.step - 4 * first
    assert ahead >= 20
    found = told[first]
    assert found is not None and int(found[1]) == pytest.approx(ahead, abs=3)


def test_its_headroom_in_a_narrower_dtype(failed: Failed) -> None:
    found = {each.layer: each for each in anynan.reports.headroom(failed.tracker, "float8")}
    bits = found["grow"].over
    assert bits is not None and bits < -6  # 448 is the largest, and 65,504 was nearly there
    assert str(found["grow"]).startswith("grow: overflows at the top (forward, step ")


def test_the_bundle_shows_it_again(failed: Failed, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(failed.folder / "bundle")]) == 0
    assert "the same operation gives the same Inf here" in capsys.readouterr().out


def test_the_weights_that_diverged_are_named(
    failed: Failed, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in failed.files:
        assert main(["scan", str(path)]) == 1
        lines = capsys.readouterr().out.splitlines()
        (line,) = [line for line in lines if re.search(r"\bw\b|vars", line) and "[0]" in line]
        assert "float32" in line
        assert "4" in line
