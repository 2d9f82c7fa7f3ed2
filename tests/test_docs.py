"""Every example in the documentation runs, and prints what the page says it prints.

The ``python`` blocks of a page run in order in one namespace. Where the next block is
``text``, that is what the block prints, the report of an AnomalyError it raises included.
``python -m tests.test_docs [PAGE...]`` writes the real output into the pages.
"""

import contextlib
import doctest
import gc
import importlib
import io
import linecache
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import anynan
from anynan._base.about import ADAPTERS
from anynan._steps.subject import watching
from anynan._steps.tracked import Tracked

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("README.md"), *ROOT.glob("docs/**/*.md")])
# The file that a report names; its lines are counted over the python blocks of a page.
SCRIPT = "train.py"
FENCE = re.compile(r"^```(?P<lang>[a-z]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
# A report that a page shows again: the page that runs it, and which of its text blocks it is.
AGAIN = re.compile(r"<!-- from (\S+) (\d+) -->\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# The last digits of a computed value are the processor's own.
# A large norm is shown without a point.
INEXACT = re.compile(r"\d+\.\d+(e[+-]?\d+)?|(?<=norm )[\d,]+|[ \t]+")


@dataclass
class Example:
    """Hold one python block and the span of the text block that shows its output."""

    code: str
    line: int
    shown: str | None = None
    span: tuple[int, int] = (0, 0)


@pytest.fixture
def _nothing_stays() -> Iterator[None]:
    """Take away what is left tracked, before a page and after it: reports count models."""
    _remove_all()
    yield
    _remove_all()


def _remove_all() -> None:
    gc.collect()
    for ref in list(watching.values()):
        tracker = ref()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if isinstance(tracker, Tracked):
                tracker.remove()
    gc.collect()


def examples(page: str) -> list[Example]:
    """Find the python blocks of a page."""
    found: list[Example] = []
    after_code = False
    for fence in FENCE.finditer(page):
        lang, body = fence["lang"], fence["body"]
        if lang == "python":
            found.append(Example(body, page.count("\n", 0, fence.start("body")) + 1))
        elif lang == "text" and after_code:
            found[-1].shown, found[-1].span = body, fence.span("body")
        after_code = lang == "python"
    return found


def outputs(page: list[Example]) -> Iterator[str]:
    """Run the blocks of a page in order, and give what each prints."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            yield from _run(page, namespace)
    finally:
        for name in [name for name in namespace if not name.startswith("__")]:
            del namespace[name]  # the compiler takes its own names out later, and misses them


def _run(page: list[Example], namespace: dict[str, Any]) -> Iterator[str]:
    script: list[str] = []
    for example in page:
        code = compile("\n" * len(script) + example.code, SCRIPT, "exec")
        script += example.code.splitlines(keepends=True)
        linecache.cache[SCRIPT] = (0, None, script, SCRIPT)
        with contextlib.redirect_stdout(io.StringIO()) as out, warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("always", anynan.AnynanWarning)
            warnings.showwarning = _print_warning
            try:
                exec(code, namespace)
            except anynan.AnomalyError as error:
                print(f"{type(error).__name__}: {error}")
                if example.shown is None:
                    error.add_note(f"the block in line {example.line} shows no output")
                    raise
        yield "".join(f"{line.rstrip()}\n" for line in out.getvalue().strip().splitlines())


def on_keras(page: str, number: int, backend: str) -> None:
    """Run a ``py`` block of a page in a process of its own, and print the report it ends in."""
    fences = [x["body"] for x in FENCE.finditer((ROOT / page).read_text("utf-8"))]
    code = [x for x in fences if x.startswith("import anynan, keras")][number]
    Path(SCRIPT).write_text(code, encoding="utf-8")
    paths = os.pathsep.join(filter(None, [str(ROOT), *sys.path]))
    env = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, SCRIPT], env=env, capture_output=True, text=True, check=False
    )
    print(done.stderr[done.stderr.rindex("NonFiniteError: ") :])


def _print_warning(message: object, category: type[Warning], *_: object, **__: object) -> None:
    print(f"{category.__name__}: {message}")


def _rough(text: str) -> list[str]:
    exact = INEXACT.sub(lambda found: " " if found[0].isspace() else "#", text)
    return exact.splitlines()


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# Dynamo's own weak dictionaries complain when what they hold is collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("_nothing_stays")
@pytest.mark.tier(2)
@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_page(page: Path) -> None:
    pytest.importorskip("torch")
    # Another test may have asked for 64 bits, and pages show the default.
    pytest.importorskip("jax").config.update("jax_enable_x64", False)
    pytest.importorskip("tensorflow")
    keras = pytest.importorskip("keras")
    keras.utils.clear_session()  # it numbers layers from the first on
    keras.utils.set_random_seed(0)  # and the weights that pages draw are the same everywhere
    text = page.read_text(encoding="utf-8")
    if "import mlx" in text:
        pytest.importorskip("mlx.core")
    blocks = examples(text)
    for example, output in zip(blocks, outputs(blocks), strict=True):
        if example.shown is not None:
            assert _rough(output) == _rough(example.shown), f"{_name(page)}:{example.line}"


def _with_examples() -> list[str]:
    """Name the modules in which an example stands, without importing them."""
    files = [*(ROOT / "anynan").rglob("*.py"), *(ROOT / "adapters").rglob("*.py")]
    shown = [path for path in files if ">>> " in path.read_text(encoding="utf-8")]
    parts = [path.relative_to(ROOT).with_suffix("").parts[1:] for path in shown]
    return sorted({".".join(("anynan", *one)).removesuffix(".__init__") for one in parts})


@pytest.mark.parametrize("name", _with_examples())
def test_docstrings(name: str) -> None:
    for adapter in (*ADAPTERS, *anynan._DOORS):
        if name.startswith(f"anynan.{adapter}") or name.endswith(f".{adapter}"):
            pytest.importorskip(adapter)
    if "import torch" in Path(str(importlib.import_module(name).__file__)).read_text("utf-8"):
        pytest.importorskip("torch")
    assert not doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed


def _block(page: str, number: str) -> str:
    fences = FENCE.finditer((ROOT / page).read_text(encoding="utf-8"))
    return [fence["body"] for fence in fences if fence["lang"] == "text"][int(number)]


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/gallery*.md")), ids=_name)
def test_the_gallery_shows_what_other_pages_run(page: Path) -> None:
    shown = AGAIN.findall(page.read_text(encoding="utf-8"))
    assert shown
    for source, number, report in shown:
        assert report == _block(source, number), source


def main(pages: list[Path]) -> None:
    """Write the real output into the pages, where it differs from what they show."""
    for page in pages:
        text = page.read_text(encoding="utf-8")
        blocks = examples(text)
        shown = [
            (example.span, output)
            for example, output in zip(blocks, outputs(blocks), strict=True)
            if example.shown is not None and _rough(output) != _rough(example.shown)
        ]
        for (start, end), output in reversed(shown):
            text = text[:start] + output + text[end:]
        page.write_text(text, encoding="utf-8")
        _remove_all()
    for page in ROOT.glob("docs/gallery*.md"):
        text = page.read_text(encoding="utf-8")
        page.write_text(AGAIN.sub(_again, text), encoding="utf-8")


def _again(found: re.Match[str]) -> str:
    source, number, old = found.groups()
    return found[0].replace(old, _block(source, number))


if __name__ == "__main__":
    main([Path(name).resolve() for name in sys.argv[1:]] or PAGES)
