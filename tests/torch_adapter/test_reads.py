"""How often a tracked step waits for the device, and that a read copies no view and is right."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import anynan
from anynan.torch.read.probes import ends, plain, read_ends
from tests.failing import failure
from tests.torch_adapter.training import Count, batch, sgd


@pytest.mark.parametrize(
    ("loss", "reads"),
    [
        (nn.MSELoss(), 1),  # a layer's output: read with all the others before the update
        (nn.functional.mse_loss, 2),  # known when the step returns it, after the update
        (lambda x, y: None, 0),
    ],
)
def test_host_reads_of_a_tracked_step_by_what_it_returns(loss: Any, reads: int) -> None:
    model = nn.Linear(4, 2)
    optimizer = sgd(model)

    def step(x: torch.Tensor) -> torch.Tensor | None:
        found: torch.Tensor | None = loss(model(x), torch.zeros(3, 2))
        if found is not None:
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
        return found

    with anynan.torch.track(step, advanced=anynan.Advanced(read="end")) as run:
        run(batch())
        with Count() as count:
            for _ in range(4):
                run(batch())
    assert count.reads == 4 * max(reads, 1)
    losses = [reading for reading in run.history if reading.phase == "loss"]
    assert len(losses) == (5 if reads else 0)
    assert all(r.lo == r.hi and r.lo > 0 for r in losses)


def test_a_loss_that_is_changed_after_its_layer_is_read_again() -> None:
    model, criterion = nn.Linear(4, 2), nn.MSELoss()
    optimizer = sgd(model)

    @anynan.torch.track(advanced=anynan.Advanced(read="end"))
    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = criterion(model(x), torch.zeros(3, 2))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            return loss.log_().neg_().sqrt_().mul_(-1).log_()

    event = failure(step, torch.randn(3, 4))
    assert event.phase == "loss"


VIEWS = {
    "contiguous": lambda: torch.randn(1024, 1024),
    "transposed": lambda: torch.randn(1024, 1024).t(),
    "permuted": lambda: torch.randn(64, 128, 128).permute(2, 0, 1),
    "sliced": lambda: torch.randn(1024, 2048)[:, ::2],
    "expanded": lambda: torch.randn(1024, 1).expand(1024, 1024),
    "float16": lambda: torch.randn(1024, 2048).half(),
    "bfloat16 transposed": lambda: torch.randn(1024, 2048).bfloat16().t(),
    "float8": lambda: torch.randn(2048, 2048).to(torch.float8_e4m3fn),
    "complex": lambda: torch.randn(512, 1024, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(512, 1024, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_no_copy_is_made(name: str) -> None:
    values = plain(VIEWS[name]())
    ends(values)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        ends(values)
    assert max(event.self_cpu_memory_usage for event in run.events()) <= 2**20


@pytest.mark.parametrize("name", [*VIEWS][:-2])
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), float("-inf")])
def test_both_ends(name: str, bad: float | None) -> None:
    x = VIEWS[name]()
    if bad is not None:
        x[3, 5] = bad if name != "float8" else float("nan")  # the only one it has
    wide = x.to(torch.float64)
    expected = (wide.min().item(), wide.max().item())
    assert read_ends(plain(x)) == pytest.approx(expected, nan_ok=True)
