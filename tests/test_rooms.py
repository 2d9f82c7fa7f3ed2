"""The same room has the same name in every adapter."""

import ast
from pathlib import Path

import pytest

ADAPTERS = Path(__file__).parents[1] / "adapters"

# Adapters that are too small for folders have none.
LARGE = sorted(path.name for path in ADAPTERS.glob("*") if any(path.glob("*/__init__.py")))
# What every large adapter has, and what those have that work on a traced program.
EVERY = {"doctor", "tracking", "read/probes", "replay/replay", "session/session"}
TRACED = {
    "reader",
    "graphs/lines",
    "graphs/names",
    "graphs/operations",
    "read/places",
    "read/readings",
    "read/spots",
    "replay/records",
    "replay/steps",
    "replay/wide",
}

pytestmark = pytest.mark.skipif(not ADAPTERS.exists(), reason="not a checkout")


def _files(adapter: str) -> set[str]:
    folder = ADAPTERS / adapter
    return {str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.py")}


@pytest.mark.parametrize("adapter", LARGE)
def test_a_large_adapter_has_the_common_rooms(adapter: str) -> None:
    assert _files(adapter) >= EVERY


@pytest.mark.parametrize("adapter", ["jax", "tensorflow"])
def test_adapters_of_traced_programs_share_theirs(adapter: str) -> None:
    assert _files(adapter) >= TRACED
    assert (ADAPTERS / adapter / "README.md").exists()


@pytest.mark.parametrize("adapter", LARGE)
def test_a_room_is_introduced_in_one_line(adapter: str) -> None:
    for path in (ADAPTERS / adapter).glob("*/__init__.py"):
        (docstring,) = ast.parse(path.read_text(encoding="utf-8")).body
        assert isinstance(docstring, ast.Expr)
        assert path.read_text(encoding="utf-8").count("\n") == 1
