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
    "replay/records",
    "replay/steps",
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


def test_decisions_stand_in_the_order_of_the_rooms() -> None:
    page = CORE.parent / "docs" / "decisions.md"
    if not page.exists():
        pytest.skip("not a checkout")
    rooms = re.findall(r"^### `(\w+)`", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rooms) > 3
    assert rooms == sorted(rooms, key=ORDER.index)


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


def test_every_room_has_its_place() -> None:
    rooms = {path.parent.name for path in CORE.glob("_*/__init__.py")}
    rooms |= {path.stem for path in CORE.glob("_*.py")} - {"__init__", "__main__"}
    assert rooms <= set(ORDER)


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


def test_complexity_counts_every_way() -> None:
    code = "def f(x):\n    if x and not x:\n        return [y for y in x if y]\n    return x or 1\n"
    (function,) = ast.parse(code).body
    assert _complexity(function) == 6
