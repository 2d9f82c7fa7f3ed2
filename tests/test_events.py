"""Events and errors are data: they survive JSON, pickling and copying unchanged."""

import copy
import json
import math
import pickle
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

import anynan
from anynan._base.summary import Summary
from anynan.errors import AnomalyError, NonFiniteError
from anynan.events import Cause, Event, Operation, Source, Spread, Trial

NAN, INF = math.nan, math.inf


def full() -> Event:
    """Make an event with something in every field."""
    summary = Summary((2, 3), "float16", "cpu", 6, nan=1, min=-INF, max=INF, mean=NAN, rms=0.5,
                      first_bad=(1, 2))  # fmt: skip
    source = Source("model.py", 87, "attend", "w = scores.softmax(-1)", "functional.py:3 in f")
    operation = Operation("softmax", "aten.softmax", (summary,), summary, source, "a.b", "forward")
    return Event(
        backend="toy", layer="a.b", phase="forward", kind="nan", severity="bad", step=412, call=1,
        iteration=2, order=3, tensor="output", parameter="a.b.weight", summary=summary,
        operation=operation, cause=Cause("tag", "text", "fix", "evidence"),
        trail=(("a", 1.5), ("a.b", None)), spread=Spread(37, "the loss"), expected="why", rank=0,
        shard=1, then=operation, since=(400, 412), notes=("note",),
        tried=Trial("log(x + 1e-8)", "another", "step", 2.5, 0.5),
        others=(Event("toy", "b", "backward", "nan", "bad", 412),),
    )  # fmt: skip


def same(a: Any, b: Any) -> bool:
    """Compare as data, NaN equal to NaN."""
    return repr(a) == repr(b)


def test_every_field_is_in_the_json() -> None:
    event = full()
    assert set(event.to_dict()) == {field.name for field in fields(Event)}
    text = event.to_json()
    assert same(Event.from_json(text), event)
    assert "\n" not in text
    json.loads(text, parse_constant=pytest.fail)  # JSON has no NaN


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_words_that_look_like_numbers_stay_words(word: str) -> None:
    operation = Operation(word, word, (), None, Source(word, 1, word, word, word), word)
    event = Event(word, word, "forward", "nan", "bad", 0, operation=operation, notes=(word,))
    assert Event.from_json(event.to_json()) == event


def test_an_event_prints_as_the_report_that_its_tracker_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with np.errstate(invalid="ignore"), pytest.raises(NonFiniteError) as caught:
        anynan.track(np.log, level="layer")(-np.ones(2))
    event = caught.value.event
    print(event)
    assert capsys.readouterr().out == f"{caught.value}\n" == f"{anynan.reports.render(event)}\n"
    assert "the logarithm of a negative number" in str(event)
    assert repr(event).startswith("Event(backend='numpy'")


@pytest.mark.parametrize("kind", [AnomalyError, NonFiniteError])
@pytest.mark.parametrize("how", ["pickle", "copy", "deepcopy"])
def test_a_copied_error_keeps_type_report_and_event_but_no_tracker(kind: Any, how: str) -> None:
    class Hooks:
        def __reduce__(self) -> Any:
            raise TypeError("hooks cannot be pickled")

    error = kind("the report", full(), Hooks())
    copied = pickle.loads(pickle.dumps(error)) if how == "pickle" else getattr(copy, how)(error)
    assert (type(copied), str(copied), copied.tracker) == (kind, "the report", None)
    assert same(copied.event, full())
