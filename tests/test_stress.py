"""A hunt over array code: margins, rules, what is told and what is not."""

from typing import Any

import numpy as np
import pytest

import anynan
from anynan._apps.stress.inputs import Input
from anynan._apps.stress.rules import trials

X = np.random.default_rng(0).random((6, 3))


def _shares(x: Any) -> Any:
    return x / x.sum(axis=1, keepdims=True)


def _standard(x: Any) -> Any:
    return (x - x.mean()) / x.std()


def test_the_example_run_lists_each_edge_with_its_distance() -> None:
    def fn(x: Any) -> Any:
        return np.log(x) + np.exp(x)

    log, exp = sorted(anynan.stress(fn, X).margins, key=lambda margin: -margin.bits)
    assert log.site.operation == "log"
    assert log.distance == X.min()
    assert str(log).startswith(f"log at test_stress.py:{fn.__code__.co_firstlineno + 1}: smallest")
    assert exp.distance == pytest.approx(np.log(np.finfo(float).max) - X.max(), abs=1e-3)


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (np.log, "log: smallest argument 0.25 "),
        (lambda x: 1 / x, "divide: divisor nearest 0 0.25 "),
        (np.sqrt, "sqrt: smallest argument 0.25 "),
        (lambda x: x**0.5, "pow: smallest base 0.25 "),
        (lambda x: x**-2, "pow: base nearest 0 0.25 "),
        (np.arcsin, "asin: largest argument 0.75 "),
        (np.exp, "exp: largest argument 0.75 "),
        (np.linalg.norm, "vector_norm: smallest result (its gradient) 0.9354 "),
        (np.std, "std: smallest result (its gradient) 0.2041 "),
        (lambda x: np.outer(x, x[:2]).var(axis=0, ddof=1), "var: fewest elements 3 "),
        (lambda x: x.astype(np.float16), "astype: largest result 0.75 "),
        (lambda x: x.astype(np.float16).sum(), "sum: largest result 1.5 "),
    ],
)
def test_an_operation_with_an_edge_is_listed(fn: Any, told: str) -> None:
    margins = anynan.stress(lambda x: fn(x), np.array([0.25, 0.5, 0.75]), budget=1e-9).margins
    found = [f"{x.site.operation}: {x.site.edge.what} {x.number:.4g} " for x in margins]
    assert told in found


def test_inputs_by_rule_are_made_of_every_kind_of_input() -> None:
    rows, labels = np.arange(6.0).reshape(3, 2), np.array([0, 1, 1])
    given = {"x": rows, "z": rows + 1, "y": labels, "seen": labels == 0}
    inputs = [Input.of(name, x, None) for name, x in given.items()]
    words = {trial.words for trial in trials(inputs)}
    of_rows = ["a row of zeros", "a row of ones", "two rows alike", "all rows alike", "all equal"]
    of_rows += ["zeros", "ones", "a row of equal numbers", "100 times as far apart"]
    of_rows += ["at the low end of the range", "a row at the high end of the range"]
    assert {f"x: {text}" for text in of_rows} <= words
    assert {"y: all labels are ignored", "y: all are 0", "y: all are 1"} <= words
    assert {"seen: the mask is False throughout", "seen: the mask is True throughout"} <= words
    assert "seen: nothing is left of the first row of the mask" in words
    assert {"z: the same as x", "one row only", "an empty batch", "length one"} <= words


def test_a_sample_that_spoils_the_others_is_told_outside_of_the_range() -> None:
    (finding,) = anynan.stress(lambda x: x - x.mean(axis=0), X).findings
    assert finding.words == "x: a NaN in the first row spoils other rows"
    assert finding.group == "outside"
    assert anynan.stress(lambda x: x - x.mean(axis=1, keepdims=True), X).findings == []


