"""What only an accelerator can show. Skips without one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import anynan
from anynan import NonFiniteError
from tests.benchmarks.gpt import GPT, SMALL, train_step
from tests.failing import failure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Log(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.shift = 100.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(self.linear(x) + self.shift)


@pytest.fixture
def model() -> Iterator[nn.Sequential]:
    torch.manual_seed(0)
    yield nn.Sequential(nn.Linear(64, 64), Log(), nn.Linear(64, 64)).cuda()
    torch.compiler.reset()


def copies(run: Any) -> int:
    """Count the copies from the device to the host that a run makes."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    return sum("DtoH" in event.name for event in seen.events())


@pytest.mark.parametrize("compiled", [False, True])
def test_one_copy_to_the_host_a_step(compiled: bool) -> None:
    torch.manual_seed(0)
    plain, tracked = GPT(SMALL).cuda(), GPT(SMALL).cuda()
    tracker = anynan.torch.track(tracked)
    counts = []
    for gpt in (plain, tracked):
        call = torch.compile(gpt, fullgraph=True) if compiled else gpt
        step = train_step(call, gpt, SMALL, "cuda")
        for _ in range(3):
            step()
        counts.append(copies(step))
    assert counts[1] - counts[0] == 1
    assert len(tracker.history) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_autocast_training_names_the_operation(model: nn.Sequential, dtype: Any) -> None:
    anynan.torch.track(model)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(8, 64, device="cuda")
    for shift in (100.0, 100.0, -100.0):
        model[1].shift = shift
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not torch.float32):
            loss = model(x).square().mean()
        loss.backward()
        if shift > 0:
            optimizer.step()
    event = failure(optimizer.step)
    assert (event.layer, event.phase, event.step) == ("1", "forward", 2)
    assert event.operation.name == "log"


def test_compiled_with_cuda_graphs(model: nn.Sequential) -> None:
    tracker = anynan.torch.track(model)
    call = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    x = torch.randn(8, 64, device="cuda")
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            call(x)
            tracker.flush()
        x.fill_(torch.nan)
        torch.compiler.cudagraph_mark_step_begin()
        with pytest.raises(NonFiniteError):
            call(x)
            tracker.flush()


def test_a_graph_captured_by_hand(model: nn.Sequential) -> None:
    tracker = anynan.torch.track(model)
    x = torch.randn(8, 64, device="cuda")
    with torch.no_grad():
        model(x)  # warm up
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x)
        graph.replay()
        tracker.flush()
        assert tracker.count("bad") == 0
        x.fill_(torch.nan)
        graph.replay()
        event = failure(tracker.flush)
    assert event.layer == "0"


def test_the_user_stream_is_the_one_that_is_read(model: nn.Sequential) -> None:
    anynan.torch.track(model)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        model(torch.randn(8, 64, device="cuda"))
        with pytest.raises(NonFiniteError):
            model(torch.full((8, 64), torch.nan, device="cuda"))
