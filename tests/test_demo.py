"""The demo and the examples: each bug strikes, and the report names its line."""

import re
import runpy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import anynan

pytestmark = pytest.mark.tier(2)

torch = pytest.importorskip("torch")
demo = pytest.importorskip("anynan.torch.demo")

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def strike(bug: str, start: int) -> anynan.Event:
    """Train from the batch of a step, which may be late in the epoch, until the bug strikes."""
    train_step, loader = demo.setup(bug, bug, 0)
    with train_step, pytest.raises(anynan.NonFiniteError) as caught:
        for step in range(start, start + 8):
            train_step(step, *loader.batch(step))
    event: anynan.Event = caught.value.event
    return event


# Where each bug is found: layer, phase, kind, operation, cause, line.
FOUND = {
    "mask": ("blocks.0.attention", "forward", "nan", "softmax", "softmax_fully_masked",
             "weights = scores.softmax(dim=-1)"),
    "where": (None, "backward", "nan", "sqrt", "where_gradient_trap",
              "size = torch.where(real, square.sqrt(), 0.0)"),
    "mean": (None, "loss", "nan", "divide", "divide_by_zero", "loss = loss / count"),
}  # fmt: skip


@pytest.mark.parametrize("bug", FOUND)
def test_a_bug_of_the_data_is_named(bug: str) -> None:
    event = strike(bug, start=22 if bug == "where" else 35)
    operation, cause = event.operation, event.cause
    assert operation.source.file.endswith("demo.py")
    where = (event.layer, event.phase, event.kind)
    assert (*where, operation.name, cause.tag, operation.source.text) == FOUND[bug]


def test_a_bad_batch_is_named_by_its_argument() -> None:
    event = strike("batch", start=35)
    found = (event.phase, event.kind, event.tensor, event.cause.tag)
    assert found == ("input", "nan", "weight", "bad_input")


@pytest.mark.slow
def test_the_overflow_is_warned_of_and_then_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = demo.setup("overflow", "overflow", 0)
    monkeypatch.setattr(demo, "setup", lambda *_: pair)
    assert demo.main("overflow") == 0
    printed = capsys.readouterr().out
    assert re.search(r"Found at step \d+\. Run again with --fixed", printed), printed
    event: Any = next(event for event in pair[0].events if event.severity == "bad")
    warned = next(line for line in printed.splitlines() if "beyond the limit" in line)
    assert "attention.scores" in warned
    assert event.step >= 20
    assert event.layer.endswith("attention.scores")
    assert event.kind in ("posinf", "neginf")
    made = event.operation
    assert (event.phase, made.name, made.output.dtype) == ("forward", "matmul", "float16")
    assert made.source.text == "return q @ k.transpose(-2, -1)"
    assert event.cause.tag in ("overflow_in_dtype", "learning_rate_divergence")


FIXED = [
    ("mask", 2 * demo.EPOCH + 1),
    *(pytest.param(bug, None, marks=pytest.mark.long) for bug in demo.BUGS),  # to its end
]


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "steps"), FIXED)
def test_the_fixed_demo_trains(
    bug: str, steps: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(bug, fixed=True, steps=steps) == 0
    printed = capsys.readouterr().out
    found: Any = re.search(r"fell from (\S+) to (\d+\.\d+)\.", printed)
    assert float(found[2]) < float(found[1]) - 0.5


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Run a script as the command does, here: most of a process of its own would be imports."""
    jax: Any = sys.modules.get("jax")
    wide = jax is not None and jax.config.jax_enable_x64

    def run(script: Path, *arguments: str) -> str:
        if script.stem.startswith("keras"):
            pytest.importorskip("tensorflow")
        if wide:  # a process of its own has 32-bit numbers
            jax.config.update("jax_enable_x64", False)
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runpy.run_path(str(script.relative_to(ROOT)), run_name="__main__")
        return capsys.readouterr().out

    yield run
    if wide:
        jax.config.update("jax_enable_x64", True)


def settled(report: str) -> list[str]:
    """Keep the lines that depend neither on the processor nor on the version of the text."""
    headline = re.sub(r"step \d+", "step #", report.splitlines()[0])
    rows = re.findall(r"^  (?:layer|parameter|op|cause|fix) .*$", report, re.MULTILINE)
    return [headline, *(row.partition("  (call")[0] for row in rows)]


@pytest.mark.slow
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_what_the_page_shows(script: Path, run: Any) -> None:
    page = (ROOT / "docs" / "examples" / "index.md").read_text(encoding="utf-8")
    shown: Any = re.search(rf"{script.name}\n```\n\n```text\n(.*?)\n```", page, re.DOTALL)
    with pytest.raises(anynan.NonFiniteError) as caught:
        run(script)
    assert settled(f"NonFiniteError: {caught.value}") == settled(shown[1])


@pytest.mark.slow
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_a_fixed_example_trains(script: Path, run: Any) -> None:
    printed = run(script, "--fixed")
    found: Any = re.search(r"every number finite; \w+ (\S+?)%? -> (\S+?)%?$", printed)
    assert float(found[2]) < float(found[1])
