"""A probe reads any view where it lies: no copy of it is made, and both ends are right."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from anynan.torch.read.probes import ends, plain, read_ends

VIEWS = {
    "contiguous": lambda: torch.randn(1024, 1024),
    "transposed": lambda: torch.randn(1024, 1024).t(),
    "permuted": lambda: torch.randn(64, 128, 128).permute(2, 0, 1),
    "sliced": lambda: torch.randn(1024, 2048)[:, ::2],
    "expanded": lambda: torch.randn(1024, 1).expand(1024, 1024),
    "float16": lambda: torch.randn(1024, 2048).half(),
    "bfloat16 transposed": lambda: torch.randn(1024, 2048).bfloat16().t(),
    "complex": lambda: torch.randn(512, 1024, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(512, 1024, dtype=torch.complex64).conj(),
    "float8": lambda: torch.randn(2048, 2048).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("name", VIEWS)
def test_no_copy_is_made(name: str) -> None:
    values = plain(VIEWS[name]())
    ends(values)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        ends(values)
    assert max(event.self_cpu_memory_usage for event in run.events()) <= 2**20


@pytest.mark.parametrize("name", [name for name in VIEWS if name not in ("complex", "conjugated")])
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), float("-inf")])
def test_both_ends(name: str, bad: float | None) -> None:
    x = VIEWS[name]()
    if bad is not None:
        x = x.contiguous()
        x.reshape(-1)[7] = bad if name != "float8" else float("nan")  # the only one it has
        x = x[::1]
    wide = x.to(torch.float64)
    expected = (wide.min().item(), wide.max().item())
    assert read_ends(plain(x)) == pytest.approx(expected, nan_ok=True)
