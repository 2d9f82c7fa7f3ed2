"""What breaks first in half precision, in array code."""

from typing import Any

import numpy as np
import pytest

import anynan

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
