"""The command line: what it accepts, what it refuses and how it says so."""

import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import anynan
from anynan._cli import commands as cli
from tests.processes import python

BUGS = {"first": "the default", "second": "another"}


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """The demo of two adapters, of which the first one's framework is missing."""
    main = mock.Mock(return_value=0)
    fake = types.ModuleType("anynan.fake.demo")
    vars(fake).update(BUGS=BUGS, main=main)
    monkeypatch.setitem(sys.modules, "anynan.fake", types.ModuleType("anynan.fake"))
    monkeypatch.setitem(sys.modules, "anynan.fake.demo", fake)
    monkeypatch.setattr(cli, "demos", lambda: ["missing", "fake"])
    return main


def test_options_reach_the_demo_of_the_first_installed_framework(demo: mock.Mock) -> None:
    words = ["--framework", "fake", "--bug", "second", "--fixed", "--steps", "7", "--seed", "3"]
    assert cli.main(["demo"]) == cli.main(["demo", *words]) == 0
    assert demo.call_args_list == [
        mock.call("first", fixed=False, steps=None, seed=0),
        mock.call("second", fixed=True, steps=7, seed=3),
    ]


def test_an_interrupt_is_quiet(demo: mock.Mock) -> None:
    demo.side_effect = KeyboardInterrupt
    assert cli.main(["demo"]) == 130


def test_list_names_the_bugs_and_a_missing_framework_is_one_line(
    demo: mock.Mock, command: Any
) -> None:
    assert command("demo", "--list")[:2] == (0, "first   the default\nsecond  another\n")
    status, _, error = command("demo", "--framework", "missing")
    assert (status, error.count("\n")) == (2, 1)
    assert not demo.called


@pytest.fixture
def doctor(command: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    def doctor(*names: str) -> Any:
        monkeypatch.setattr("anynan._cli.doctor.ADAPTERS", names)
        return command("doctor")[:2]

    return doctor


@pytest.mark.tier(2)
def test_the_doctor_tells_versions_devices_and_what_is_watched(
    doctor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("ANYNAN", "warn")
    status, shown = doctor("torch", "nowhere")
    assert status == 0
    assert shown.startswith(f"anynan {anynan.__version__}, Python {sys.version.split()[0]}, ")
    assert f"  torch       {torch.__version__}, cpu with " in shown
    assert "watched: modules and training steps" in shown
    assert "'warn' overrides every action" in shown
    assert 'nowhere     not installed: pip install "anynan[nowhere]"' in shown


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("raise ImportError('libcuda is gone')", "cannot be used: ImportError: libcuda is gone"),
        ("import os; os._exit(9)", "cannot be used: exit status 9"),
        pytest.param(
            "import time; time.sleep(60)", "did not answer within 1 s", marks=pytest.mark.tier(2)
        ),
    ],
)
def test_the_doctor_survives_a_framework_that_is_broken(
    content: str, says: str, doctor: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "brokenwork.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("anynan._cli.doctor.SECONDS", 1 if "sleep" in content else 60)
    status, shown = doctor("brokenwork")
    assert status == 1
    assert f"  brokenwork  installed, but {says}" in shown


def test_it_runs_as_a_module_and_loads_no_framework(tmp_path: Path) -> None:
    done = python("-X", "importtime", "-m", "anynan", "--version", cwd=tmp_path)
    assert done.stdout.strip() == f"anynan {anynan.__version__}"
    assert "anynan._cli.commands" in done.stderr
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not loaded & {"torch", "jax", "tensorflow", "rich"}


@pytest.mark.parametrize(
    ("words", "usage", "said"),
    [
        ("runn", "usage: anynan [-h]", "did you mean run?"),
        ("run --actoin warn x.py", "usage: anynan run", "did you mean --action?"),
        ("run --action wran x.py", "usage: anynan run", "did you mean warn?"),
        ("demo --steps many", "usage: anynan demo", "'many' is not a whole number"),
        ("demo --seed -1", "usage: anynan demo", "at least 0"),
    ],
)
def test_a_wrong_word_is_answered_with_the_nearest_and_the_usage_of_its_command(
    words: str, usage: str, said: str, command: Any
) -> None:
    status, _, shown = command(*words.split())
    assert status == 2
    assert shown.startswith(usage)
    assert said in shown


def test_help_fits_the_terminal(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in "run", "scan", "replay", "compare", "stress", "doctor", "report", "demo":
        lines = command(name, "--help")[1].splitlines()
        assert max(map(len, lines)) <= 80, name
        assert any(line.startswith(("example: ", "exit status: ")) for line in lines), name
