"""Who imports whom: the core names no framework, and an adapter only its own."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

import anynan

PACKAGE = Path(anynan.__file__).parent
FRAMEWORKS = ("cupy", "dask", "jax", "keras", "tensorflow", "torch", "transformers")
CORE_MAY = {"anynan", "array_api_compat", "numpy", "rich"}
# Adapter -> the packages of its framework, and the name its users know it by.
ADAPTERS = {
    "cupy": ({"cupy"}, "CuPy"),
    "jax": ({"jax"}, "JAX"),
    "keras": ({"keras"}, "Keras"),
    "tensorflow": ({"keras", "tensorflow"}, "TensorFlow"),
    "torch": ({"torch"}, "PyTorch"),
}

# Keras runs on other frameworks: `jax_steps.py` is where its adapter meets JAX.
RUNS_ON = {"jax": "jax", "torch": "torch"}

# What a demo trains a model with, beside its framework.
TRAINED_WITH = {"jax": {"flax", "optax"}}


def _python(code: str, *, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    # The child finds anynan where this process did, checkout or wheel.
    places = [str(place) for place in (path, PACKAGE.parent) if place is not None]
    code = f"import sys; sys.path[:0] = {places!r}\n{code}"
    return subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, encoding="utf-8", check=False
    )


def _loaded_after(code: str) -> set[str]:
    done = _python(f"{code}\nprint(*sorted(set(sys.modules) & set({FRAMEWORKS!r})))")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_import_loads_no_framework() -> None:
    assert _loaded_after("import anynan") == set()


def test_direct_checks_load_no_framework() -> None:
    code = "import anynan, numpy\nanynan.check(numpy.ones(3))\nanynan.summarize(numpy.ones(3))"
    assert _loaded_after(code) == set()


def test_that_test_can_fail() -> None:
    pytest.importorskip("torch")
    assert "torch" in _loaded_after("import anynan; anynan.torch")


def test_every_public_name_resolves() -> None:
    code = "import anynan\nfor name in anynan.__all__: getattr(anynan, name)"
    assert _loaded_after(code) == set()
    assert set(anynan.__all__) <= set(dir(anynan))


def test_these_tests_know_every_adapter() -> None:
    assert set(ADAPTERS) == set(anynan._ADAPTERS)


def test_unknown_names_stay_unknown() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'chekc'"):
        getattr(anynan, "chekc")  # noqa: B009 - mypy would see the plain form


def test_functions_outlive_the_modules_beside_them() -> None:
    # Importing a submodule binds its name in the package: none may hide a public one.
    done = _python(
        "import anynan, importlib, pathlib\n"
        "before = {name: getattr(anynan, name) for name in anynan.__all__}\n"
        "for path in pathlib.Path(anynan.__file__).parent.glob('*.py'):\n"
        "    if path.stem not in ('__init__', '__main__'):\n"
        "        importlib.import_module(f'anynan.{path.stem}')\n"
        "for name, value in before.items():\n"
        "    assert getattr(anynan, name) is value, name\n"
        "assert callable(anynan.check)\n"
    )
    assert done.returncode == 0, done.stderr


# PyTorch has to be imported before TensorFlow where one process holds both.
BY_NAME = """
import contextlib, importlib, json, anynan
with contextlib.suppress(ImportError):
    importlib.import_module("torch")
found = {}
for name in NAMES:
    assert callable(getattr(anynan, name).track)
    found[name] = [other for other in ADAPTERS if f"anynan.{other}" in sys.modules]
print(json.dumps(found))
"""


@cache
def _by_name() -> dict[str, list[str]]:
    """Load every adapter by its name, Keras's first; tell which ones are loaded after each.

    One process does it: importing a framework takes seconds.
    """
    names = [name for name in ("keras", *ADAPTERS) if find_spec(name) is not None]
    setting = f"NAMES, ADAPTERS = {list(dict.fromkeys(names))!r}, {list(ADAPTERS)!r}\n"
    done = _python(setting + BY_NAME)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapter_comes_by_its_name_alone(adapter: str) -> None:
    if find_spec(adapter) is None:
        pytest.skip(f"{adapter} is not installed")
    assert adapter in _by_name()[adapter]


def test_the_keras_adapter_loads_no_other_before_a_model_needs_it() -> None:
    if find_spec("keras") is None:
        pytest.skip("keras is not installed")
    assert _by_name()["keras"] == ["keras"]


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("shadow", ["an empty module", "nothing"])
def test_missing_framework_is_one_line(adapter: str, shadow: str, tmp_path: Path) -> None:
    code = f"import anynan.{adapter}"
    if shadow == "nothing":
        code = f"sys.modules[{adapter!r}] = None\n{code}"
    else:
        (tmp_path / f"{adapter}.py").touch()
    done = _python(code, path=tmp_path)
    assert done.returncode == 1
    _, known = ADAPTERS[adapter]
    line = f'ImportError: anynan.{adapter} needs {known}: pip install "anynan[{adapter}]"'
    assert done.stderr.strip().splitlines()[-1] == line


def _imports(file: Path) -> Iterator[tuple[str, int]]:
    """Give every imported top-level name, wherever it stands, and its line; "." if relative."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
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


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapter_imports_only_its_framework(adapter: str) -> None:
    # "." is not in the list: relative imports mean nothing beside adapters/.
    allowed = {"anynan", "numpy", *ADAPTERS[adapter][0]}
    demo = frozenset({"demo.py"})  # prints, as no other file here does
    assert _strangers(PACKAGE / adapter, allowed, demo) == []
    allowed |= {"rich", *TRAINED_WITH.get(adapter, ())}
    assert _strangers(PACKAGE / adapter, allowed) == []


def test_strangers_are_seen(tmp_path: Path) -> None:
    (tmp_path / "core.py").write_text("def f():\n    import torch.nn\n    from . import x\n")
    assert _strangers(tmp_path, CORE_MAY) == ["core.py:2 imports torch", "core.py:3 imports ."]
