"""Warnings, logs and tracebacks show the user's line, and tell no story twice at length."""

import logging
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anynan
from anynan.errors import AnynanWarning
from tests.fake_adapter import Layer, Model, track
from tests.processes import python

BAD = np.array([1.0, np.nan])


def caught(call: Any, times: int = 1) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(times):
            call()
    return [item for item in found if item.category is AnynanWarning]


def warned(mark: str, call: Any) -> None:
    """Require a warning at the line of this file that ends in a mark."""
    (found, *_) = caught(call)
    assert found.filename == __file__
    line = Path(__file__).read_text("utf-8").splitlines()[found.lineno - 1]
    assert line.endswith(f"# {mark}"), str(found.message)


def test_a_warning_points_at_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYNAN", "warn")
    tracker = anynan.track(np.log)
    warned("the step", lambda: tracker(np.array([-1.0])))  # the step
    warned("the check", lambda: anynan.check(BAD))  # the check
    warned("the loop", lambda: [None for _ in anynan.watch([BAD])])  # the loop


def test_a_line_inside_a_framework_is_not_the_users() -> None:
    torch = pytest.importorskip("torch")
    layer = type("Log", (torch.nn.Module,), {"forward": lambda _, x: torch.log(x)})
    model = torch.nn.Sequential(layer(), layer())
    tracker = anynan.torch.track(model, action="warn")
    warned("the call", lambda: model(-torch.ones(2)))  # the call
    tracker.remove()


@pytest.mark.parametrize("fn", [np.log, lambda x: x / x, lambda x: x])
def test_a_report_that_a_filter_makes_an_exception_is_the_report(fn: Any) -> None:
    x = np.array([0.0, -1.0, np.nan])
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("error")
        with pytest.raises(AnynanWarning) as error:
            anynan.track(fn, action="warn")(x)
    assert str(error.value).startswith("NaN ")


def test_the_same_fault_is_told_once_and_then_in_a_line_with_a_count() -> None:
    model = Model(Layer("first", ("log",)))
    tracker = track(model, model=model, action="warn")
    first, *later = [str(w.message) for w in caught(lambda: tracker(np.array([-1.0])), 120)]
    assert first.count("\n") > 4
    assert all("\n" not in text and "logarithm" in text for text in later)
    counts = [f"{times} times since step 0" for times in (2, 3, *range(10, 101, 10))]
    assert [text.rpartition("; ")[2] for text in later] == counts
    (event,) = tracker.events
    assert (event.step, event.times, tracker.count("bad")) == (0, 120, 120)
    assert tracker.report().count("event  ") == 1
    assert "; 120 times" in tracker.report()


def divide(x: np.ndarray) -> np.ndarray:
    with anynan.scope("head"):
        return x / x


def test_an_event_is_one_record_with_its_facts(caplog: pytest.LogCaptureFixture) -> None:
    step = anynan.track(divide, action="record")
    with caplog.at_level(logging.INFO), np.errstate(all="ignore"):
        step(np.zeros(2))
    (record,) = caplog.records
    (event,) = step.events
    assert (record.name, record.levelname) == ("anynan", "ERROR")
    assert record.getMessage() == anynan.reports.render(event, "line")
    logged = anynan.Event.from_dict(vars(record)["anynan"])
    # What it spread to is known at the step's end.
    assert replace(logged, spread=event.spread) == event


def test_a_direct_check_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(anynan.NonFiniteError):
        anynan.check(BAD)
    with pytest.warns(anynan.AnynanWarning):
        anynan.check(np.array([2.0]), policy=anynan.Policy(large=1.0))
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


def test_nothing_is_printed_where_nobody_asked(tmp_path: Path) -> None:
    code = "import anynan, numpy as np; list(anynan.watch([np.array([np.nan])], action='record'))"
    done = python("-c", code, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("", "")


def test_the_traceback_of_a_tracked_step_or_check_is_the_users_alone() -> None:
    for call in (lambda: anynan.track(divide)(np.zeros(2)), lambda: anynan.check(BAD, "x")):
        with pytest.raises(anynan.NonFiniteError) as caught, np.errstate(all="ignore"):
            call()
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert {frame.filename for frame in frames} == {__file__}
