"""Causes that NumPy and SciPy produce beyond those of tests/conformance/recipes_causes.py.

The line at fault ends in ``# bad``. What array code cannot produce is in ``NOT_HERE``, with the
reason.
"""

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import anynan
from anynan._diagnosis.causes import RULES
from tests.conformance.recipes_causes import produced
from tests.flat import split

NAN, INF = float("nan"), float("inf")
Array = np.ndarray[Any, Any]

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


@dataclass(frozen=True)
class Fault:
    tag: str
    operation: str | None
    program: Callable[..., Any]
    x: Any
    evidence: str = ""
    options: Any = None


def log_half(x: Array) -> Any:
    return np.log(x + np.float16(1e-8))  # bad


def logit(x: Array) -> Any:
    from scipy.special import logit

    return logit(x)  # bad


def gamma(x: Array) -> Any:
    from scipy.special import gammaln

    return gammaln(x - 1)  # bad


def bessel(x: Array) -> Any:
    from scipy.special import y0

    return y0(x - 2)  # bad


def inverse(x: Array) -> Any:
    return np.linalg.slogdet(np.outer(x, x))  # bad


def identity(x: Array) -> Any:
    return x


def garbage(x: Array) -> Any:
    library = types.ModuleType("numpy")
    library.empty = lambda n: np.full(n, NAN)  # type: ignore[attr-defined]
    return x + anynan.arrays.namespace(library).empty(3)  # bad


def overwritten(x: Array) -> Any:
    x.flat[0] = NAN
    return x + 1  # bad


ONES = np.ones(3)
NEGINF = {"policy": anynan.Policy(neginf="bad")}
HALF = np.ones(3, np.float16)
FAULTS = [
    Fault("epsilon_underflow", "log", log_half, HALF * 0, "1e-08 rounds to 0 in float16", NEGINF),
    Fault("logit_of_zero_or_one", "logit", logit, ONES, "logit(1.0) at [0]"),
    Fault("lgamma_pole", "lgamma", gamma, ONES, "lgamma(0.0) at [0]"),
    Fault("special_function_domain", "bessel_y0", bessel, ONES, "bessel_y0(-1.0) at [0]"),
    Fault("singular_matrix", "slogdet", inverse, ONES, options=NEGINF),
    Fault("bad_input", None, identity, np.array([1.0, NAN]), "1 of 2 rows is bad: 1"),
    Fault("bad_label", None, lambda target: target, np.array([1.0, NAN]), "1 of 2 rows"),
    Fault("uninitialised_memory", "add", garbage, ONES, "3 x NaN of 3 elements"),
    Fault("overwritten_input", "add", overwritten, ONES.copy(), "x: 1 x NaN of 3 elements"),
]  # fmt: skip


def event_of(fault: Fault) -> anynan.Event:
    with pytest.raises(anynan.AnomalyError) as caught:
        anynan.track(fault.program, **split(fault.options or {}))(fault.x.copy())
    return caught.value.event


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.tag)
def test_cause_is_named(fault: Fault) -> None:
    event = event_of(fault)
    assert event.cause.tag == fault.tag, event.cause
    assert fault.evidence in event.cause.evidence
    if fault.operation is None:
        assert event.operation is None
        return
    assert event.operation.name == fault.operation
    assert event.operation.source is not None
    lines, first = inspect.getsourcelines(fault.program)
    marked = [first + i for i, line in enumerate(lines) if "# bad" in line]
    assert [event.operation.source.line] == marked


def test_divergence_over_many_steps() -> None:
    weight = np.ones(4)

    @anynan.track
    def step(weight: Array) -> Any:
        return weight * np.abs(weight) * 30  # grows with its own size

    with pytest.raises(anynan.NonFiniteError) as caught:
        for _ in range(30):
            weight = step(weight)
    assert caught.value.event.cause.tag == "learning_rate_divergence"


def test_a_limit_is_a_cause() -> None:
    policy = anynan.Policy(large=10.0, bad=("large",))
    fault = Fault("beyond_limit", None, lambda x: x * 11, ONES, options={"policy": policy})
    event = event_of(fault)
    assert event.cause.tag == "beyond_limit"


def test_a_constant_of_the_code_is_a_cause() -> None:
    def program(x: Array) -> Any:
        with anynan.scope("layer"):
            y = x * 2
        return np.hypot(y.sum(), INF)  # placed: harmless in a layer, not in a loss

    event = event_of(Fault("written_constant", "hypot", program, ONES))
    assert (event.phase, event.layer) == ("loss", None)
    assert (event.cause.tag, event.cause.evidence) == (
        "written_constant", "value is the constant inf",
    )  # fmt: skip


def test_every_tag_is_accounted_for() -> None:
    here = {fault.tag for fault in FAULTS} | produced("array") | {
        "learning_rate_divergence", "beyond_limit", "written_constant",
    }  # fmt: skip
    tags = {rule.tag for rule in RULES}
    assert here <= tags
    assert not here & set(NOT_HERE)
    left = tags - here - set(NOT_HERE)
    assert left == set()


def test_a_complex_quotient_is_quoted_whole() -> None:
    @anynan.track
    def divide(x: Any, y: Any) -> Any:
        return x / y

    with pytest.raises(anynan.NonFiniteError) as caught, np.errstate(all="ignore"):
        divide(np.array([1 + 2j, 3 + 0j]), np.array([1 + 0j, 0j]))
    cause = caught.value.event.cause
    assert cause.tag == "divide_by_zero"
    assert cause.text == "a complex number divided by 0 is NaN"
    assert "(3.0+0j) / (0.0+0j) at [1]" in str(caught.value)
