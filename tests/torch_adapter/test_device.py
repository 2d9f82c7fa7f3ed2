"""A device that is not the CPU: the tests of ``on_device.py``, in one process of their own.

PyTorch wants such a device to be there before the first backward pass, and keeps it for good.
"""

import json
import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from torch import distributed

from tests.processes import ROOT, python

on_device: Any = pytest.importorskip(
    "tests.torch_adapter.on_device",
    reason="this PyTorch takes no device that is written in Python",
    exc_type=ImportError,
)
TESTS = [name for name in vars(on_device) if name.startswith("test_")]
pytestmark = pytest.mark.tier(2)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each of the tests said where it failed, by name."""
    told = tmp_path_factory.mktemp("device") / "told.xml"
    options = ["-q", "-p", "no:cacheprovider", f"--junitxml={told}"]
    ended = python("-m", "pytest", *options, Path(on_device.__file__), cwd=ROOT)
    assert told.exists(), ended.stdout + ended.stderr
    found: dict[str, list[str]] = defaultdict(list)
    for case in ET.parse(told).iter("testcase"):
        said = [x.text or "" for kind in ("failure", "error") for x in case.iter(kind)]
        found[re.sub(r"\[.*", "", case.get("name", ""))] += said
    return found


@pytest.mark.parametrize("name", TESTS)
def test_on_the_device(name: str, outcomes: dict[str, list[str]]) -> None:
    assert name in outcomes, list(outcomes)
    assert not outcomes[name], "\n".join(outcomes[name])


PROGRAM = """
from tests.torch_adapter import device
device.begin()
import torch
model, kept = torch.nn.Linear(4, 4).to("slate"), torch.ones(4, 4, device="slate")
optimizer, kept.requires_grad = torch.optim.SGD(model.parameters(), lr=0.1), True
counts = []
for i in range(6):
    x = torch.ones(3, 4, device="slate")
    with device.counted() as reads:
        if i < 3:
            model(x).square().mean().backward()
            optimizer.step()
        else:
            ((x @ kept) * (1 if i < 5 else -1)).log().mean().backward()
    counts.append(len(reads))
print("reads", counts[1:5])
"""


def test_a_program_is_watched_with_one_read_a_pass_and_what_no_model_made_is_told_too(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    ended = python("-m", "anynan", "run", script, cwd=ROOT)
    assert "NaN first appeared in the loss" in ended.stdout + ended.stderr
    assert "reads [1, 1, 1, 1]" in ended.stdout


@pytest.mark.multiprocess
@pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="this PyTorch has no gloo",
)
def test_ranks_on_devices_stop_together_and_a_clean_step_of_each_adds_one_read(tmp_path) -> None:
    with ThreadPoolExecutor() as pool:
        ranks = [
            pool.submit(python, "-m", on_device.__name__, number, tmp_path, cwd=ROOT, timeout=120)
            for number in range(2)
        ]
        ended = [each.result() for each in ranks]
    for each in ended:
        assert not each.returncode, each.stdout + each.stderr
        told = json.loads(each.stdout)
        assert told["clean"] == [1, 1, 1]
        assert told["told"] == ["fault", "log", 1, 3]
        assert told["largest"] <= 80 * 16  # a gradient, which this program averages by itself
