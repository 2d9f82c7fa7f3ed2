"""The demo of array code: each bug strikes with NumPy alone, and the report names its line."""

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
    first, last = printed.rstrip(".\n").rpartition("fell from ")[2].split(" to ")
    assert float(last) < float(first) / 2
