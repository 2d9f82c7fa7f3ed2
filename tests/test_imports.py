"""Who imports whom: the core names no framework, and an adapter only its own."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import anynan
from anynan._base import about

PACKAGE = Path(anynan.__file__).parent
FRAMEWORKS = ("cupy", "dask", "jax", "keras", "mlx", "tensorflow", "torch", "transformers")
CORE_MAY = {"anynan", "array_api_compat", "numpy", "rich"}
# Adapter -> the packages of its framework, and the name its users know it by.
ADAPTERS = {
    "arrays": ({"array_api_compat"}, "NumPy"),
    "cupy": ({"cupy"}, "CuPy"),
    "jax": ({"jax"}, "JAX"),
    "keras": ({"keras"}, "Keras"),
    "mlx": ({"mlx"}, "MLX"),
    "tensorflow": ({"keras", "tensorflow"}, "TensorFlow"),
    "torch": ({"torch"}, "PyTorch"),
}

# A file named after a library is where it is met: `jax_steps.py` is where Keras meets JAX.
RUNS_ON = {name: name for name in ("jax", "lightning", "pytest", "torch", "transformers")}

# What a demo trains a model with, beside its framework.
TRAINED_WITH = {"jax": {"flax", "optax"}}


def _python(code: str, *, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    # The child finds anynan where this process did, checkout or wheel.
    places = [str(place) for place in (path, PACKAGE.parent) if place is not None]
    code = f"import sys; sys.path[:0] = {places!r}\n{code}"
    return subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, encoding="utf-8", check=False
    )


def test_every_public_name_resolves_and_neither_they_nor_checks_load_a_framework() -> None:
    done = _python(
        "import anynan, numpy\n"
        "for name in anynan.__all__: getattr(anynan, name)\n"
        "anynan.check(numpy.ones(3)), anynan.summarize(numpy.ones(3))\n"
        f"print(*sorted(set(sys.modules) & set({FRAMEWORKS!r})))"
    )
    assert (done.stderr, done.stdout.split()) == ("", [])
    assert set(anynan.__all__) <= set(dir(anynan))


@pytest.mark.tier(2)
def test_a_report_of_pytorch_does_not_wait_for_the_compiler() -> None:
    pytest.importorskip("torch")
    done = _python(
        "import torch, anynan\n"
        "model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Tanh())\n"
        "model[1].forward = lambda x: (x * 0 - 1).log()\n"
        "tracker = anynan.torch.track(model, action='record')\n"
        "model(torch.ones(1, 1))\n"
        "assert tracker.events[0].operation.name == 'log'\n"
        "print(*({'torch._dynamo', 'sympy'} & set(sys.modules)))"
    )
    assert (done.stderr, done.stdout.split()) == ("", [])


ALL_MISSING = """
import importlib, traceback
for name in NAMES:
    if NOTHING:
        sys.modules[name] = None
    try:
        importlib.import_module(f"anynan.{name}")
    except ImportError as error:
        print(traceback.format_exception_only(error)[-1], end="")
