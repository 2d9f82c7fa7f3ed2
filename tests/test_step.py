"""A step owns its fields: adapters read them, and call its methods."""

import ast
from pathlib import Path

import pytest

from anynan._readings.step import Step

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "tests" / "fake_adapter.py", *sorted((ROOT / "adapters").rglob("*.py"))]
FIELDS = set(Step.__slots__) - {"__weakref__"}
# What has a field of the same name, and is no step.
OTHERS = {
    "_local", "block", "call", "made", "op", "part", "record", "recorder", "second", "self",
    "self._note(context, root)", "self._traces.of(graph)", "start", "state", "tape", "watch",
}  # fmt: skip
CHANGING = {
    "add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove",
    "reverse", "setdefault", "sort", "update",
}  # fmt: skip


def writes(tree: ast.AST) -> list[str]:
    """List what writes a field of a step: an assignment, or a change of the list in it."""
    found = []
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            targets = [node.func.value] if node.func.attr in CHANGING else []
        for target in targets:
            each = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
            found += [ast.unparse(x) for x in each if _is_field(x)]
    return found


def _is_field(x: ast.expr) -> bool:
    while isinstance(x, ast.Subscript | ast.Starred):
        x = x.value
    if not isinstance(x, ast.Attribute) or x.attr not in FIELDS:
        return False
    owner = x.value.attr if isinstance(x.value, ast.Attribute) else ast.unparse(x.value)
    return owner not in OTHERS


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_adapter_writes_a_field_of_a_step(path: Path) -> None:
    assert writes(ast.parse(path.read_text(encoding="utf-8"))) == []


def test_that_test_can_fail() -> None:
    code = "rows.sites += [1]; step.rows.lo[0], x = 1, 2; self.rows.live.clear(); step.skip = True"
    found = ["rows.sites", "step.rows.lo[0]", "self.rows.live", "step.skip"]
    assert sorted(writes(ast.parse(code))) == sorted(found)
