"""Tracked steps: the same fault gives the same event on every backend with an adapter.

A backend joins by adding ``builders_<library>.py`` with its ``Program`` and ``VARIANTS``, and
with ``DIFFERENCES`` if there is a recipe that it cannot follow. ``builders_array`` serves every
library that array code is written over.
"""

import importlib
import linecache
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import pytest

import anynan
from tests import tiers
from tests.backends import Backend, Space, parse
from tests.conformance import recipes_causes, recipes_operations
from tests.conformance.recipes_causes import CAUSES, NOT_IN
from tests.conformance.recipes_operations import FAULTS, SILENT, StepRecipe
from tests.failing import failure

# NumPy says by itself that it divided by zero.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# The rule that is run by hand here does not follow these: a number's dtype, an Inf times 0.
_MEANT_OTHERWISE = {"sine_of_inf", "forced_choice"}
BUILDERS = {"array", "jax", "mlx", "tensorflow", "torch"}
_COMPILED = (Backend.JAX, Backend.TENSORFLOW)
_TURNS = 3
# What each test runs, and at which levels.
_RUN: dict[str, tuple[Sequence[StepRecipe], tuple[str, ...]]] = {
    "test_fault_is_reported_at_its_line": (FAULTS, ("layer", "step")),
    "test_cause_is_named_at_its_line": (CAUSES, ("layer",)),
    "test_nothing_bad_is_reported": (SILENT, ("layer", "step", "operation")),
}


def builders(backend: Backend) -> list[Any]:
    """Return a backend's builders, none if nothing tracks it."""
    name = f"tests.conformance.builders_{backend.library}"
    found = [importlib.import_module(name)] if find_spec(name) else []
    array = importlib.import_module("tests.conformance.builders_array")
    return [*found, array] if backend in array.BACKENDS else found


def named(made: Any) -> str:
    return made.__name__.rpartition("_")[2]


@dataclass(frozen=True)
class Way:
    backend: Backend
    made: Any
    name: str
    first: bool  # whether every recipe runs so: a variant that differs in more than when it is read

    @property
    def id(self) -> str:
        return f"{self.backend.value}-{named(self.made)}-{self.name}"


