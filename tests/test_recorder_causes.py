"""Causes that NumPy and SciPy produce beyond those of tests/conformance/recipes_causes.py.

What array code cannot produce is in ``NOT_HERE``, with the reason.
"""

import types
from typing import Any

import numpy as np
import pytest
from scipy import special

import anynan
from anynan._diagnosis.causes import RULES
from tests.conformance.recipes_causes import produced
from tests.recording import INF, NAN, ONES, failing

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

_BACKWARD = "array code has no automatic gradients: the backward pass is operations like any other"
_COMPOSITE = "the function is a framework's own; by hand it is the operations that it is made of"
_OPTIMIZER = "array code does not say what its optimizer is"
NOT_HERE = {
    **dict.fromkeys([rule.tag for rule in RULES if rule.phases == ("backward",)], _BACKWARD),
    **dict.fromkeys([rule.tag for rule in RULES if rule.phases == ("optimizer",)], _OPTIMIZER),
    **dict.fromkeys(
        ["softmax_of_inf", "softmax_fully_masked", "target_class_masked", "kl_div_domain",
         "binary_cross_entropy_saturated"],
        _COMPOSITE,
    ),
    "where_gradient_trap": _BACKWARD,
    "bad_parameter": "array code does not say which arrays are weights: a bad one is bad input",
    "running_statistics_bad": "likewise",
    "index_out_of_range": "an index out of range raises",
    "vanishing_gradient": _BACKWARD,
    "optimizer_step_too_large": _OPTIMIZER,
    "weight_written": _OPTIMIZER,
    "ctc_target_too_long": "the standard has no such loss",
    "growth_without_training": "array code does not say whether it trains",
}  # fmt: skip


def garbage(x: Any) -> Any:
    library = types.ModuleType("numpy")
    library.empty = lambda n: np.full(n, NAN)  # type: ignore[attr-defined]
    return x + anynan.arrays.namespace(library).empty(3)


def overwritten(x: Any) -> Any:
    x.flat[0] = NAN
    return x + 1


HALF, NANS, NEGINF = np.zeros(3, np.float16), np.array([1.0, NAN]), anynan.Policy(neginf="bad")
# By cause: the operation, the program and what it gets, part of the evidence, the policy.
FAULTS: dict[str, tuple[Any, ...]] = {
    "epsilon_underflow": (
        "log", lambda x: np.log(x + np.float16(1e-8)), HALF, "1e-08 rounds to 0 in float16", NEGINF,
    ),
    "logit_of_zero_or_one": ("logit", lambda x: special.logit(x), ONES, "logit(1.0) at [0]"),
    "lgamma_pole": ("lgamma", lambda x: special.gammaln(x - 1), ONES, "lgamma(0.0) at [0]"),
    "special_function_domain": (
        "bessel_y0", lambda x: special.y0(x - 2), ONES, "bessel_y0(-1.0) at [0]",
    ),
    "singular_matrix": ("slogdet", lambda x: np.linalg.slogdet(np.outer(x, x)), ONES, "", NEGINF),
    "bad_input": (None, lambda x: x, NANS, "1 of 2 rows is bad: 1"),
    "bad_label": (None, lambda target: target, NANS, "1 of 2 rows"),
    "uninitialised_memory": ("add", garbage, ONES, "3 x NaN of 3 elements"),
    "overwritten_input": ("add", overwritten, ONES, "x: 1 x NaN of 3 elements"),
    "beyond_limit": (
        None, lambda x: x * 11, ONES, "", anynan.Policy(large=10.0, bad=("large",)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("tag", FAULTS)
def test_cause_is_named(tag: str) -> None:
    name, program, x, evidence, *policy = FAULTS[tag]
    with pytest.raises(anynan.AnomalyError) as caught:
        anynan.track(program, policy=policy[0] if policy else anynan.Policy())(x.copy())
    event = caught.value.event
    assert event.cause.tag == tag, event.cause
    assert evidence in event.cause.evidence
    assert (event.operation and event.operation.name) == name
    assert not name or event.operation.source.file == __file__


def test_divergence_over_many_steps() -> None:
    step, weight = anynan.track(lambda weight: weight * np.abs(weight) * 30), np.ones(4)
    with pytest.raises(anynan.NonFiniteError) as caught:
        for _ in range(30):
            weight = step(weight)
    assert caught.value.event.cause.tag == "learning_rate_divergence"


def test_a_constant_of_the_code_is_a_cause() -> None:
    def program(x: Any) -> Any:
        with anynan.scope("layer"):
            y = x * 2
        return np.hypot(y.sum(), INF)  # placed: harmless in a layer, not in a loss

    event = failing(program, ONES)
    assert (event.phase, event.layer) == ("loss", None)
    assert (event.cause.tag, event.cause.evidence) == (
        "written_constant", "value is the constant inf",
    )  # fmt: skip


def test_every_tag_is_accounted_for() -> None:
    here = {*FAULTS, *produced("array"), "learning_rate_divergence", "written_constant"}
    tags = {rule.tag for rule in RULES}
    assert here <= tags
    assert not here & set(NOT_HERE)
    assert tags - here - set(NOT_HERE) == set()


def test_a_complex_quotient_is_quoted_whole() -> None:
    event = failing(lambda x, y: x / y, np.array([1 + 2j, 3 + 0j]), np.array([1 + 0j, 0j]))
    assert event.cause.tag == "divide_by_zero"
    assert event.cause.text == "a complex number divided by 0 is NaN"
    assert "(3.0+0j) / (0.0+0j) at [1]" in str(event)
