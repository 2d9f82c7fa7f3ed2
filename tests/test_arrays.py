"""What array code is shown, asked and given: its operations, half precision, the demo."""

from functools import partial
from typing import Any

import numpy as np
import pytest

import anynan
from anynan._trace.op import Op
from anynan.arrays.observe import observe


def test_a_run_that_is_observed_leaves_no_trace() -> None:
    weights, drawn = np.ones(2), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002

    def fn(x: Any) -> Any:
        x[0] = 5
        weights[0] = np.random.rand()  # noqa: NPY002
        return x * weights

    x = np.ones(2)
    observed = observe(fn, (x,), {}, lambda op: None)
    assert observed.value.tolist() != [1, 1]
    assert (x.tolist(), weights.tolist()) == ([1, 1], [1, 1])
    assert np.random.get_state()[1].tolist() == drawn  # type: ignore[index]  # noqa: NPY002


def test_an_operation_runs_again_in_another_dtype_and_with_other_operands() -> None:
    found: list[Any] = []

    def rerun(op: Op) -> None:
        found.append(op.rerun(dtype="float16")[0].dtype)
        found.append(op.rerun({"self": np.full(2, 4.0)})[0].tolist())

    observe(np.sqrt, (np.ones(2),), {}, rerun)
    assert found == [np.float16, [2, 2]]


def test_what_the_program_raises_is_told_and_what_the_observer_raises_goes_on() -> None:
    observed = observe(lambda x: x @ np.ones(3), (np.ones(2),), {}, lambda op: None)
    assert isinstance(observed.error, ValueError)

    def broken(op: Op) -> None:
        raise KeyError(op.name)

    with pytest.raises(KeyError, match="log"):
        observe(np.log, (np.ones(2),), {}, broken)


X, W = np.ones((4, 8), np.float32), np.full((8, 8), 2.0, np.float32)


def soft(x: Any, w: Any) -> Any:
    h = x @ w
    return np.exp(h) / np.exp(h).sum(-1, keepdims=True)


def test_the_line_that_overflows_is_found_and_the_plan_keeps_it() -> None:
    report = anynan.precision(soft, X, W)
    found, plan = report.first(), report.plan
    assert (found.name, found.kind) == ("exp", "overflow")
    assert found.bits == pytest.approx(-7.08, abs=0.01)
    assert (list(plan.layers), plan.finite) == ([], True)
    assert [line for _, line in plan.lines] == [found.source.line]
    assert 'in float32: x.astype("float32") for each operand' in report.code
    with np.errstate(all="ignore"):
        assert not np.isfinite(soft(X.astype(np.float16), W.astype(np.float16))).all()


def test_what_fits_fits_and_nothing_is_changed() -> None:
    x = X.copy()
    assert anynan.precision(soft, X / 8, W).fits
    assert np.array_equal(x, X)


def test_a_number_that_becomes_0_breaks_what_divides_by_it() -> None:
    found = anynan.precision(lambda x: 1 / (x * 1e-5), X * 1e-4).first()
    assert (found.name, found.kind) == ("divide", "overflow")


def test_a_function_that_knows_no_float16_is_told_from_float32_and_never_fits() -> None:
    report = anynan.precision(lambda x: np.linalg.inv(x), np.eye(3))
    assert not report.fits
    assert report.sentence().startswith("not known")
    assert any("does not run in float16" in note for note in report.notes)


def test_a_scaled_float8_is_judged_by_the_operands_of_products() -> None:
    report = anynan.precision(lambda x, w: x @ w, X * 1000, W, dtype="float8_e4m3fn")
    assert "without one 1 operands overflow" in report.sentence()


# Bug -> what the report says: operation, line, cause.
FOUND: dict[str, tuple[str, str, str]] = {
    "softmax": ("exp", "grown = xp.exp(logits)", "exp of a number this large is beyond"),
    "variance": ("sqrt", "deviation = xp.sqrt(", "the square root of a negative number is NaN"),
    "log": ("log", "logs = xp.log(p)", "the logarithm of 0 is -Inf"),
    "batch": ("batch    x", "1 of 64 rows is bad: 5", "the batch was already bad"),
}


@pytest.mark.tier(2)
@pytest.mark.parametrize("bug", FOUND)
def test_the_bug_is_found_and_the_fixed_run_trains(bug: str, command: Any) -> None:
    train = partial(command, "demo", "--framework", "numpy", "--bug", bug)
    status, printed, _ = train()
    assert status == 0
    for words in (*FOUND[bug], "Run again with --fixed"):
        assert words in printed, printed
    printed = train("--fixed", "--steps", 120)[1]
    assert "120 steps, no reading went bad; tightest headroom" in printed
    first, last = printed.rstrip(".\n").rpartition("fell from ")[2].split(" to ")
    assert float(last) < float(first) / 2
