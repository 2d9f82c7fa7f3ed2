"""Direct checks: the same fault gives the same event on every backend."""

import warnings
from dataclasses import replace
from typing import Any

import pytest

import anynan
from tests.backends import Backend, Space
from tests.conformance.recipes import FAULTS, SILENT, Recipe


def _built(recipe: Recipe, space: Space) -> Any:
    if not space.has(recipe.dtype):
        pytest.skip(f"{space.backend.value} has no {recipe.dtype}")
    return recipe.build(space)


def _event(recipe: Recipe, space: Space) -> anynan.Event:
    value = _built(recipe, space)
    if recipe.severity == "bad":
        with pytest.raises(anynan.AnomalyError) as caught:
            anynan.check(value, "x", policy=recipe.policy)
        assert isinstance(caught.value, anynan.NonFiniteError) == (recipe.kind != "large")
        return caught.value.event
    with pytest.warns(anynan.AnynanWarning) as record:
        assert anynan.check(value, "x", policy=recipe.policy) is value
    assert len(record) == 1
    # A warning carries no event: make the same reading raise to see it.
    policy = replace(recipe.policy, bad=("large",))
    with pytest.raises(anynan.AnomalyError) as caught:
        anynan.check(value, "x", policy=policy)
    return caught.value.event


@pytest.mark.parametrize("recipe", FAULTS, ids=lambda r: r.name)
def test_fault_is_reported_as_in_numpy(recipe: Recipe, space: Space) -> None:
    event = _event(recipe, space)
    assert (event.kind, event.phase, event.tensor) == (recipe.kind, "value", recipe.tensor)
    assert event.layer is None
    assert event.summary.first_bad == recipe.first_bad
    if recipe.kind in ("nan", "posinf", "neginf"):
        assert getattr(event.summary, recipe.kind) == recipe.count
    assert anynan.Event.from_json(event.to_json()) == event
    numpy_space = Space(Backend.NUMPY, Backend.NUMPY.load())
    if not numpy_space.has(recipe.dtype):
        return
    here, there = event.to_dict(), _event(recipe, numpy_space).to_dict()
    if "python" not in recipe.name:
        assert here.pop("backend") == space.backend.library
        there.pop("backend")
    for told in (here, there):
        assert told["operation"].pop("output") == told["summary"]
        told["operation"].pop("source")
        told["summary"].pop("device")
    # Sums may be added up in another order; nothing else may differ.
    for statistic in ("mean", "rms", "headroom"):
        expected = there["summary"].pop(statistic)
        if expected is not None:
            expected = pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert here["summary"].pop(statistic) == expected
    assert here == there


@pytest.mark.parametrize("recipe", SILENT, ids=lambda r: r.name)
def test_nothing_is_said(recipe: Recipe, space: Space) -> None:
    value = _built(recipe, space)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert anynan.check(value, "x", policy=recipe.policy) is value