"""


@pytest.mark.parametrize("shadow", ["an empty module", "nothing"])
def test_missing_framework_is_one_line(shadow: str, tmp_path: Path) -> None:
    names = list(about.ADAPTERS)
    assert set(about.FOLDERS.values()) == set(ADAPTERS)
    if shadow == "an empty module":
        for name in names:
            (tmp_path / f"{name}.py").touch()
    code = f"NAMES, NOTHING = {names!r}, {shadow == 'nothing'}\n{ALL_MISSING}"
    done = _python(code, path=tmp_path)
    assert done.stdout.splitlines() == [
        f'ImportError: anynan.{name} needs {ADAPTERS[name][1]}: pip install "anynan[{name}]"'
        for name in names
    ]


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _imports(file: Path) -> Iterator[tuple[str, int]]:
    """Give every imported top-level name, wherever it stands, and its line; "." if relative."""
    for node in ast.walk(_parsed(file)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0], node.lineno
        elif isinstance(node, ast.ImportFrom):
            yield "." if node.level else (node.module or "").partition(".")[0], node.lineno


def _strangers(folder: Path, allowed: set[str], skip: frozenset[str] = frozenset()) -> list[str]:
    may = allowed | set(sys.stdlib_module_names)
    return [
        f"{file.relative_to(folder)}:{line} imports {name}"
        for file in sorted(folder.rglob("*.py"))
        if file.relative_to(folder).parts[0] not in skip
        for name, line in _imports(file)
        if name not in may | {RUNS_ON.get(file.stem.partition("_")[0], "")}
    ]


def test_core_imports_no_framework() -> None:
    assert _strangers(PACKAGE, CORE_MAY, frozenset(ADAPTERS)) == []


def test_core_imports_no_adapter() -> None:
    def room(module: str) -> str:
        return module.split(".")[1] if "." in module else ""

    # What is named after a library and is no adapter leads to one: `anynan.lightning`.
    graph = _graph(_modules(PACKAGE, "anynan"))
    core = {name for name in graph if room(name) not in {*ADAPTERS, *anynan._DOORS}}
    assert {name for name in core if {*map(room, graph[name])} & ADAPTERS.keys()} == set()


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapter_imports_only_its_framework(adapter: str) -> None:
    # "." is not in the list: relative imports mean nothing beside adapters/.
    allowed = {"anynan", "numpy", *ADAPTERS[adapter][0]}
    demo = frozenset({"demo.py"})  # prints, as no other file here does
    assert _strangers(PACKAGE / adapter, allowed, demo) == []
    allowed |= {"rich", *TRAINED_WITH.get(adapter, ())}
    assert _strangers(PACKAGE / adapter, allowed) == []


# Who imports whom among our own modules.


def _modules(folder: Path, package: str) -> dict[str, Path]:
    """Give every module below a folder by its name; adapters lie behind links."""
    found = {}
    for place, _, files in os.walk(folder, followlinks=True):
        for name in files:
            path = Path(place) / name
            if path.suffix == ".py":
                parts = path.relative_to(folder).with_suffix("").parts
                parts = parts[:-1] if parts[-1] == "__init__" else parts
                found[".".join((package, *parts))] = path
    return found


def _graph(modules: dict[str, Path], *, known: bool = False) -> dict[str, set[str]]:
    """Map every module to those it imports; with ``known`` for types alone or by a string, too."""
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        todo: list[ast.AST] = [_parsed(path)]
        names: set[str] = set()
        while todo:
            for node in ast.iter_child_nodes(todo.pop()):
                if isinstance(node, ast.Constant) and known:
                    names.add(str(node.value))
                elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                    todo += [node] if known else []
                    continue
                if isinstance(node, ast.Import):
                    names |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    names |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
                todo.append(node)
        graph[module] = (names & modules.keys()) - {module}
    return graph


def _circle(graph: dict[str, set[str]]) -> list[str]:
    """Give some modules of which each imports the next, and the last the first, if there are."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _is_core(module: str) -> bool:
    return "._" in module and module.split(".")[1] not in ADAPTERS


def test_the_files_of_the_core_know_each_other_one_way() -> None:
    modules = {name: path for name, path in _modules(PACKAGE, "anynan").items() if _is_core(name)}
    assert _circle(_graph(modules, known=True)) == []


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_files_and_folders_of_an_adapter_know_each_other_one_way(adapter: str) -> None:
    folder = PACKAGE / adapter
    modules = _modules(folder, f"anynan.{adapter}")
    assert _circle(_graph(modules, known=True)) == []
    rooms = {path.name for path in folder.iterdir() if (path / "__init__.py").exists()}
    graph: dict[str, set[str]] = {room: set() for room in rooms}
    for module, names in _graph(modules).items():
        for room in _room(module) & rooms:
            graph[room] |= {to for name in names for to in _room(name) & rooms - {room}}
    assert any(graph.values()) == bool(rooms)
    assert _circle(graph) == []


def _room(module: str) -> set[str]:
    return set(module.split(".")[2:3])


# What of PyTorch's is not public, as an upgrade finds it. A module may keep what it names here.
PRIVATE = re.compile(
    r"torch(?:\.\w+)*\._\w+|\b_disable_current_modes\b|\._(?:version|cdata|scale|schema|sequence_nr|"
    r"per_optimizer_states|orig_mod|backward_hooks|register_hook_dict|call_impl|get_backend|"
    r"compiled_call_impl|set_default_timeout|current_level|is_compiling_flag)\b"
)
MAY_NAME = {
    "read/probes.py": {"._current_level"},  # read for every reading, where a call would cost
    "step/hooks.py": {"._is_compiling_flag"},
    "replay/operands.py": {"._schema"},
    "replay/watcher.py": {"._sequence_nr", "torch.autograd._unsafe_preserve_version_counter"},
}


def test_private_parts_of_pytorch_are_named_in_one_file() -> None:
    folder = PACKAGE / "torch"
    for file in {*folder.rglob("*.py")} - {folder / "private.py"}:
        named = {m[0] for m in PRIVATE.finditer(file.read_text(encoding="utf-8"))}
        assert named <= MAY_NAME.get(file.relative_to(folder).as_posix(), set()), file


# They warn in the framework's own name, whoever calls them: PyTorch since 2.14, NumPy since 2.5.
OLD = re.compile(r"torch\.jit\.(script|trace|load|save)\(|(?<!self)\.shape = ")


def test_no_adapter_calls_what_frameworks_are_known_to_give_up() -> None:
    for path in (path for adapter in ADAPTERS for path in (PACKAGE / adapter).rglob("*.py")):
        assert not OLD.search(path.read_text(encoding="utf-8")), path
