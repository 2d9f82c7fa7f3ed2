"""Warnings point at the user's line, and do not tell the same story at length twice."""

import warnings
from typing import Any

import numpy as np
import pytest

import anynan
from anynan.errors import AnynanWarning
from tests.fake_adapter import Layer, Model, track

LOG = ("log",)


def caught(call: Any, times: int = 1) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(times):
            call()
    return [item for item in found if item.category is AnynanWarning]


def line_of(mark: str) -> int:
    with open(__file__, encoding="utf-8") as file:
        return next(i for i, text in enumerate(file, 1) if text.rstrip().endswith(f"# {mark}"))


def warned(mark: str, call: Any) -> None:
    """Require a warning at the line of this file that ends in a mark."""
    (found, *_) = caught(call)
    assert (found.filename, found.lineno) == (__file__, line_of(mark)), str(found.message)


def test_a_warning_points_at_the_users_line() -> None:
    tracker = anynan.track(np.log, action="warn")
    warned("the step", lambda: tracker(np.array([-1.0])))  # the step


def test_checks_and_watched_batches_do_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = np.array([np.nan])
    monkeypatch.setenv("ANYNAN", "warn")
    warned("the check", lambda: anynan.check(bad))  # the check
    warned("the loop", lambda: [None for _ in anynan.watch([bad])])  # the loop


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
    model = Model(Layer("first", LOG))
    tracker = track(model, model=model, action="warn")
    first, *later = map(str, (w.message for w in caught(lambda: tracker(np.array([-1.0])), 120)))
    assert len(first.split("\n")) > 5
    assert all("\n" not in text for text in later)
    counts = [2, 3, *range(10, 101, 10)]
    assert [text.rpartition("; ")[2] for text in later] == [
        f"{times} times since step 0" for times in counts
    ]
    assert all("logarithm" in text for text in later)
    (event,) = tracker.events
    assert (event.step, event.times, tracker.count("bad")) == (0, 120, 120)
    assert tracker.report().count("event  ") == 1
    assert "; 120 times" in tracker.report()
