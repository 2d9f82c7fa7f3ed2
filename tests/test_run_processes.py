"""``anynan run``: what a program starts is watched, too, and the program tells what came of it."""

import sys
from pathlib import Path
from typing import Any

import pytest

from anynan._apps.run.messages import NOTHING_WATCHED
from anynan._apps.run.processes import program_in
from tests.processes import ran
from tests.tiers import first

PYTHON = sys.executable
OURS: list[tuple[Any, int]] = [
    ([PYTHON, "own.py", "--lr", "1"], 1),
    ((PYTHON, "-u", "-B", "own.py"), 3),
    ([PYTHON, Path("own.py")], 1),
    ([PYTHON, "-u", "-m", "package.train"], 2),
]
OTHERS: dict[str, Any] = {
    "code": [PYTHON, "-c", "print(1)"],
    "a module of a library": [PYTHON, "-m", "pytest", "-x"],
    "one of Python's": [PYTHON, "-m", "json"],
    "no file": [PYTHON, "none.py"],
    "no program": [PYTHON, "-u"],
    "another interpreter": ["/opt/python", "own.py"],
    "apart from all packages": [PYTHON, "-I", "own.py"],
    "through a shell": "python own.py",
    "nothing": [],
}
GIVEN: dict[str, Any] = {
    "env": {"PYTHONPATH": "/elsewhere"},
    "executable": "/opt/python",
    "cwd": "package",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "package").mkdir()
    for name in ("own.py", "package/train.py", "package/__init__.py"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_a_program_of_the_users_is_seen_in_a_command_and_others_are_left_as_they_are() -> None:
    assert [program_in(args) for args, _ in OURS] == [at for _, at in OURS]
    assert program_in([PYTHON, "train.py"], cwd="package") == 1
    assert [kind for kind, args in OTHERS.items() if program_in(args)] == []
    script, _ = OURS[0]
    assert [key for key, value in GIVEN.items() if program_in(script, **{key: value})] == []


ARRAYS = """
import multiprocessing, sys
import numpy as np

def work(x):
    return float(np.log(np.array(x)))

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    processes = [context.Process(target=work, args=(x,)) for x in (1.0, 0.0, 0.0)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
        assert "_anynan" not in vars(process)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", first(1, ["fork", "spawn", "forkserver"]))
def test_what_numpy_met_in_a_process_is_told_by_the_program(way: str, tmp_path: Path) -> None:
    done = ran(tmp_path, ARRAYS, way)
    assert done.returncode == 0, done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("anynan: ")]
    assert said.endswith(" and 1 more: NumPy met: divide by zero in log at p.py:6")


TRAIN = """
import os, subprocess, sys
import torch
from torch import multiprocessing

def train(rank):
    model = torch.nn.Linear(4, 1)
    for i in range(3):
        loss = model(torch.ones(8, 4)).square().mean()
        if rank == 1 and i == 2:
            loss = torch.log(-1 - loss)
        loss.backward()

if __name__ == "__main__":
    how = sys.argv[1]
    if how == "spawn":
        multiprocessing.spawn(train, nprocs=2)
    elif how == "pool":
        with multiprocessing.get_context("fork").Pool(1) as pool:
            pool.map(train, [1])
    elif how in ("script", "kills"):
        how = "alone" if how == "script" else "killed"
        subprocess.run([sys.executable, __file__, how], check=True)
    elif how == "shell":
        subprocess.run(sys.executable + " " + __file__ + " alone", shell=True, check=True)
    else:
        train(1)
        if how == "killed":
            os._exit(0)
"""
OP = "op      log                     p.py:11 in train"
TOLD = {
    "spawn": "anynan: SpawnProcess-2: Linear: 1 bad in 3 steps",
    "pool": "anynan: ForkPoolWorker-1: 1 bad; its end was not seen",
    "script": "anynan: Linear: 1 bad in 3 steps",
    "kills": "anynan: p.py: 1 bad; its end was not seen",
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("how", first(1, TOLD))
def test_a_training_in_a_process_is_watched_and_counts(how: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = ran(tmp_path, TRAIN, how, options=("--fail", "--report", "r.md"))
    assert done.returncode == 1, done.stderr
    assert done.stderr.count(OP) == 1
    assert [line for line in done.stderr.splitlines() if line.startswith(TOLD[how])]
    assert "no model" not in done.stderr
    written = {path.name: path.read_text() for path in tmp_path.glob("r*.md")}
    clean = {name for name, text in written.items() if "nothing went bad" in text}
    assert clean == ({"r-SpawnProcess-1.md"} if how == "spawn" else set())
    assert "r.md" not in written  # it ran nothing itself


@pytest.mark.multiprocess
@pytest.mark.tier(2)
def test_what_a_shell_starts_is_no_all_clear(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = ran(tmp_path, TRAIN, "shell")
    assert done.returncode == 0
    assert NOTHING_WATCHED() in done.stderr
    assert "  unwatched what python" in done.stderr
    assert OP not in done.stderr


LOADERS = """
import torch

class Scale(torch.nn.Module):
    def forward(self, x):
        return x / 2

class Rows(torch.utils.data.Dataset):
    scale = Scale()
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return self.scale(torch.ones(4))

if __name__ == "__main__":
    model = torch.nn.Linear(4, 1)
    for x in torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=2):
        model(x).square().mean().backward()
"""


@pytest.mark.multiprocess
@pytest.mark.tier(2)
def test_workers_of_a_loader_say_nothing_while_all_is_well(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = ran(tmp_path, LOADERS)
    assert done.stderr.startswith("anynan: Linear: nothing went bad in 2 steps")
    assert done.stderr.count("\n") == 1
