"""Words that were given up for plainer ones stay away."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RETIRED = {
    "EndsTape": "StepTape",
    "LazyTape": "DeferredTape",
    "Light": "FastPath",
    "MendedTape": "a tape with repairs around its operations",
    "Arrival": "BadInput",
    "Case": "Investigation",
    "Nudge": "Perturbation",
    "Passed": "CheckedPoint",
    "Side": "Runner",
    "Token": "Root",
    "Wish": "RunRequest",
    "parting": "divergence",
    "BaseMender": "BaseFixRunner",
    "Boards": "DeviceBuffers",
    "Its": "LoopIndex",
    "Mended": "FixedOp",
    "Mender": "FixRunner",
    "Moment": "BadOp",
    "Rounds": "LoopIterations",
    "Settlement": "StepReader",
    "Spot": "ProbePoint",
    "Unread": "PendingSteps",
    "Verdicts": "ThresholdTable",
    "Whole": "CompositeCall",
    "Actor": "Actions",
    "Doubt": "DeferredInput",
    "Maker": "Producer",
    "Rise": "Escalation",
    "Rows": "Step",
    "is_spoilt": "is_corrupted",
    "not_meant": "not_intended",
    "went_through": "applied_bad_update",
}
FILES = [path for room in ("anynan", "adapters") for path in sorted((ROOT / room).rglob("*.py"))]

pytestmark = pytest.mark.skipif(not (ROOT / "adapters").exists(), reason="not a checkout")


def _identifiers(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return {
        str(getattr(n, at)) for n in nodes for at in ("id", "attr", "name", "arg") if hasattr(n, at)
    }


def test_no_file_has_a_word_that_was_given_up() -> None:
    found = {f"{path}: {word}" for path in FILES for word in _identifiers(path) & RETIRED.keys()}
    assert not found
