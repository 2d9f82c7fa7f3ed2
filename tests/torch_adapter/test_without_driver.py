"""A build of PyTorch for CUDA on a machine without a driver: most laptops and login nodes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
FIRST = re.search(r"```python\n(.*?)```", README, re.DOTALL)

# What such a build does: it says that it is one, and every question to the driver raises.
NO_DRIVER = """
import inspect, torch
def refusing():
    def refuse(*args, **kwargs):
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")
    return refuse
torch.backends.cuda.is_built = lambda: True
local = {"is_available", "is_initialized", "manual_seed", "manual_seed_all"}
for name, value in list(vars(torch.cuda).items()):
    public = inspect.isroutine(value) and not name.startswith("_")
    if (public and name not in local) or name == "_lazy_init":
        setattr(torch.cuda, name, refusing())
"""
DEMO = "import anynan._cli.commands as c, sys; sys.exit(c.main(['demo', '--framework', 'torch']))"
TRAIN = """
import anynan, torch
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5), torch.nn.Linear(3, 1))
optimizer = torch.optim.AdamW(model.parameters())
@anynan.torch.track(level="{level}", read="{read}")
def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
for _ in range(3):
    step(torch.randn(4, 3))
step.check()
print(len(step.history), "steps")
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def _programs() -> list[str]:
    assert FIRST is not None
    levels = [("layer", "auto"), ("layer", "step"), ("operation", "auto")]
    return [FIRST[1], DEMO, *(TRAIN.format(level=level, read=read) for level, read in levels)]


def _said(program: str, done: subprocess.CompletedProcess[str]) -> None:
    everything = done.stdout + done.stderr
    assert "CUDA driver" not in everything, everything
    if "optimizer" in program:
        assert done.stdout.startswith("3 steps"), everything
    else:
        assert "fully masked row" in everything, everything


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="the real thing is below")
@pytest.mark.parametrize(
    "program", _programs(), ids=["README", "demo", "layer", "step", "operation"]
)
def test_the_driver_is_never_asked(program: str) -> None:
    done = run(NO_DRIVER + program)
    _said(program, done)


@pytest.mark.skipif(
    not torch.backends.cuda.is_built() or torch.cuda.is_available(),
    reason="needs a CUDA build of PyTorch and no GPU: make test-cuda-build",
)
@pytest.mark.parametrize(
    "program", _programs(), ids=["README", "demo", "layer", "step", "operation"]
)
def test_a_real_build_for_cuda(program: str) -> None:
    done = run(program)
    _said(program, done)