def ways(chosen: list[Backend], *, causes: bool, few: bool) -> list[Way]:
    """List the ways to run a program: if ``few``, in the first of a library alone."""
    return [
        Way(backend, made, name, not other and (not nth or (made.DIFFER and not few)))
        for backend in chosen
        for other, made in enumerate(builders(backend))
        for nth, name in enumerate(
            getattr(made, "CAUSE_VARIANTS", made.VARIANTS) if causes else made.VARIANTS
        )
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each recipe once on every backend, and in a third of the other ways in turn."""
    if "variant" not in metafunc.fixturenames:
        return
    wanted = metafunc.config.getoption("--backends")
    last = metafunc.config.stash[tiers.ASKED][-1]
    chosen = [b for b in Backend if b.installed] if wanted is None else parse(wanted)
    chosen = [backend for backend in chosen if backend.tier <= last]
    recipes, levels = _RUN[metafunc.function.__name__]
    cases = []
    for level in levels:
        found = ways(chosen, causes=recipes is CAUSES, few=level != "layer")
        early = [home(found, way) for way in found] if level == levels[0] else []
        rest = [way for way in found if not way.first]
        cases += [
            pytest.param(
                recipe, level, way, id=f"{recipe.name}-{level}-{way.id}",
                marks=[*way.backend.marks, pytest.mark.tier(1 if way in early else 2)],
            )
            for at, recipe in enumerate(recipes)
            for way in found
            if way in early
            or (last == 2 and (way.first or rest.index(way) % _TURNS == at % _TURNS))
        ]  # fmt: skip
    metafunc.parametrize(("recipe", "level", "variant"), cases, indirect=["variant"])


def home(found: list[Way], way: Way) -> Way:
    """Give the first way on the backend of another."""
    return next(each for each in found if each.backend == way.backend)


@pytest.fixture
def variant(request: pytest.FixtureRequest) -> tuple[Space, Any, str]:
    """Give where a program runs: the arrays, the builders, the name of the way."""
    backend, made, name = request.param.backend, request.param.made, request.param.name
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
    if named(made) in (reasons := NOT_IN.get(recipe.name, {})):
        pytest.skip(reasons[named(made)])
    for known in (recipe.name, f"{recipe.name}[{name}]"):
        if known in made.DIFFERENCES:
            pytest.skip(made.DIFFERENCES[known])
    if not space.has(recipe.dtype):
        pytest.skip(f"{space.backend.value} has no {recipe.dtype}")
    options = (made.VARIANTS | getattr(made, "CAUSE_VARIANTS", {}))[name]
    program = made.Program(recipe, space, **(options | more))
    with program.tracker:
        for number, batch in enumerate(recipe.batches):
            if number == recipe.spoiled:
                program.spoil()
            program.step(batch)
    return program.tracker


def reported(recipe: StepRecipe, variant: Any, source_file: str, **more: Any) -> anynan.Event:
    """Run a fault, and hold that its event says what the recipe does, at the marked line."""
    _, made, _ = variant
    expected = replace(recipe, **recipe.but.get(named(made), {}))
    event = failure(run, recipe, variant, **more)
    operation, cause = event.operation, event.cause
    assert event.backend == variant[0].backend.library
    assert cause.tag == expected.cause, (event.operation, cause)
    found = (event.layer, event.phase, event.kind, event.severity)
    assert found == (expected.layer, expected.phase, expected.kind, expected.severity)
    assert (operation.name if operation else None) == expected.operation
    assert expected.evidence in cause.evidence
    if operation is not None and event.phase != "input":  # else it is the builder's first layer
        source = operation.source
        assert source is not None
        line: int = recipe.culprit.__code__.co_firstlineno
        while not linecache.getline(source_file, line).endswith("# bad\n"):
            line += 1
        assert (source.file, source.line) == (source_file, line)
        assert recipe.culprit.__name__ in (source.function, "<lambda>")
    if variant[0].backend in made.TRIES and operation is not None and event.phase != "input":
        trial = event.tried
        assert trial is not None
        assert trial.repair in cause.fix
        alone = "finite" if expected.enough else "insufficient"
        left = [item.operation and item.operation.name for item in event.others]
        whole = trial.extent == "step"
        if variant[0].backend is Backend.JAX and expected.left and whole and not left:
            assert trial.outcome == "another", trial  # and it is not known which
            return event
        assert trial.outcome == ("another" if event.others else alone), trial
        assert left == ([expected.left] if expected.left and whole else [])
        assert all(item.tried and item.tried.outcome == "finite" for item in event.others)
        # A fix is the same words everywhere: where each run is compiled, those of a few will do.
        if expected.enough and (recipe in FAULTS or variant[0].backend not in _COMPILED):
            repairs(recipe, variant, event)
    else:
        assert event.tried is None
    return event


class Repaired:
    """Stand for ``ops``, where one function is what a fix says."""

    def __init__(self, ops: Any, name: str, code: str) -> None:
        self._ops, self._name, self._code = ops, name, code

    def __getattr__(self, name: str) -> Any:
        return self._call if name == self._name else getattr(self._ops, name)

    def _call(self, x: Any, y: Any = None) -> Any:
        where = self._ops.where
        known = {"x": x, "p": x, "y": y, "abs": abs} | {
            "maximum": lambda a, b: where(a < b, 0 * a + b, a),
            "minimum": lambda a, b: where(a > b, 0 * a + b, a),
            "clip": lambda a, b, c: where(a < b, 0 * a + b, where(a > c, 0 * a + c, a)),
            "max": lambda a, **_: self._ops.max(a),
            "isfinite": lambda a: abs(a) < math.inf,
            "where": lambda c, a, b: where(c, 0 * x + a, 0 * x + b),
            "seen": self._ops.max(x) > -math.inf,
            self._name: getattr(self._ops, self._name),
        }
        return eval(self._code, known)


def repairs(recipe: StepRecipe, variant: Any, event: anynan.Event) -> None:
    """Hold that a fix which is a function of the recipe's ``ops`` does what was told of it."""
    assert event.operation.source is not None
    name, code = event.operation.name, event.tried.repair
    if recipe.culprit is not recipe.body or f"ops.{name}(" not in str(event.operation.source.text):
        return
    if not code or code.startswith("where(seen") or recipe.name in _MEANT_OTHERWISE:
        return

    def body(ops: Any, x: Any) -> Any:
        return recipe.body(Repaired(ops, name, code), x)

    run(replace(recipe, body=body), variant)


def test_fault_is_reported_at_its_line(recipe: StepRecipe, level: str, variant: Any) -> None:
    event = reported(recipe, variant, recipes_operations.__file__, level=level)
    assert event.step == recipe.step
    assert level == "step" or (event.then and event.then.name) == recipe.then
    assert anynan.Event.from_json(event.to_json()) == event


@pytest.mark.filterwarnings("ignore:(std|var)\\(\\):UserWarning")
def test_cause_is_named_at_its_line(recipe: StepRecipe, level: str, variant: Any) -> None:
    reported(recipe, variant, recipes_causes.__file__, level=level)


def test_nothing_bad_is_reported(recipe: StepRecipe, level: str, variant: Any) -> None:
    tracker = run(recipe, variant, level=level)
    assert {event.severity for event in tracker.events} <= {"suspect"}
    assert not tracker.notes
    noted = {(x.layer, x.phase, x.kind) for x in tracker.events if x.operation is None}
    expected = set() if recipe.kind is None else {(recipe.layer, recipe.phase, recipe.kind)}
    # What leaves an inner layer is not read where only the ends of a step are.
    assert noted <= expected if level == "step" else noted == expected
    if level == "operation" and recipe.contained:
        shown = {(event.layer, event.operation.name) for event in tracker.events if event.operation}
        assert shown == {("body", recipe.contained)}


def test_every_recipe_can_fail() -> None:
    """A name stands for one recipe, and no fault's expectations are those of silence."""
    names = [recipe.name for recipe in (*FAULTS, *CAUSES, *SILENT)]
    assert len(set(names)) == len(names)
    assert set(NOT_IN) <= set(names)
    assert {name for reasons in NOT_IN.values() for name in reasons} <= BUILDERS
    assert all(recipe.kind and recipe.cause for recipe in (*FAULTS, *CAUSES))
