"""A NaN that the code itself writes: no operation makes it, and it is bad wherever it leaves."""

import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anynan

TABLE = torch.tensor([1.0, math.nan, 2.0])


def overwritten(x: Tensor) -> Tensor:
    x = x.clone()
    x[0] = math.nan
    return x


WRITES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "factor": (lambda x: x * math.nan, "written_constant"),
    "NumPy factor": (lambda x: x * np.float32(math.nan), "written_constant"),
    "tensor": (lambda x: x + torch.tensor(math.nan), "written_constant"),
    "full": (lambda x: torch.full_like(x, math.nan), "written_constant"),
    "where": (lambda x: torch.where(x.isfinite(), math.nan, x), "written_constant"),
    "masked_fill": (lambda x: x.masked_fill(x.isfinite(), math.nan), "written_constant"),
    "assignment": (overwritten, "written_constant"),
    "table": (lambda x: x + TABLE, "bad_input"),
}


class Body(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.mark.parametrize("what", list(WRITES))
@pytest.mark.parametrize("level", ["layer", "operation"])
@pytest.mark.parametrize("inside", [True, False])
def test_it_is_bad_where_it_leaves_a_layer_or_a_step(what: str, level: str, inside: bool) -> None:
    body, cause = WRITES[what]
    model = nn.Sequential(nn.Linear(3, 3), Body(body), nn.Linear(3, 2), nn.Softmax(-1))
    tracker = anynan.torch.track(model if inside else body, level=level)
    with pytest.raises(anynan.NonFiniteError) as caught, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "anynan: no module was found")
        tracker(torch.ones(2, 3))
        tracker.flush()
    event = caught.value.event
    where = ("1", "forward") if inside else (None, "loss")
    assert (event.layer, event.phase, event.kind) == (*where, "nan")
    assert event.cause.tag == cause
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
