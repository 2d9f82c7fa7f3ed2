"""Fixtures that run a test over every backend: backend -> xp -> device -> space."""

import gc
import importlib
import itertools
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

import anynan
from anynan._arrays import registry
from anynan._cli.commands import main
from tests import tiers
from tests.backends import Backend, Space, parse

# What is imported and collected stays: to look through it again and again takes seconds.
gc.disable()
# JAX reads this once, when it is first used, whichever test that is in: sharding needs devices.
_DEVICES = "--xla_force_host_platform_device_count=8"
if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()

# Most of what a test of JAX takes is XLA's work on the program; ``fully_optimized`` has it done.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Tests compile the same again and again, in every process.
_COMPILED = Path(__file__).parents[1] / "build" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_COMPILED))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

_tests = itertools.count(1)
_CHOSEN = pytest.StashKey[list[Backend]]()

# The same examples every time, and nothing written beside the code.
hypothesis.settings.register_profile("suite", deadline=None, database=None, derandomize=True)
hypothesis.settings.load_profile("suite")


@pytest.fixture(scope="module", autouse=True)
def _small_heap() -> None:
    """Leave what is imported out of each collection, which takes half a second otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Give each test the same random numbers, whatever ran before it in its process."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002, tests and the libraries they use draw from it, too
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    if tensorflow := sys.modules.get("tensorflow"):
        tensorflow.random.set_seed(0)


@pytest.fixture(autouse=True)
def _small_heap_still() -> Iterator[None]:
    """Do so now and then in a long module, too: traces and compiled code pile up there."""
    yield
    if not next(_tests) % 50:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _time_to_hunt() -> None:
    """Let a hunt end by itself on a machine that has much else to do."""
    (anynan.stress.__kwdefaults__ or {})["budget"] = 600.0


def pytest_addoption(parser: pytest.Parser) -> None:
    said = "backends that must run; a missing one fails (default: every installed one)"
    parser.addoption("--backends", default=None, metavar="a,b", help=said)
    said = "run the tests of these tiers alone; tests/tiers.py says which test is in which"
    parser.addoption("--tiers", default="0-2", metavar="N-M", help=said)
    said = "write what each test took into this file, beside what it says of other tests"
    parser.addoption("--durations-to", metavar="FILE", help=said)
    said = "walk N times as many random programs, other ones each time, and run the long tests"
    parser.addoption("--chaos", default=0, type=int, metavar="N", help=said)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an accelerator")
    config.addinivalue_line("markers", "tier(n): see tests/tiers.py")
    wanted = config.getoption("--backends")
    try:
        chosen = [b for b in Backend if b.installed] if wanted is None else parse(wanted)
        config.stash[_CHOSEN] = chosen
        config.stash[tiers.ASKED] = tiers.chosen(config.getoption("--tiers"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    if config.getoption("--durations-to"):
        config.pluginmanager.register(tiers.Durations(Path(config.getoption("--durations-to"))))
    if config.stash[tiers.ASKED][-1] == 0:
        sys.meta_path.insert(0, tiers.Hidden())
    elif tiers.installed("tensorflow") and tiers.installed("torch"):
        # PyTorch has to be imported before TensorFlow where one process holds both.
        importlib.import_module("torch")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what holds no test that is asked for, so that nobody imports it."""
    return True if tiers.least(collection_path) > config.stash[tiers.ASKED][-1] else None


def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[Any] | None:
    """Leave out a test of a later tier before each of its cases is built."""
    marks = [mark for mark in getattr(obj, "pytestmark", ()) if mark.name == "tier"]
    late = any(mark.args[0] > collector.config.stash[tiers.ASKED][-1] for mark in marks)
    return [] if late else None


def pytest_runtestloop() -> None:
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Begun last, a file that takes long has one core wait for the other.
    took = tiers.seconds(config.stash[tiers.ASKED])
    items.sort(key=lambda item: -took.get(item.nodeid.partition("::")[0], 0))
    for item in items:
        item.user_properties.append(("tier", tiers.tier(item)))
    wanted = config.stash[tiers.ASKED]
    other = [item for item in items if tiers.tier(item) not in wanted]
    config.hook.pytest_deselected(items=other)
    items[:] = [item for item in items if tiers.tier(item) in wanted]
    if config.getoption("--chaos") or "long" in config.getoption("markexpr"):
        return
    left = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


def pytest_report_header(config: pytest.Config) -> str:
    chosen = config.stash[_CHOSEN]
    left = [backend.value for backend in Backend if backend not in chosen]
    names = ", ".join(backend.value for backend in chosen)
    return f"backends: {names}" + (f" (not run: {', '.join(left)})" if left else "")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        last = metafunc.config.stash[tiers.ASKED][-1]
        chosen = [
            pytest.param(b, id=b.value, marks=b.marks)
            for b in metafunc.config.stash[_CHOSEN]
            if b.tier <= last
        ]
        metafunc.parametrize("backend", chosen, indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Any:
    """The array library of this run."""
    return request.param


@pytest.fixture
def xp(backend: Backend, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend's array API namespace, its adapter imported or out of sight."""
    try:
        namespace = backend.load()
    except ImportError as error:
        if request.config.getoption("--backends") is not None:
            pytest.fail(f"--backends names {backend.value}, which cannot run: {error}")
        pytest.skip(f"{backend.value} cannot run: {error}")
    if backend.adapter is None:
        monkeypatch.setattr(registry, "_readers", [])
    else:
        importlib.import_module(backend.adapter)
    return namespace


@pytest.fixture
def device(backend: Backend) -> Any:
    """The device of this run, None for the library's default."""
    return "cuda" if backend.variant == "cuda" else None


@pytest.fixture
def space(backend: Backend, xp: Any, device: Any) -> Space:
    """What makes the arrays of this run."""
    return Space(backend, xp, device)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command here: give its exit status, and what it printed to both streams."""

    def run(*words: object) -> tuple[Any, str, str]:
        try:
            status: Any = main([*map(str, words)])
        except SystemExit as ended:
            status = ended.code
        return (status, *capsys.readouterr())

    return run


@pytest.fixture(autouse=True)
def _no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own ANYNAN and terminal must not decide what the tests see."""
    monkeypatch.delenv("ANYNAN", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
