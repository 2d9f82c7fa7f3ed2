"""What a hunt found is kept: as a test, as a bundle, or as accepted."""

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anynan
from anynan._apps.stress.hunt import lab_of
from anynan._cli.commands import main

X = np.random.default_rng(0).random((6, 3))
LOSSES = """
import numpy as np

def standard(x):
    return (x - x.mean()) / x.std()

def mended(x):
    apart, spread = x - x.mean(), x.std()
    return np.where(spread == 0, 0, apart / np.where(spread == 0, 1, spread))

def scaled(options, *parts):
    return options["times"] * parts[0] / parts[0].sum(axis=1, keepdims=True)

def batch():
    return np.linspace(0, 1, 6).reshape(3, 2)
"""


@pytest.fixture
def losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Give a module of the user's, and go where it is."""
    (tmp_path / "kept_losses.py").write_text(LOSSES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import kept_losses  # type: ignore[import-not-found]

    yield kept_losses
    del sys.modules["kept_losses"]


def _run(path: str) -> None:
    """Run the tests of a file."""
    for test in [x for name, x in runpy.run_path(path).items() if name.startswith("test_")]:
        test()


def test_a_finding_is_a_test_that_fails_until_the_fault_is_mended(losses: Any) -> None:
    anynan.stress(losses.standard, X).to_pytest("test_found.py")
    text = Path("test_found.py").read_text()
    assert "from kept_losses import standard\n" in text
    assert 'x = np.full((6, 3), 0.529146569158256, dtype="float64")\n' in text
    with pytest.raises(AssertionError, match="1. the example itself"):
        _run("test_found.py")
    losses.standard = losses.mended
    _run("test_found.py")


def test_a_test_writes_containers_and_keeps_large_arrays_beside_it(losses: Any) -> None:
    x = np.random.default_rng(0).random((40, 3))
    report = anynan.stress(losses.scaled, {"times": 2}, x, domain=(0, 1))
    report.to_pytest("test_found.py")
    text = Path("test_found.py").read_text()
    assert "anynan.stress(scaled, {'times': 2}, x0, found={})" in text
    assert 'LARGE["1.x0"]' in text
    with np.load("test_found.npz") as kept:
        assert np.array_equal(kept["1.x0"], report.open[0].inputs["args[1]"])
    with pytest.raises(AssertionError, match="divide"):
        _run("test_found.py")


def test_a_target_without_a_name_needs_one(losses: Any) -> None:
    report = anynan.stress(lambda x: losses.standard(x), X)
    with pytest.raises(ValueError, match=r'name it, as in target="module:name"'):
        report.to_pytest("test_found.py")
    report.to_pytest("test_found.py", target="kept_losses:standard")
    with pytest.raises(AssertionError):
        _run("test_found.py")
    with pytest.raises(FileExistsError):
        report.to_pytest("test_found.py", target="kept_losses:standard")
    with pytest.raises(ValueError, match="nothing was found"):
        anynan.stress(losses.mended, X, domain=(0, 1)).to_pytest("test_other.py")


@pytest.mark.parametrize(
    ("line", "made"),
    [
        ("import torch", "torch.ones(2, dtype=torch.bfloat16, requires_grad=True)"),
        ("import jax.numpy as jnp", "jnp.ones(2, dtype='bfloat16')"),
        ("import tensorflow as tf", "tf.ones(2, tf.bfloat16)"),
        ("import mlx.core as mx", "mx.ones(2, dtype=mx.bfloat16)"),
        ("import array_api_strict", "array_api_strict.ones(2, dtype=array_api_strict.float32)"),
    ],
)
def test_an_array_is_written_in_the_words_of_its_framework(line: str, made: str) -> None:
    pytest.importorskip(line.split()[1])
    scope: dict[str, Any] = {"np": np}
    exec(line, scope)
    x = eval(made, scope)
    lab = lab_of(lambda x: x * 1, (x,))
    again = eval(lab.code(x).format('np.array([1.0, 1.0], dtype="float32")'), scope)
    assert lab.imports == (line,)
    assert (again.dtype, type(again)) == (x.dtype, type(x))
    assert lab.host(again).tolist() == [1, 1]
    assert getattr(again, "requires_grad", None) == getattr(x, "requires_grad", None)


def test_a_finding_is_saved_as_a_bundle(losses: Any, capsys: pytest.CaptureFixture[str]) -> None:
    finding = anynan.stress(losses.standard, X).findings[0]
    finding.save("bundle")
    assert main(["replay", "bundle"]) == 0
    assert "gives the same NaN here" in capsys.readouterr().out
    with pytest.raises(FileExistsError):
        finding.save("bundle")
    losses.standard.__code__ = losses.mended.__code__
    with pytest.raises(ValueError, match="nothing goes bad in standard this time"):
        finding.save("other")


def test_a_file_of_accepted_findings_is_written_and_read(losses: Any, anynan_stress: Any) -> None:
    with pytest.raises(pytest.fail.Exception, match="1. x: all equal"):
        anynan_stress(losses.standard, X)
    report = anynan.stress(losses.standard, X)
    path = Path("accepted.toml")
    with pytest.raises(ValueError, match="say why"):
        report.accept(path, "")
    report.accept(path, 'batches are "shuffled"')
    path.write_text("# mine\n" + path.read_text())
    report.accept(path, "again")
    assert path.read_text().startswith("# mine\n")
    known = anynan_stress(losses.standard, X, accept=path).findings[0]
    assert known.reason == 'batches are "shuffled"'
    with pytest.raises(pytest.fail.Exception):  # it is another target's
        anynan_stress(losses.scaled, {"times": 2}, X, domain=(0, 1), accept=path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x", "is no TOML"),
        ("y = 1", r"holds more than tables \[\[accepted\]\]: y"),
        ('[[accepted]]\nfinding = "x"\nreason = ""', "has a finding, a reason and maybe a target"),
    ],
)
def test_a_bad_file_of_accepted_findings_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "accepted.toml"
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        anynan.stress(np.log, X, accept=path)
    path.write_text(text)
    with pytest.raises(ValueError, match=told):
        anynan.stress(np.log, X, accept=path)


def test_the_command_writes_a_baseline_and_tests(
    losses: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    hunt = ["stress", "--example", "kept_losses:batch"]
    target = "kept_losses:standard"
    assert main([*hunt, "--to-pytest", "test_found.py", target]) == 1
    with pytest.raises(AssertionError, match="divide"):
        _run("test_found.py")
    file = ["--accept", "accepted.toml"]
    assert main([*hunt, "--write-baseline", "known", target]) == 2
    assert "as --accept FILE" in capsys.readouterr().err
    assert main([*hunt, *file, "--write-baseline", "known", target]) == 0
    assert main([*hunt, *file, target]) == 0
    assert "accepted\n  x: all equal\n    known\n" in capsys.readouterr().out
