"""The same room has the same name in every adapter."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

import anynan

ADAPTERS = Path(__file__).parents[1] / "adapters"

pytestmark = pytest.mark.skipif(not ADAPTERS.exists(), reason="not a checkout")


# The rooms of the core, each on top of those before it; docs/contributing.md says what each is.
ORDER = (
    *("events", "errors", "_base", "_trace", "_arrays", "_files", "_readings", "_diagnosis"),
    *("_reach", "_reports", "_calls", "options", "_checks", "_steps", "_runs", "tracker"),
    *("_everywhere", "_cli", "_notebooks", "_monitored", "_apps"),
)
# Ground floor: these three know each other.
GROUND = {"events", "errors", "_base"}
CORE = Path(__file__).parents[1] / "anynan"


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _imported(path: Path) -> set[str]:
    """Name the modules that a file imports anywhere: in functions, for types, by a string."""
    found = set()
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module == "anynan":
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("anynan."):
            found.add((node.module or "").split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {name.name.split(".")[1] for name in node.names if "anynan." in name.name}
        elif isinstance(node, ast.Constant) and str(node.value).startswith("anynan._"):
            found.add(str(node.value).split(".")[1])
    return found


def _floor(room: str) -> int:
    return 0 if room in GROUND else ORDER.index(room)


@pytest.mark.parametrize("room", ORDER)
def test_a_room_stands_on_those_below_it(room: str) -> None:
    paths = [*CORE.glob(f"{room}.py"), *CORE.glob(f"{room}/**/*.py")]
    assert paths
    for path in paths:
        above = {x for x in _imported(path) if x in ORDER and _floor(x) > _floor(room)}
        assert not above, f"{path.relative_to(CORE)} imports {', '.join(sorted(above))}"


PRODUCTS = sorted(path.parent.name for path in CORE.glob("_apps/*/__init__.py"))


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_knows_no_other(product: str) -> None:
    for path in (CORE / "_apps" / product).rglob("*.py"):
        known = set(re.findall(r"_apps\.(\w+)", path.read_text(encoding="utf-8")))
        assert known <= {product}, path


# Its own doors and sides, such as ``anynan.comparing``, go with a product.
WITHOUT = """
import importlib, sys, numpy

class Gone:
    def find_spec(self, name, path=None, target=None):
        if name == GONE or name.startswith(GONE + "."):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Gone())
import anynan
for module in MODULES:
    importlib.import_module(module)
with anynan.track(numpy.log, action="record") as log, numpy.errstate(all="ignore"):
    log(numpy.array([-1.0]))
assert log.events[0].cause.tag == "log_of_negative"
from anynan._cli.commands import main
main([])
"""


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_can_be_taken_out(product: str) -> None:
    gone = f"anynan._apps.{product}"
    rooms = [*CORE.glob("_*/**/*.py"), *CORE.glob("*.py"), *(CORE / "arrays").glob("*.py")]
    modules = [
        ".".join(("anynan", *path.relative_to(CORE).with_suffix("").parts))
        for path in rooms
        if path.stem not in ("__init__", "__main__", "pytest_plugin", *anynan._DOORS)
        and gone not in path.read_text(encoding="utf-8")
    ]
    rest = [module for module in modules if not module.startswith(f"{gone}.")]
    code = f"GONE, MODULES = {gone!r}, {rest!r}\n{WITHOUT}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_order_is_written_down_once_more_for_readers() -> None:
    text = (CORE.parent / "docs" / "contributing.md").read_text(encoding="utf-8")
    assert " <- ".join(f"`{room}`" for room in ORDER) in " ".join(text.split())


# So many ways through one function of the core, and of an adapter.
MOST, MOST_OF_ADAPTERS = 20, 30
# What runs for every operation or call is spelt out, as a function of its own would cost as much as
# what it does. These may only shrink.
SPELT_OUT = {
    "adapters/arrays/step_level.py:call": 36,
    "adapters/torch/call/noted.py:__torch_function__": 40,
    "adapters/torch/step/hooks.py:__call__": 36,
}
_BRANCHES = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.Assert, ast.match_case)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _complexity(function: ast.AST) -> int:
    """Count the ways through a function, those of a condition and of a comprehension too."""
    count, todo = 1, list(ast.iter_child_nodes(function))
    while todo:
        node = todo.pop()
        count += isinstance(node, _BRANCHES)
        count += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        count += 1 + len(node.ifs) if isinstance(node, ast.comprehension) else 0
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            todo += ast.iter_child_nodes(node)
    return count


def _too_complex(paths: Iterable[Path], most: int) -> dict[str, int]:
    found = {
        f"{path.relative_to(CORE.parent).as_posix()}:{node.name}": _complexity(node)
        for path in paths
        for node in ast.walk(_parsed(path))
        if isinstance(node, _FUNCTIONS)
    }
    return {name: count for name, count in found.items() if count > SPELT_OUT.get(name, most)}


def test_no_function_is_too_complex() -> None:
    assert _too_complex([*CORE.glob("*.py"), *CORE.glob("_*/**/*.py")], MOST) == {}
    assert _too_complex(ADAPTERS.glob("**/*.py"), MOST_OF_ADAPTERS) == {}
