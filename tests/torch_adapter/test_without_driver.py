"""A build of PyTorch for CUDA on a machine without a driver: most laptops and login nodes."""

import json
import re
from functools import cache

import pytest
import torch

from tests.processes import ROOT, python

pytestmark = pytest.mark.tier(2)

README = (ROOT / "README.md").read_text(encoding="utf-8")

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
@anynan.torch.track(level="{level}")
def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step(); optimizer.zero_grad()
    return loss
for _ in range(3):
    step(torch.randn(4, 3))
step.flush()
print(len(step.history), "steps")
"""


# All programs in one process: most of its time is the import.
RUN = """
import contextlib, io, json, sys, traceback
said = {}
for name, code in json.loads(sys.argv[1]).items():
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            exec(compile(code, name, "exec"), {"__name__": "__main__"})
        except SystemExit:
            pass
        except BaseException:
            traceback.print_exc()
    said[name] = out.getvalue()
json.dump(said, sys.stdout)
"""


PROGRAMS = {
    "README": re.search(r"```python\n(.*?)```", README, re.DOTALL)[1],
    "demo": DEMO,
    "layer": TRAIN.format(level="layer"),
    "operation": TRAIN.format(level="operation"),
}


@cache
def said(before: str) -> dict[str, str]:
    done = python("-W", "ignore", "-c", before + RUN, json.dumps(PROGRAMS), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_driver_is_never_asked(program: str) -> None:
    """With a real build for CUDA where there is one: make test-cuda-build."""
    everything = said("" if torch.backends.cuda.is_built() else NO_DRIVER)[program]
    assert "CUDA driver" not in everything, everything
    expected = "fully masked row" if program in ("README", "demo") else "3 steps"
    assert expected in everything, everything
