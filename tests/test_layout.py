"""The tree is what the packaging and the reader rely on."""

import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LONGEST = 700

# A worktree's .git is a file; an unpacked sdist and the tests beside a wheel have none.
pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")


def _git(*args: str) -> list[str]:
    out = subprocess.run(
        ["git", *args, "-z"], cwd=ROOT, check=True, capture_output=True, encoding="utf-8"
    )
    return out.stdout.split("\0")[:-1]


def _files() -> list[str]:
    """List what git holds or would hold, without what was deleted."""
    listed = _git("ls-files", "--cached", "--others", "--exclude-standard")
    return sorted({name for name in listed if (ROOT / name).exists()})


def _adapters() -> set[str]:
    return {name.split("/")[1] for name in _files() if fnmatch(name, "adapters/*/*")}


def _installed(name: str) -> str:
    """Give a source file's place in the wheel."""
    return "anynan/" + name.removeprefix("adapters/").removeprefix("anynan/")


def test_no_test_file_is_longer_than_700_lines() -> None:
    tests = [ROOT / name for name in _files() if fnmatch(name, "tests/*.py")]
    long = {path.name for path in tests if len(path.read_text("utf-8").splitlines()) > LONGEST}
    assert not long, "cut it where its subject changes"


def _build(target: str, into: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (built,) = into.iterdir()
    return built


def test_every_adapter_has_its_link() -> None:
    found = (ROOT / "anynan").iterdir()
    links = {path.name: path.readlink() for path in found if path.is_symlink()}
    assert links == {name: Path("../adapters") / name for name in _adapters()}


@pytest.mark.parametrize("name", ["pyproject.toml", "anynan/_base/about.py"])
def test_every_adapter_is_named(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for adapter in _adapters():
        wanted = f'"/anynan/{adapter}"' if name.endswith(".toml") else f'"{adapter}"'
        assert wanted in text, f"{name} does not name the adapter {adapter}"


def test_wheel_holds_the_tracked_files(tmp_path: Path) -> None:
    with zipfile.ZipFile(_build("wheel", tmp_path)) as wheel:
        shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = [
        name
        for name in _files()
        if name.startswith(("anynan/", "adapters/"))
        and not (name.startswith("adapters/") and name.endswith(".md"))
        and not (ROOT / name).is_symlink()
    ]
    assert shipped == {_installed(name) for name in sources}
    assert "anynan/py.typed" in shipped
