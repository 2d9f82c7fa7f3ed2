"""What fails while anynan looks, records or reports stays anynan's: it is said, no more."""

from typing import Any

import numpy as np
import pytest

import anynan
from anynan._diagnosis import causes
from anynan._reports import report as reporting
from anynan._steps import operations
from anynan.arrays import live, records
from tests import fake_adapter as toy

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def broken(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("ours, not yours")


def logged(x: Any) -> Any:
    return np.log(x - 1.0)


def toy_event() -> anynan.Event:
    model = toy.Model(toy.Layer("a", ("log",)))
    tracker = toy.track(lambda x: model(x).loss(), model=model, action="record")
    tracker(np.array([-1.0]))
    (event,) = [event for event in tracker.events if event.severity == "bad"]
    return event


def test_a_record_that_fails_leaves_name_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "measure", broken)
    tracker = anynan.track(logged, action="record")
    assert tracker(np.zeros(2)).shape == (2,)
    (event,) = tracker.events
    assert (event.operation.name, event.kind) == ("log", "nan")
    assert event.operation.source.text == "return np.log(x - 1.0)"
    assert any("RuntimeError: ours, not yours" in note for note in event.notes)


def test_a_look_that_fails_leaves_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.LiveTape, "look", broken)
    with pytest.warns(anynan.AnynanWarning, match="the result of log could not be read"):
        tracker = anynan.track(np.log, action="record")
        assert np.isnan(tracker(-np.ones(2))).all()
    assert [event.kind for event in tracker.events] == ["nan"]


def test_a_summary_that_fails_costs_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy.ToyAdapter, "measure", broken)
    event = toy_event()
    assert (event.layer, event.kind, event.operation.name) == ("a", "nan", "log")


def test_lineage_that_fails_costs_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anynan._diagnosis.investigation.trace", broken)
    event = toy_event()
    assert (event.layer, event.phase, event.kind, event.operation) == ("a", "forward", "nan", None)
    assert "RuntimeError: ours, not yours" in event.notes[-1]


def test_a_rule_that_fails_costs_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causes, "RULES", (causes.Rule("broken", broken, "", ""),))
    said = "rule broken failed here (RuntimeError: ours, not yours)"
    assert said in toy_event().cause.text


def test_a_report_that_fails_still_raises_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "headline", broken)
    with pytest.raises(anynan.NonFiniteError, match="(?s)nan in array .*could not be written"):
        anynan.check(np.array([np.nan]))


def test_operations_that_cannot_be_judged_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "trace", broken)
    with pytest.warns(anynan.AnynanWarning, match="does not see every step: RuntimeError"):
        anynan.track(lambda x: x + 1.0, level="operation")(np.zeros(2))


def test_flags_that_cannot_be_read_cost_the_call_nothing() -> None:
    da = pytest.importorskip("dask.array")
    x = da.ones(4, chunks=2).map_blocks(broken, meta=np.empty(0))
    with pytest.warns(anynan.AnynanWarning, match="the flags of a call could not be read"):
        assert type(anynan.track(lambda x: x + 1)(x)) is da.Array


def test_questions_of_a_namespace_are_given_plain_arrays() -> None:
    strict = pytest.importorskip("array_api_strict")

    def program(x: Any) -> Any:
        xp = x.__array_namespace__()
        rows = [row for row in x]  # noqa: C416  iterated, not copied
        return (
            xp.result_type(x, x), xp.finfo(x).max, xp.can_cast(x, xp.float64), len(rows),
            xp.iinfo(xp.astype(x, xp.int32)).max,
        )  # fmt: skip

    x = strict.ones(3)
    assert anynan.track(program)(x) == program(x)
