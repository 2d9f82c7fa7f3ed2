"""The guard on gradient norms: medians, runs, layers; plain numbers."""

import math

import pytest

from anynan import Policy
from anynan._readings.norms import Finding, Guard

NAN, INF = math.nan, math.inf


def run(guard: Guard, *norms: float | dict[str, float], group: str = "") -> list[list[Finding]]:
    each = [norm if isinstance(norm, dict) else {"": norm} for norm in norms]
    return [guard.judge(step, norm, group) for step, norm in enumerate(each)]


def test_a_median_needs_five_norms_and_leaves_the_present_one_out() -> None:
    found = run(Guard(Policy(spike=10)), 1.0, 2.0, 3.0, 1e6, 5.0, 1000.0)
    assert found[:5] == [[]] * 5
    ((finding,),) = found[5:]
    assert (finding.kind, finding.norm, finding.median) == ("spike", 1000.0, 3.0)
    assert finding.growth == ((0, 1.0), (1, 2.0), (2, 3.0), (3, 1e6), (4, 5.0), (5, 1000.0))


def test_norms_that_are_not_finite_are_judged_elsewhere_and_do_not_count() -> None:
    found = run(Guard(Policy(spike=10, vanishing=1e-9)), 1.0, NAN, INF, 1.0, 1.0, 1.0, 50.0)
    assert not any(found), "only four norms came before"
    found = run(Guard(Policy(spike=10)), *[{"a": 1.0, "b": 1.0}] * 5, {"a": NAN, "b": 1e6})
    assert not any(found)


def test_the_largest_layer_is_named_with_its_own_median() -> None:
    usual = {"a": 3.0, "b": 0.5}
    found = run(Guard(Policy(spike=10)), *[usual] * 5, {"a": 3.0, "b": 40.0})
    assert found[-1][0].layer == ""
    assert found[-1][0].largest == ("b", 40.0, 0.5)


def test_two_optimizers_are_not_compared() -> None:
    guard = Guard(Policy(spike=10))
    for step in range(20):
        assert guard.judge(step, {"critic": 1.0}, "c") == []
        assert guard.judge(step, {"generator": 500.0}, "g") == []
    assert guard.judge(20, {"critic": 500.0}, "c")


def test_an_override_is_about_its_layers_own_norm() -> None:
    guard = Guard(Policy(overrides={"head": Policy(spike=3)}))
    assert guard.on
    found = run(guard, *[{"body": 9.0, "head": 1.0}] * 5, {"body": 99.0, "head": 4.0})
    assert [(f.kind, f.layer, f.norm, f.median) for f in found[-1]] == [("spike", "head", 4.0, 1.0)]


def test_a_fading_gradient_names_the_faintest_layer_once() -> None:
    guard = Guard(Policy(vanishing=1e-6))
    norms = {"0": 1e-9, "1": 1e-7, "2": 1e-3, "3": 1.0}
    first, second, third = run(guard, norms, norms, norms | {"2": 1e-8})
    (finding,) = first
    assert (finding.kind, finding.layer, finding.norm) == ("vanishing", "0", 1e-9)
    assert finding.total == pytest.approx(1.0, rel=1e-5)
    assert finding.layers == tuple(norms.items())
    assert [f.news for f in (finding, *second)] == [True, False]
    assert [(f.layer, f.news) for f in third] == [("2", True)]
