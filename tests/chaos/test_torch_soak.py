"""Thousands of steps with a fault every hundred: what is kept stays bounded."""

import gc
import logging
import sys
import warnings
from itertools import pairwise
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import anynan  # noqa: E402
from tests.chaos import torch_twins  # noqa: E402
from tests.flat import split  # noqa: E402
from tests.torch_adapter.training import Fault, live_tensors  # noqa: E402

pytestmark = pytest.mark.tier(2)


def held(model: Any) -> dict[str, int]:
    """Count what could pile up."""
    return {
        "tensors": live_tensors(),
        "objects": len(gc.get_objects()),
        "blocks": sys.getallocatedblocks(),
        "hooks": sum(count for *_, count in torch_twins.counted(model)),
        "hooks of weights": sum(len(p._backward_hooks or ()) for p in model.parameters()),
    }


@pytest.mark.parametrize(
    ("target", "options"),
    [("model", {"action": "skip"}), ("step", {"patience": 3, "read": "end"})],
    ids=["model", "step"],
)
@pytest.mark.parametrize("steps", [600, pytest.param(21_000, marks=pytest.mark.long)])
def test_nothing_piles_up(
    target: str, options: dict[str, Any], steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    fault = Fault()
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.Tanh(), fault, torch.nn.Dropout(0.1), torch.nn.Linear(8, 1)
    )
    adam = torch.optim.Adam(model.parameters())
    x, y = torch.randn(16, 4, 8), torch.randn(16, 4, 1)

    def step(i: int) -> None:
        fault.armed = ("forward", "backward")[i // 100 % 2] if i % 100 == 50 else None
        adam.zero_grad()
        (model(x[i % 16]) - y[i % 16]).square().mean().backward()
        adam.step()

    caplog.set_level(logging.CRITICAL + 1, "anynan")  # pytest keeps all that is logged
    tracker = anynan.torch.track(
        model if target == "model" else step, **split({"history": 50, **options})
    )
    run = step if target == "model" else tracker
    counts, seen = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(steps):
            run(i)
            if (i + 1) % (steps // 3) == 0:
                seen += tracker.count("bad")
                tracker.clear()  # events are the program's to forget: the rest must not grow
                counts.append(held(model))
    assert seen == steps // 100
    for what in ("tensors", "hooks", "hooks of weights"):
        assert len({count[what] for count in counts}) == 1
    # What piles up does so each time; what a cache keeps, as another cause is first told, once.
    for what, most in ("objects", 100), ("blocks", 1000):
        assert min(after[what] - before[what] for before, after in pairwise(counts)) < most
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    tracker.remove()
    assert held(model)["hooks"] == 0
