"""What waits for a module is called once it is whole, whoever imports it and from where."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anynan._base.imports import when_imported

WRITTEN = {
    "waited_inner": "made = True\n",
    "waited_outer": "import waited_inner\nlate = True\n",
    "waited_broken": "import waited_inner\nraise OSError('no disk')\n",
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Write a module that imports another while it is imported itself."""
    for name, text in WRITTEN.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    finders = list(sys.meta_path)
    yield
    for name in WRITTEN:
        sys.modules.pop(name, None)
    assert sys.meta_path == finders


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("first", ["waited_inner", "waited_outer"])
def test_a_module_is_whole_when_it_is_told_of(first: str) -> None:
    seen: list[object] = []

    def outer() -> None:
        seen.append(sys.modules["waited_outer"].late)

    leave: list[Callable[[], None]] = []
    when_imported("waited_inner", lambda: leave.append(when_imported("waited_outer", outer)))
    importlib.import_module(first)
    assert seen == [True] * (first == "waited_outer")
    importlib.import_module("waited_outer")
    assert seen == [True]
    assert type(sys.modules["waited_outer"].__spec__) is type(pytest.__spec__)
    when_imported("waited_outer", outer)
    assert seen == [True, True]


@pytest.mark.usefixtures("modules")
def test_a_module_that_was_looked_for_or_failed_before_is_told_of(tmp_path: Path) -> None:
    seen: list[object] = []
    when_imported("waited_broken", lambda: seen.append("told"))
    assert importlib.util.find_spec("waited_broken") is not None
    with pytest.raises(OSError, match="no disk"):
        importlib.import_module("waited_broken")
    assert seen == []
    (tmp_path / "waited_broken.py").write_text("made = 'this time'\n")
    importlib.invalidate_caches()
    importlib.import_module("waited_broken")
    assert seen == ["told"]
