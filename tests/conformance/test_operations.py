"""Tracked steps: the same fault gives the same event on every backend with an adapter.

A backend joins by adding ``builders_<library>.py`` with its ``Program`` and ``VARIANTS``, and
with ``DIFFERENCES`` if there is a recipe that it cannot follow. ``builders_array`` serves every
library that array code is written over.
"""

import importlib
import inspect
from importlib.util import find_spec
from typing import Any

import pytest

import anynan
from tests.backends import Backend, Space, parse
from tests.conformance import recipes_operations
from tests.conformance.recipes_operations import FAULTS, SILENT, StepRecipe

# NumPy says by itself that it divided by zero.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("small_heap"),
]


def builders(backend: Backend) -> list[Any]:
    """Return a backend's builders, none if nothing tracks it."""
    name = f"tests.conformance.builders_{backend.library}"
    found = [importlib.import_module(name)] if find_spec(name) else []
    array = importlib.import_module("tests.conformance.builders_array")
    return [*found, array] if backend in array.BACKENDS else found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "variant" not in metafunc.fixturenames:
        return
    wanted = metafunc.config.getoption("--backends")
    chosen = [b for b in Backend if b.installed] if wanted is None else parse(wanted)
    cases = [
        pytest.param(
            (backend, made, variant),
            id=f"{backend.value}-{made.__name__.rpartition('_')[2]}-{variant}",
            marks=[pytest.mark.gpu] if backend.variant == "cuda" else [],
        )
        for backend in chosen
        for made in builders(backend)
        for variant in made.VARIANTS
    ]
    metafunc.parametrize("variant", cases, indirect=True)


@pytest.fixture
def variant(request: pytest.FixtureRequest) -> tuple[Space, Any, str]:
    """Where a program runs: the arrays, the builders, the name of the way."""
    backend, made, name = request.param
    try:
        xp = backend.load()
    except ImportError as error:
        if request.config.getoption("--backends") is not None:
            pytest.fail(f"--backends names {backend.value}, which cannot run: {error}")
        pytest.skip(f"{backend.value} cannot run: {error}")
    space = Space(backend, xp, "cuda" if backend.variant == "cuda" else None)
    return space, made, name


def run(recipe: StepRecipe, variant: Any, **more: Any) -> Any:
    """Run a recipe's steps; its tracker is closed whatever comes of it."""
    space, made, name = variant
    differences = getattr(made, "DIFFERENCES", {})
    for known in (recipe.name, f"{recipe.name}[{name}]"):
        if known in differences:
            pytest.skip(differences[known])
    if not space.has(recipe.dtype):
        pytest.skip(f"{space.backend.value} has no {recipe.dtype}")
    program = made.Program(recipe, space, **(made.VARIANTS[name] | more))
    with program.tracker:
        for number, batch in enumerate(recipe.batches):
            if number == recipe.spoiled:
                program.spoil()
            program.step(batch)
    return program.tracker


@pytest.mark.parametrize("recipe", FAULTS, ids=lambda r: r.name)
def test_fault_is_reported(recipe: StepRecipe, variant: Any) -> None:
    with pytest.raises(anynan.NonFiniteError) as caught:
        run(recipe, variant)
    event = caught.value.event
    operation, cause = event.operation, event.cause
    assert event.backend == variant[0].backend.library
    assert (event.layer, event.phase, event.kind) == (recipe.layer, recipe.phase, recipe.kind)
    assert (event.severity, event.step) == (recipe.severity, recipe.step)
    assert (operation.name if operation else None) == recipe.operation
    assert (event.then.name if event.then else None) == recipe.then
    assert cause is not None
    assert cause.tag == recipe.cause
    assert recipe.evidence in cause.evidence
    assert anynan.Event.from_json(event.to_json()) == event


@pytest.mark.parametrize(
    "recipe", [recipe for recipe in FAULTS if recipe.operation], ids=lambda r: r.name
)
def test_fault_is_found_at_its_line(recipe: StepRecipe, variant: Any) -> None:
    with pytest.raises(anynan.NonFiniteError) as caught:
        run(recipe, variant)
    assert caught.value.event.operation is not None
    source = caught.value.event.operation.source
    assert source is not None
    lines, first = inspect.getsourcelines(recipe.culprit)
    marked = [first + i for i, line in enumerate(lines) if line.rstrip().endswith("# bad")]
    assert (source.file, [source.line]) == (recipes_operations.__file__, marked)
    assert source.function == recipe.culprit.__name__


@pytest.mark.parametrize("recipe", SILENT, ids=lambda r: r.name)
@pytest.mark.parametrize("level", ["layer", "operation"])
def test_nothing_bad_is_reported(recipe: StepRecipe, level: str, variant: Any) -> None:
    tracker = run(recipe, variant, level=level)
    assert {event.severity for event in tracker.events} <= {"suspect"}
    assert not tracker.notes
    noted = {
        (event.layer, event.phase, event.kind)
        for event in tracker.events
        if event.operation is None
    }
    expected = set() if recipe.kind is None else {(recipe.layer, recipe.phase, recipe.kind)}
    assert noted == expected


@pytest.mark.parametrize(
    "recipe", [recipe for recipe in SILENT if recipe.contained], ids=lambda r: r.name
)
def test_contained_operation_is_shown(recipe: StepRecipe, variant: Any) -> None:
    tracker = run(recipe, variant, level="operation")
    shown = {(event.layer, event.operation.name) for event in tracker.events if event.operation}
    assert shown == {("body", recipe.contained)}


def test_every_recipe_can_fail() -> None:
    """A name stands for one recipe, and no fault's expectations are those of silence."""
    names = [recipe.name for recipe in (*FAULTS, *SILENT)]
    assert len(set(names)) == len(names)
    assert all(recipe.kind and recipe.cause for recipe in FAULTS)
