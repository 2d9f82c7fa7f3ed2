"""Words that were given up for plainer ones stay away."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORDS = """
EndsTape LazyTape Light MendedTape Arrival Case Nudge Passed
Side Token Wish parting BaseMender Boards Its Mended
Mender Moment Rounds Settlement Spot Unread Verdicts Whole
Actor Doubt Maker Rise Rows is_spoilt not_meant went_through
"""
RETIRED = set(WORDS.split())
FILES = [path for room in ("anynan", "adapters") for path in sorted((ROOT / room).rglob("*.py"))]

pytestmark = pytest.mark.skipif(not (ROOT / "adapters").exists(), reason="not a checkout")


def _identifiers(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return {
        str(getattr(n, at)) for n in nodes for at in ("id", "attr", "name", "arg") if hasattr(n, at)
    }


def test_no_file_has_a_word_that_was_given_up() -> None:
    found = {f"{path}: {word}" for path in FILES for word in _identifiers(path) & RETIRED}
    assert not found
