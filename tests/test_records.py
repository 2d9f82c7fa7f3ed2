"""One builder makes the records of every backend, and survives what cannot be described."""

from typing import Any

import numpy as np
import pytest

from anynan._arrays.measures import measure
from anynan._base.summary import Summary
from anynan._diagnosis.lineage import OpRecord
from anynan._diagnosis.messages import OPERATION_BLIND
from anynan._diagnosis.operands import at_first_nan
from anynan._diagnosis.records import Builder, Given, Origin, add_masked_rows

NAN, INF = float("nan"), float("inf")
KNOWN = Summary((2,), "float64", "cpu", 2, nan=1)


def full(array: np.ndarray) -> Summary:
    return at_first_nan(measure(array), array)


def origin(given: Given, _record: OpRecord) -> Origin:
    return Origin((3,)) if given.key == "written" else Origin((), "input", given.name)


def begun(name: str = "log") -> OpRecord:
    return OpRecord(5, name, name, "layer", "forward", None)


def _no_wider_form() -> Any:
    raise TypeError("no kernel for float64")


@pytest.mark.parametrize(
    ("run", "wide"),
    [
        (lambda: np.array([-3e38, 9e38]), 9e38),  # what the operation gives, and not only a number
        (lambda: np.array([1.0, INF]), None),
        (lambda: None, None),
        (_no_wider_form, None),
    ],
)
def test_whatever_a_wider_run_gives_is_measured_and_ends_no_report(run: Any, wide: Any) -> None:
    made, builder = Given("result", np.array([INF])), Builder(full, origin, print)
    assert builder.describe(begun("exp"), made, [], wide=lambda _: run()).wide == wide


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