def test_equal_numbers_are_found_with_line_cause_and_fix() -> None:
    report = anynan.stress(_standard, X)
    (finding,) = [each for each in report.findings if each.group == "inside"]
    event = finding.event
    assert finding.words == "x: all equal"
    assert finding.numbers == f"18 of 18 numbers of x are 0.5291, and were {X.min():.4g} to 0.9351"
    assert f"   inputs   {finding.numbers}\n" in str(report)
    assert (event.operation.name, event.cause.tag) == ("divide", "divide_by_zero")
    assert event.operation.source.text == "return (x - x.mean()) / x.std()"
    assert event.tried.outcome == "finite"
    assert not report.ok


def test_what_a_step_prints_counts_as_what_it_returns() -> None:
    def step(x: Any) -> None:
        print(np.log(np.abs(x).sum(axis=1)).mean())

    def hidden(x: Any) -> None:
        print(np.where(x > 0, np.log(np.abs(x)), 0).sum())

    first = anynan.stress(step, X - 0.5).findings[0]
    assert (first.words, first.group) == ("x: a row of zeros", "inside")
    assert (first.event.severity, first.event.operation.name) == ("bad", "log")
    assert "contained" not in str(first.event)
    assert anynan.stress(hidden, X - 0.5).ok


def test_a_domain_says_what_can_come_in_and_nothing_else_is_tried() -> None:
    assert anynan.stress(_shares, X + 1, domain=(0, 2)).findings[0].group == "inside"
    assert anynan.stress(_shares, X + 1, domain={"x": (0.5, 2)}).findings == []


def test_an_input_that_the_code_refuses_does_no_harm() -> None:
    def careful(x: Any) -> Any:
        if not x.any(axis=1).all():
            raise ValueError("an empty row")
        return _shares(x)

    assert anynan.stress(careful, X, domain=(0, 1)).findings == []


def test_the_same_seed_gives_the_same_answer() -> None:
    one, two = (anynan.stress(_standard, X, seed=3) for _ in range(2))
    assert (str(one), one.runs) == (str(two), two.runs)


def test_a_hunt_leaves_no_trace() -> None:
    weights, x = np.ones(3), X.copy()

    def fn(x: Any) -> Any:
        weights[:] += x[0]
        x[0] = 7
        return _shares(x * weights)

    drawn = np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    assert anynan.stress(fn, x).runs > 10
    assert weights.tolist() == [1, 1, 1]
    assert np.array_equal(x, X)
    assert np.random.get_state()[1].tolist() == drawn  # type: ignore[index]  # noqa: NPY002


def test_what_cannot_be_stressed_is_refused() -> None:
    with pytest.raises(TypeError, match=r"stress\(\) cannot run a int on this example"):
        anynan.stress(3, X)
    with pytest.raises(ValueError, match="budget=0 leaves no time"):
        anynan.stress(np.log, X, budget=0)
    with pytest.raises(ValueError, match="domain= names 'y', and the inputs are x"):
        anynan.stress(_shares, X, domain={"y": (0, 1)})
    with pytest.raises(ValueError, match="domain= of x is empty"):
        anynan.stress(_shares, X, domain=(1, 0))


def test_an_infinity_that_is_returned_is_found_and_one_that_a_mask_hides_is_not() -> None:
    found: Any = anynan.stress(lambda x: np.log(np.abs(x).sum(axis=1)), X - 0.5).findings[0]
    assert (found.words, found.event.operation.name) == ("x: a row of zeros", "log")

    def masked(x: Any) -> Any:
        with np.errstate(divide="ignore"):
            scores = x @ x.T + np.log(np.tri(6))
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        return shares / shares.sum(axis=1, keepdims=True)

    report = anynan.stress(masked, X)
    assert [x.words for x in report.findings if x.group == "inside"] == []


def test_where_no_operation_is_seen_nothing_is_known() -> None:
    report = anynan.stress(lambda x: float(np.log(x.tolist()[0][0])), X)
    assert str(report).startswith("stress of <lambda>: not known: no operation of it was seen")
    assert not report.ok
