"""The public API as a type checker sees it; never run."""

from typing import assert_type

import numpy as np
import torch

import anynan

array = np.ones(3)
assert_type(anynan.summarize(array), anynan.Summary)
assert_type(anynan.summarize(array).headroom, float | None)
anynan.check({"x": array}, "batch", policy=anynan.Policy(large=1e4))

with anynan.scope("decoder") as path:
    assert_type(path, str)
with anynan.expect(nan=True, reason="missing values"):
    pass
assert_type(anynan.replaying(), bool)

model = torch.nn.Linear(2, 2)
tracker = anynan.torch.track(model, action="warn")
assert_type(tracker, anynan.Tracker)
assert_type(tracker.events, tuple[anynan.Event, ...])
assert_type(tracker.metrics(), dict[str, float])
assert_type(tracker.report(), str)
assert_type(tracker.remove(), None)
anynan.untrack(model)


@anynan.torch.track(advanced=anynan.Advanced(patience=2))
def step(x: torch.Tensor) -> torch.Tensor:
    """Run one step."""
    return x.sum()


assert_type(step, anynan.Tracker)

found = anynan.torch.first_bad_batch(step, [torch.ones(2)], every=2, exclude="head*")
assert_type(found, anynan.torch.BadBatch | None)
if found is not None:
    assert_type(found.index, int)
    assert_type(found.event, anynan.Event)

try:
    step(torch.ones(2))
except anynan.NonFiniteError as error:
    assert_type(error.event, anynan.Event)


@anynan.track(action="warn")
def spread(x: list[float]) -> float:
    """Stand for array code."""
    return max(x) - min(x)


assert_type(spread, anynan.Tracker)
for batch in anynan.watch([[1.0], [2.0]], "train"):
    assert_type(batch, list[float])
