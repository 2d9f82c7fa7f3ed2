"""The tree is what the packaging and the reader rely on."""

import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A worktree's .git is a file; an unpacked sdist and the tests beside a wheel have none.
pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")


def _git(*args: str) -> list[str]:
    out = subprocess.check_output(["git", *args, "-z"], cwd=ROOT, encoding="utf-8")
    return out.split("\0")[:-1]


def _files() -> list[str]:
    """List what git holds or would hold, without what was deleted."""
    listed = _git("ls-files", "--cached", "--others", "--exclude-standard")
    return sorted({name for name in listed if (ROOT / name).exists()})


def _adapters() -> set[str]:
    return {name.split("/")[1] for name in _files() if fnmatch(name, "adapters/*/*")}


def test_no_test_file_is_longer_than_700_lines() -> None:
    tests = [ROOT / name for name in _files() if fnmatch(name, "tests/*.py")]
    long = {path.name for path in tests if path.read_text("utf-8").count("\n") > 700}
    assert not long, "cut it where its subject changes"


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
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (built,) = tmp_path.iterdir()
    with zipfile.ZipFile(built) as wheel:
        shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = {
        "anynan/" + name.partition("/")[2]
        for name in _files()
        if name.startswith(("anynan/", "adapters/"))
        and not fnmatch(name, "adapters/*.md")
        and not (ROOT / name).is_symlink()
    }
    assert shipped == sources
    assert "anynan/py.typed" in shipped
