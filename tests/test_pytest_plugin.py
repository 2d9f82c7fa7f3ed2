"""The pytest plugin, as a project of somebody else's would use it."""

import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.processes import frames_of_ours, python

TESTS = """
import pytest
import torch
from torch import nn

class Log(nn.Module):
    def forward(self, x):
        return torch.log(x)

@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 4), Log(), nn.Tanh())

def run(model, weight=-1.0):
    with torch.no_grad():
        model[0].weight.fill_(weight)
        model[0].bias.fill_(0.0)
    return model(torch.full((1, 4), 9.0))

def test_clean(model):
    assert run(model, 1.0).isfinite().all()

def test_nobody_looks(model):
    run(model)

def test_in_the_backward_pass():
    class Root(nn.Module):
        def forward(self, x):
            return (x - x.detach()).sqrt()
    nn.Sequential(nn.Linear(4, 4), Root())(torch.ones(1, 4)).sum().backward()

@pytest.mark.anynan(allow="nan", reason="logs of negative numbers are what this is about")
def test_allowed(model):
    run(model)

@pytest.mark.anynan(allow="posinf", reason="something else")
def test_something_else_is_allowed(model):
    run(model)

@pytest.mark.xfail(strict=True, reason="known")
def test_known(model):
    run(model)

def test_fails_by_itself(model):
    assert run(model).isfinite().all(), "mine"

@pytest.mark.anynan(allow="nan")
def test_without_a_reason(model):
    pass

def test_subtests(model, subtests):
    with subtests.test("one"):
        run(model)

def test_tracked_by_hand(model):
    import anynan
    anynan.torch.track(model)
    run(model)
"""
# What fails without the plugin being asked: what fails by itself.
ALWAYS = {"test_fails_by_itself", "test_known", "test_tracked_by_hand"}
ASKED = {
    "test_nobody_looks", "test_in_the_backward_pass", "test_something_else_is_allowed",
    "test_fails_by_itself", "test_without_a_reason", "test_subtests", "test_tracked_by_hand",
}  # fmt: skip

# Where anynan is installed with its entry points, pytest finds the plugin by itself.
INSTALLED = entry_points(group="pytest11", name="anynan")
LOADED = [] if INSTALLED else ["-p", "anynan.pytest_plugin"]


def run(folder: Path, *words: str) -> tuple[set[str], str]:
    done = python(
        "-m", "pytest", *LOADED, "-p", "no:cacheprovider", "-rfE", "--strict-markers", "-W",
        "error", *words, cwd=folder,
    )  # fmt: skip
    said = done.stdout + done.stderr
    return set(re.findall(r"^(?:FAILED|ERROR) \S+::(\w+)", said, re.MULTILINE)), said


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("torch")
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


@pytest.mark.tier(2)
def test_it_is_off_unless_asked_for(folder: Path) -> None:
    failed, said = run(folder)
    assert failed == ALWAYS
    # The traceback of an anomaly ends in the test's own module.
    assert re.search(r"^test_it.py:\d+: NonFiniteError$", said, re.MULTILINE)
    assert "_call_impl" not in said


def test_a_test_fails_with_the_report(folder: Path) -> None:
    failed, said = run(folder, "--anynan")
    assert failed == ASKED
    parts = re.split(r"^_{3,} (?:\w+ at \w+ of )?(\w+) _{3,}$", said, flags=re.MULTILINE)
    shown = dict(zip(parts[1::2], parts[2::2], strict=True))
    report = shown["test_nobody_looks"].strip()
    assert report.startswith("NaN first appeared in the forward pass of step 0\n")
    assert "op      log                     test_it.py:8 in forward" in report
    assert "fix     keep the argument positive" in report
    assert not frames_of_ours(report)
    assert "gradient of sqrt" in shown["test_in_the_backward_pass"]
    assert "AssertionError: mine" in shown["test_fails_by_itself"]
    assert re.search(r"^-+ Captured anynan call -+$", shown["test_fails_by_itself"], re.MULTILINE)
    assert "@pytest.mark.anynan: it takes allow= and reason=" in shown["test_without_a_reason"]


@pytest.mark.tier(2)
def test_a_project_turns_it_on_and_workers_obey(folder: Path) -> None:
    (folder / "pytest.ini").write_text("[pytest]\nanynan = true\n")
    failed, _ = run(folder, "-n", "1", "-k", "nobody or clean or allowed")
    assert failed == {"test_nobody_looks", "test_something_else_is_allowed"}


def test_pytest_runs_inside_where_warnings_are_errors(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n")
    words = "-m", "anynan", "run", "-m", "pytest", *LOADED, "-W"
    inside = python(*words, "error::pytest.PytestAssertRewriteWarning", cwd=tmp_path)
    assert "1 passed" in inside.stdout, inside.stderr
