"""The demo of array code: each bug strikes with NumPy alone, and the report names its line."""

from typing import Any

import pytest

from anynan._cli import commands as cli
from anynan.arrays import demo

pytestmark = pytest.mark.tier(2)

# Bug -> what the report says: operation, line, cause.
FOUND: dict[str, tuple[str, str, str]] = {
    "softmax": ("exp", "grown = xp.exp(logits)", "exp of a number this large is beyond"),
    "variance": ("sqrt", "deviation = xp.sqrt(", "the square root of a negative number is NaN"),
    "log": ("log", "logs = xp.log(p)", "the logarithm of 0 is -Inf"),
    "batch": ("batch    x", "1 of 64 rows is bad: 5", "the batch was already bad"),
}


@pytest.mark.parametrize("bug", demo.BUGS)
def test_the_bug_is_found(bug: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--framework", "numpy", "--bug", bug]) == 0
    printed = capsys.readouterr().out
    for words in FOUND[bug]:
        assert words in printed, printed
    assert "Run again with --fixed" in printed


@pytest.mark.parametrize("bug", demo.BUGS)
def test_the_fixed_run_trains(bug: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(bug, fixed=True, steps=120) == 0
    printed = capsys.readouterr().out
    assert "120 steps, no reading went bad; tightest headroom" in printed
    first, last = (
        float(x) for x in printed.rstrip(".\n").rpartition("fell from ")[2].split(" to ")
    )
    assert last < first / 2


@pytest.mark.parametrize("library", ["torch", "array_api_strict", "jax.numpy"])
def test_it_is_array_code(
    library: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(library)
    # The bug strikes at step 24, not 83: these libraries are slow on small arrays.
    monkeypatch.setattr(demo, "rate_of", lambda step, broken: 0.2 * 1.2**step)
    from tests.backends import Backend

    backend = {"torch": Backend.TORCH_STANDARD, "array_api_strict": Backend.STRICT,
               "jax.numpy": Backend.JAX}[library]  # fmt: skip
    xp: Any = backend.load()
    assert demo.main("softmax", steps=40, xp=xp) == 0
    assert "grown = xp.exp(logits)" in capsys.readouterr().out
