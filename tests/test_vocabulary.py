"""The vocabulary holds every name that an adapter gives or a rule asks for, and no other."""

import ast
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anynan._diagnosis import causes, lineage
from anynan._diagnosis.rules import gradient
from anynan._diagnosis.vocabulary import WAITING, WORDS, bounds
from anynan.arrays.names import canonical

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "adapters").rglob("names.py"))
TABLES = ("_WORDS", "PRIMITIVES", "FUNCTIONS", "TYPES")
# Given by code, and in no table.
BY_CODE = {"adam"}


def given(file: Path) -> set[str]:
    """List the names that the tables of a file give."""
    scope: dict[str, Any] = runpy.run_path(str(file))
    return {word for name in TABLES for word in scope.get(name, {}).values()}


TABLED = set().union(*map(given, FILES)) | BY_CODE


def compared(tree: ast.AST) -> Iterator[str]:
    """Walk the names that the code of a rule compares an operation's with."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) in (
            "s.operation", "op", "s.record.name", "s.then.name",
        ):  # fmt: skip
            for item in ast.walk(node):
                if isinstance(item, ast.Constant) and isinstance(item.value, str):
                    yield item.value


def asked() -> set[str]:
    """List the names that rules and lineage ask for."""
    found = set().union(*(rule.operations for rule in causes.RULES))
    found |= lineage.PLACING | lineage._PRODUCTS | gradient._HIDING
    for file in (ROOT / "anynan/_diagnosis/rules").glob("*.py"):
        found.update(compared(ast.parse(file.read_text())))
    return found


ASKED = asked()


def numpys(name: str) -> bool:
    """Tell whether NumPy's own function comes out under this name."""
    places = (np, np.linalg)
    return canonical(name) == name and any(hasattr(place, name) for place in places)


def torchs(name: str) -> bool:
    """Tell whether PyTorch has an operator that comes out under this name."""
    torch = pytest.importorskip("torch")
    from anynan.torch.replay.names import canonical as torchs_name

    packet = getattr(torch.ops.aten, name, None)
    if packet is None or torchs_name(f"aten::{name}") != name:
        return False
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    found = [getattr(packet, overload) for overload in packet.overloads()]
    # What is made of others is not seen by itself.
    return not all(overload.has_kernel_for_dispatch_key(composite) for overload in found)


def test_the_vocabulary_has_every_name_of_adapters_and_rules_and_no_other() -> None:
    assert set(WORDS) == ASKED | TABLED


@pytest.mark.parametrize("name", sorted(ASKED - TABLED - set(WAITING)))
def test_every_name_of_a_rule_is_made(name: str) -> None:
    assert numpys(name) or torchs(name)


@pytest.mark.parametrize("name", sorted(WAITING))
def test_what_waits_is_made_by_nobody(name: str) -> None:
    assert name in ASKED - TABLED
    assert not numpys(name)
    assert not torchs(name)


FUNCTIONS = {
    "acos": np.arccos, "acosh": np.arccosh, "asin": np.arcsin, "atanh": np.arctanh,
    "log": np.log, "log10": np.log10, "log1p": np.log1p, "log2": np.log2, "sqrt": np.sqrt,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_bounds_are_where_numpy_stops(name: str) -> None:
    low, high = bounds(name)
    with np.errstate(all="ignore"):
        assert np.isnan(FUNCTIONS[name](np.nextafter(low, -np.inf)))
        assert not np.isnan(FUNCTIONS[name](low))
        if high < np.inf:
            assert np.isnan(FUNCTIONS[name](np.nextafter(high, np.inf)))
            assert not np.isnan(FUNCTIONS[name](high))
