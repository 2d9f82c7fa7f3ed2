"""One builder makes the records of every backend, and survives what cannot be described."""

from typing import Any

import numpy as np
import pytest

from anynan._arrays.arguments import bound, parameters, positional
from anynan._arrays.measures import measure
from anynan._base.summary import Summary
from anynan._diagnosis.lineage import OpRecord
from anynan._diagnosis.messages import OPERATION_BLIND
from anynan._diagnosis.operands import at_first_nan
from anynan._diagnosis.records import (
    DETAILED,
    SMALL,
    Builder,
    Given,
    Origin,
    add_masked_rows,
    called,
    gradient_operands,
    makers,
)

NAN, INF = float("nan"), float("inf")
KNOWN = Summary((2,), "float64", "cpu", 2, nan=1)


def full(array: np.ndarray) -> Summary:
    return at_first_nan(measure(array), array)


def origin(given: Given, _record: OpRecord) -> Origin:
    return Origin((3,)) if given.key == "written" else Origin((), "input", given.name)


def begun(name: str = "log", index: int = 5) -> OpRecord:
    return OpRecord(index, name, name, "layer", "forward", None)


def builder(told: list[str] | None = None) -> Builder:
    heard: list[str] = [] if told is None else told
    return Builder(full, origin, heard.append)


def test_what_the_arrays_say_is_filled_in() -> None:
    result = Given("result", np.array([[0.0, INF], [NAN, 1.0]]))
    operands = [Given("self", np.array([2.0, 3.0])), Given("other", number=0.5)]
    record = builder().describe(begun(), result, operands, expected={"nan": "a mask"})
    assert record.output.first_bad == (1, 0), "the NaN is what a report explains"
    assert record.value is not None
    assert record.value != record.value
    assert [item.value for item in record.operands] == [2.0, 0.5]
    assert record.expected == "a mask"


@pytest.mark.parametrize(
    ("key", "parents", "source"), [("written", (3,), None), (None, (), "input")]
)
def test_bad_values_are_traced(
    key: str | None, parents: tuple[int, ...], source: str | None
) -> None:
    given = [Given("self", np.array([NAN]), key=key), Given("other", np.array([1.0]), key=key)]
    record = builder().describe(begun(), Given("result", np.array([NAN])), given)
    bad, fine = record.operands
    assert (bad.parents, bad.source) == (parents, source)
    assert (fine.parents, fine.source) == ((), None)


def test_without_a_look_only_what_is_known_is_told() -> None:
    given = Given("self", np.array([1.0, NAN]), KNOWN, "written")
    record = builder().describe(
        begun(), Given("result", np.array([NAN]), KNOWN), [given], look=False
    )
    assert record.output is KNOWN
    assert record.value is None
    assert record.operands[0].summary is KNOWN
    assert record.operands[0].parents == (3,)


def test_a_record_that_another_explains_is_not_looked_at() -> None:
    result, infinite = Given("result", known=KNOWN), Summary((2,), "float64", "cpu", 2, posinf=1)
    assert builder().fresh(begun(), result, [Given("self", known=None)])
    assert builder().fresh(begun(), result, [Given("self", known=KNOWN)])
    assert builder().fresh(begun(), result, [Given("self", known=infinite, key="written")])
    assert not builder().fresh(begun(), result, [Given("self", known=KNOWN, key="written")])
    large = Given("result", np.zeros(SMALL + 1), KNOWN)
    assert not builder().fresh(begun(index=DETAILED), large, [])
    assert builder().fresh(begun(index=DETAILED), Given("result", np.zeros(2)), [])


@pytest.mark.parametrize(("operand", "wide"), [(2.0, 1e40), (INF, None)])
def test_run_again_in_a_wider_dtype(operand: float, wide: float | None) -> None:
    given = [Given("self", np.array([operand]))]
    made = Given("result", np.array([INF]))
    record = builder().describe(begun("exp"), made, given, wide=lambda _: 1e40)
    assert record.wide == wide


def _no_wider_form() -> Any:
    raise TypeError("no kernel for float64")


@pytest.mark.parametrize(
    ("run", "wide"),
    [
        (lambda: np.array([-3e38, 9e38]), 9e38),  # what the operation gives, and not only a number
        (lambda: np.array([1 + 1j]) * 2e38, pytest.approx(2e38 * 2**0.5)),
        (lambda: np.array([1.0, INF]), None),
        (lambda: np.array([0.0]), None),
        (lambda: np.array([]), None),
        (lambda: None, None),
        (_no_wider_form, None),
    ],
)
def test_whatever_a_wider_run_gives_is_measured_and_ends_no_report(run: Any, wide: Any) -> None:
    made = Given("result", np.array([INF]))
    record = builder().describe(begun("exp"), made, [], wide=lambda _: run())
    assert record.wide == wide


def test_what_cannot_be_described_is_told() -> None:
    def refuses(array: np.ndarray) -> Summary:
        raise OSError("gone")

    told: list[str] = []
    given = [Given("self", np.array([1.0]), KNOWN, "written"), Given("other", number=1.0)]
    record = Builder(refuses, origin, told.append).describe(
        begun(), Given("result", np.array([NAN]), KNOWN), given, expected={"nan": "meant"}
    )
    assert record.output is KNOWN
    assert [item.parents for item in record.operands] == [(3,), ()]
    assert record.expected == "meant"
    assert told == [OPERATION_BLIND(what="the operands of log", error="OSError: gone")]


def test_masked_rows_are_counted() -> None:
    record = begun("softmax")
    scores = np.array([[-INF, -INF], [0.0, -INF], [NAN, -INF]])
    add_masked_rows(record, scores, -1)
    assert record.params == {"masked_rows": 1}
    empty = begun("softmax")
    add_masked_rows(empty, scores[1:], (1,))
    add_masked_rows(empty, None, 0)
    add_masked_rows(empty, np.zeros((0, 2)), 0)
    assert empty.params == {}


def test_operands_of_a_gradient_are_named() -> None:
    names = {"x": "self", "y": "result"}
    other = {"g": "grad", "h": "grad", "k": "saved", "l": "saved"}
    found = gradient_operands("ylxghkxi", names.get, other.get, [("x", "self"), ("z", "other")])
    assert found == [
        ("g", "grad"), ("y", "result"), ("l", "saved"), ("x", "self"), ("h", "grad1"),
        ("k", "saved"), ("z", "other"),
    ]  # fmt: skip


def test_makers_are_named() -> None:
    assert makers(iter(["sum", "square", "log"])) == {"of": "sum", "terms": "square"}
    assert [called("multiply", pair) for pair in ("xx", "xy", "x")] == [
        "square", "multiply", "multiply",
    ]  # fmt: skip
    assert makers([]) == {}


def test_arguments_by_name() -> None:
    def step(model: object, /, batch: object, *rest: object, lr: float = 1.0) -> None:
        pass

    assert positional(step) == ("model", "batch")
    assert bound(positional(step), (1, 2, 3), {"lr": 4}) == [
        ("model", 1), ("batch", 2), ("args[2]", 3), ("lr", 4),
    ]  # fmt: skip
    assert [p.name for p in parameters(step)] == ["model", "batch", "rest", "lr"]
    assert positional(dict.fromkeys) in ((), ("iterable", "value"))
    assert bound(positional(print), (1,), {}) == [("args[0]", 1)]
