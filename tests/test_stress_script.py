"""The training loop of a script is hunted in as a step."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from anynan._apps.stress.batches import Batches
from anynan._apps.stress.script import HUNT, READ, NoLoopError, hunt_in, stepped
from tests.processes import python

LOOP = """
import sys
count, rows = 0, [1, 2]

def backward(x):
    return x

def train(data):
    "Train."
    global count
    total = 0
    for epoch in range(3):
        for x in data:
            if x > 5:
                continue
            total = total + backward(x)
            count = count + 1
            for _ in data:
                break
            else:
                return "never"
            y = total
    return total, y
"""


def _hunted(source: str, hunt: Any, read: Batches) -> dict[str, Any]:
    code, _ = stepped(source, "train.py")
    scope: dict[str, Any] = {HUNT: hunt, READ: read, "__name__": "__main__"}
    exec(code, scope)
    return scope


def _run(source: str, call: str) -> dict[str, Any]:
    scope = _hunted(source, lambda step, *given: step(*given), Batches())
    exec(call, scope)
    return scope


def test_the_body_of_a_loop_works_on_the_very_names_of_its_function() -> None:
    scope = _run(LOOP, "out = train([1, 9, 2])")
    plain: dict[str, Any] = {}
    exec(LOOP + "\nout = train([1, 9, 2])", plain)
    assert (scope["out"], scope["count"]) == (plain["out"], plain["count"]) == ((9, 9), 6)


def test_a_loop_of_the_script_itself_works_on_its_globals() -> None:
    source = "total = 0\nfor x in (1, 2):\n    loss = x\n    total += loss\n    [i for i in (1,)]\n"
    scope = _run(source, "")
    assert (scope["total"], scope["loss"], scope["x"]) == (3, 2, 2)
    assert "i" not in scope


READERS = """
import numpy as np
w, rows = np.ones(2), iter([np.ones(2)] * 9)

def read():
    return np.zeros((4, 2))

def pair():
    return read(), [1, 2]

def train():
    w.backward()

class Model:
    def __call__(self):
        return read()

model = Model()
"""


@pytest.mark.parametrize(
    ("statement", "is_batch"),
    [
        ("x = read()", True),
        ("x, y = pair()", True),
        ("x = next(rows)", True),
        ("x = np.ones(2)", False),  # of the arrays' own library
        ("x = model()", False),
        ("x = i and read()", False),  # from what the loop hands on
        ("x = float(read().sum())", False),
        ("x, y = train(), read()", False),
        ("x = nothing()", False),
    ],
)
def test_a_batch_that_the_loop_reads_is_handed_to_the_step(statement: str, is_batch: bool) -> None:
    found = list[tuple[Any, ...]]()
    batches, source = Batches(), f"{READERS}\nfor i in (1,):\n    {statement}\n"
    _hunted(source, lambda *given: found.append(given), batches)
    ((step, *given),) = found
    assert bool(batches) == is_batch
    assert any(x is not None for x in given[1:]) == is_batch
    if is_batch:
        step(1, *[7] * len(given[1:]))
        assert step.__globals__["x"] == 7


def test_the_innermost_loop_that_trains_is_meant() -> None:
    source = "for e in ():\n  for x in ():\n    loss.backward()\n  for y in ():\n    print(y)\n"
    assert stepped(source, "train.py")[1] == 2
    assert stepped("for x in ():\n  pass\nfor y in ():\n  print(y)\n", "train.py")[1] == 3


def test_a_script_without_a_loop_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    for text, said in (
        ("print(1)\n", "has no loop"),
        ("for x in ():\n    print(1)\n", "ended before its loop at line 1 ran"),
    ):
        script.write_text(text)
        with pytest.raises(NoLoopError, match=said):
            hunt_in(str(script), lambda step, *given: step, lambda code, scope: exec(code, scope))


@pytest.mark.tier(2)
def test_the_command_hunts_with_a_function(tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text(
        "import numpy as np\n"
        "def shares(x):\n    return x / x.sum(axis=1, keepdims=True)\n"
        "def batch():\n    return (np.array([[0.0, 1.0], [2.0, 3.0]]),)\n"
    )
    stress = partial(python, "-m", "anynan", "stress", cwd=tmp_path)
    done = stress("--example", "losses:batch", "losses:shares")
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("stress of shares: ")
    assert "1. x: a row of zeros (inside the example's range" in done.stdout
    wrong, missing = stress("losses"), stress("nofile.py")
    assert wrong.returncode == missing.returncode == 2
    assert "give a script that ends in .py, or module:function" in wrong.stderr
    assert missing.stderr == "anynan stress: nofile.py: No such file or directory\n"
