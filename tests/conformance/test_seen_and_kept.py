"""One training that fails was foretold, and its page shows where it began."""

import re
from pathlib import Path
from typing import Any

import pytest

import anynan


def test_an_overflow_is_foretold_and_shown(tmp_path: Path) -> None:
    """The weights grow by a tenth in every step, and their product is float16."""
    torch = pytest.importorskip("torch")
    base: Any = torch.nn.Module

    class Grow(base):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(4))

        def forward(self, x: Any) -> Any:
            return (x * self.w).half()

    model = torch.nn.Sequential()
    model.add_module("grow", Grow())
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    tracker = anynan.torch.track(model)
    reports = []
    with pytest.raises(anynan.NonFiniteError) as caught:
        for number in range(200):
            optimizer.zero_grad()
            (-model(torch.ones(8, 4)).float().square().mean()).backward()
            optimizer.step()
            if number % 4 == 0:
                reports.append(tracker.report())
    tracker.remove()

    told = [re.search(r"float16 overflows in grow in about (\d+) steps", x) for x in reports]
    first, found = next((at, found) for at, found in enumerate(told) if found)
    ahead = caught.value.event.step - 4 * first
    assert ahead >= 20
    assert int(found[1]) == pytest.approx(ahead, abs=3)

    tracker.to_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<h1 class=bad>+Inf first appeared" in text
    assert text.count("<title>it began here</title>") == 1
    assert len(text) < 500_000
    (layer,) = re.findall(r"<tr><td>grow</td>.*?</tr>", text.partition(">Outputs</summary>")[2])[:1]
    assert "float16" in layer and "+Inf" in layer
