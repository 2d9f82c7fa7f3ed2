"""The user's own line: found past libraries, the standard library and anynan itself."""

import functools
import importlib.util
import linecache
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import anynan
from anynan._base.sources import is_library, user_source
from anynan.events import Source

SITE = os.path.join(os.sep, "env", "lib", "site-packages")
OWN = os.path.dirname(os.path.abspath(anynan.__file__))


def library(path: str, root: str = SITE) -> Callable[[Callable[[], Any]], Any]:
    """Make a function ``step(inner)`` that lives in a library's file."""
    space: dict[str, Any] = {}
    exec(compile("def step(inner):\n    return inner()\n", os.path.join(root, path), "exec"), space)
    made: Callable[[Callable[[], Any]], Any] = space["step"]
    return made


def through(*paths: str, **options: Any) -> Source | None:
    """Ask for the user's line inside calls through these library files, the outermost first."""
    call = functools.partial(user_source, None, skip=1, **options)
    for path in reversed(paths):
        call = functools.partial(library(path), call)
    source: Source | None = call()  # the user's line
    return source


def test_a_library_is_passed_and_kept_beside_the_line() -> None:
    source = through("lib/functional.py")
    assert source.file == __file__
    assert source.text == "source: Source | None = call()  # the user's line"
    assert source.via == f"lib{os.sep}functional.py:2 in step"


LIBRARIES = [
    os.path.join(SITE, "numpy", "core.py"),
    os.path.join(os.sep, "usr", "lib", "python3", "dist-packages", "x.py"),
    os.path.join(sysconfig.get_paths()["stdlib"], "contextlib.py"),
    os.path.join(OWN, "_steps", "tracker.py"),
    *("<frozen importlib._bootstrap>", "<eval_with_key>.12"),
]
USERS = [
    __file__,
    os.path.join(os.sep, "home", "me", "anynan", "train.py"),
    os.path.join(os.sep, "home", "me", "site-packages-notes", "train.py"),
    os.path.join(os.sep, "tmp", "ipykernel_7", "1234.py"),
    *("<stdin>", "<ipython-input-3-abc>", "<doctest anynan[0]>"),
]


def test_libraries_are_known_by_their_place() -> None:
    assert [file for file in (*LIBRARIES, *USERS) if is_library(file)] == LIBRARIES


def part(source: Any) -> str:
    return source.text[source.column : source.end_column]


def test_the_part_of_a_line_that_ran_is_known() -> None:
    found: list[Any] = []
    found += ["ä", user_source(), user_source(skip=1), 3]
    assert found[1].text == found[2].text == 'found += ["ä", user_source(), user_source(skip=1), 3]'
    assert [part(source) for source in found[1:3]] == ["user_source()", "user_source(skip=1)"]


def test_of_an_expression_over_several_lines_the_operation_is_quoted() -> None:
    found = [
        user_source(skip=1),
        (
            0  # a comment
            + 1
            - Ask()
        ),
    ]  # fmt: skip
    assert part(found[1]) == found[1].text == "0 + 1 - Ask()"


class Ask:
    def __rsub__(self, other: int) -> Any:
        return user_source(skip=2)


@contextmanager
def cached(file: str, size: int, *lines: str) -> Iterator[None]:
    linecache.cache[file] = (size, None, list(lines), file)
    try:
        yield
    finally:
        del linecache.cache[file]


def test_the_line_of_another_library_is_quoted_and_the_frameworks_is_not() -> None:
    for path, quoted in (("zoo/model.py", "return inner()"), ("frame/nn.py", "")):
        file = os.path.join(SITE, path)
        with cached(file, 0, "def step(inner):\n", "    return inner()\n"):
            source = through(path, framework="frame")
        assert source.via == f"{path}:2 in step"
        assert source.via_text == quoted


MODULE = """\
def first(ask):
    return 1


def second(ask):
    return ask()
"""


def imported(file: Path, text: str) -> Any:
    """Import a file that was just written."""
    file.write_text(text)
    spec: Any = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("now", "kept"),
    [
        (MODULE, True),
        (MODULE.replace("return 1", "return 2"), True),
        ("import os\n\n" + MODULE, False),
        (MODULE.replace("return ask()", "return ask() + ask()"), False),
        ("def second(:\n" * 10, False),
    ],
)
def test_a_file_that_was_changed_since_is_not_quoted(tmp_path: Path, now: str, kept: bool) -> None:
    module = imported(tmp_path / "model.py", MODULE)
    (tmp_path / "model.py").write_text(now)
    linecache.checkcache()
    source = module.second(user_source)
    assert (source.line, source.function) == (6, "second")
    assert source.text == ("return ask()" if kept else "")
    assert source.changed is not kept


def test_a_notebooks_cell_is_quoted_though_it_is_no_file() -> None:
    file = "/tmp/ipykernel_7/1234.py"
    lines = ["def cell(ask):\n", "    return ask()  # the cell\n"]
    space: dict[str, Any] = {}
    exec(compile("".join(lines), file, "exec"), space)
    with cached(file, 9, *lines):
        assert space["cell"](user_source).text == "return ask()  # the cell"


def test_a_file_that_a_framework_wrote_is_the_frameworks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo = types.ModuleType("zoo")
    zoo.__file__ = os.path.join(SITE, "zoo", "__init__.py")
    monkeypatch.setitem(sys.modules, "zoo", zoo)
    module = imported(tmp_path / "zoo.nn_propagate_abc.py", MODULE)
    module.__name__ = "zoo.nn_propagate_abc"
    source = module.second(lambda: user_source(skip=2))  # the user's line
    assert source.text.endswith("# the user's line")
    assert source.via == "zoo.nn_propagate_abc.py:6 in second"
    assert source.via_text == "return ask()"
