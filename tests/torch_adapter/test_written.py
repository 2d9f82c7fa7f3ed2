"""A NaN that the code itself writes: no operation makes it, and it is bad wherever it leaves."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anynan
from tests.failing import failure
from tests.torch_adapter.cause_parts import Body

TABLE = torch.tensor([1.0, math.nan, 2.0])


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "factor": lambda x: x * math.nan,
    "NumPy factor": lambda x: x * np.float32(math.nan),
    "tensor": lambda x: x + torch.tensor(math.nan),
    "full": lambda x: torch.full_like(x, math.nan),
    "where": lambda x: torch.where(x.isfinite(), math.nan, x),
    "masked_fill": lambda x: x.masked_fill(x.isfinite(), math.nan),
    "fill_": lambda x: x.clone().fill_(math.nan),
    "table": lambda x: x + TABLE,
}


@pytest.mark.filterwarnings("ignore:anynan. no module was found")
@pytest.mark.parametrize("what", list(WRITES))
@pytest.mark.parametrize("level", ["layer", "operation"])
@pytest.mark.parametrize("inside", [True, False])
def test_it_is_bad_where_it_leaves_a_layer_or_a_step(what: str, level: str, inside: bool) -> None:
    body = WRITES[what]
    model = nn.Sequential(nn.Linear(3, 3), Body(body), nn.Linear(3, 2), nn.Softmax(-1))
    tracker = anynan.torch.track(model if inside else body, level=level)
    event = failure(tracker, torch.ones(2, 3))
    where = ("1", "forward") if inside else (None, "loss")
    assert (event.layer, event.phase, event.kind) == (*where, "nan")
    assert event.cause.tag == ("bad_input" if what == "table" else "written_constant")
    assert event.operation.source.file == __file__


def test_it_may_be_taken_away_inside_its_layer() -> None:
    def body(x: Tensor) -> Tensor:
        return torch.where(x > 0, math.nan, x).nanmean(0, keepdim=True).nan_to_num()

    model = nn.Sequential(nn.Linear(3, 3), Body(body), nn.Linear(3, 2))
    tracker = anynan.torch.track(model)
    model(torch.randn(8, 3)).sum().backward()
    assert not tracker.events


def test_one_that_is_meant_is_said_to_be() -> None:
    def body(x: Tensor) -> Tensor:
        with anynan.expect(nan=True, reason="marks what was not measured"):
            return torch.where(x > 0, math.nan, x)

    model = nn.Sequential(Body(body), Body(torch.nan_to_num))
    tracker = anynan.torch.track(model)
    model(torch.ones(2, 3))
    assert all(event.severity == "suspect" for event in tracker.events)
