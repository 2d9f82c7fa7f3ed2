"""What a user of ``anynan.check`` sees: the object back, a report, or a clear refusal."""

import tracemalloc
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest

import anynan
from anynan import _checks as checking
from tests.backends import Space
from tests.counting import python_calls
from tests.failing import failure

NAN, INF = float("nan"), float("inf")
BAD = np.array([1.0, NAN])


def event_of(x: Any, *args: Any, **options: Any) -> anynan.Event:
    with pytest.raises(anynan.AnomalyError) as caught:
        anynan.check(x, *args, **options)
    return caught.value.event


def test_the_report_names_the_array_the_kind_and_the_line() -> None:
    batch = {"image": np.array([[0.5, NAN], [2.0, 1.0]], np.float32)}
    with pytest.raises(anynan.NonFiniteError) as caught:
        anynan.check(batch, "batch")  # the user's line
    for words in ("NaN", "batch['image']", "float32", "(2, 2)", "test_check.py", "user's line"):
        assert words in str(caught.value)


def test_the_first_bad_array_is_the_event_and_the_others_are_named() -> None:
    batch = {"a": np.ones(2), "b": BAD, "c": [np.array([INF]), BAD, BAD, BAD]}
    event = event_of(batch, "batch")
    assert event.tensor == "batch['b']"
    assert event.notes == (
        "also bad: batch['c'][0] (posinf), batch['c'][1] (nan), batch['c'][2] (nan), 1 more",
    )


def test_a_suspect_warns_and_a_later_bad_value_still_raises() -> None:
    policy = anynan.Policy(neginf="suspect")
    with pytest.warns(anynan.AnynanWarning):
        event = event_of([np.array([-INF]), BAD], "x", policy=policy)
    assert event.tensor == "x[1]"


def test_headroom_depends_on_the_dtype(space: Space) -> None:
    policy = anynan.Policy(headroom=2, bad=("large",))
    near = {"float16": 3e4, "float32": 3e38, "bfloat16": 3e38}
    for dtype, value in near.items():
        if space.has(dtype):
            with pytest.raises(anynan.AnomalyError) as caught:
                anynan.check(space.array([value], dtype), policy=policy)
            assert (type(caught.value), caught.value.event.kind) == (anynan.AnomalyError, "large")
            assert anynan.check(space.array([1e4], dtype), policy=policy) is not None


def test_what_is_expected_passes_and_hides_nothing_else(space: Space) -> None:
    x = space.array([NAN, 1])
    with anynan.expect(nan=True, reason="missing sensors"):
        assert anynan.check(x) is x
        assert event_of(space.array([NAN, INF, 1])).kind == "posinf"
    assert event_of(x).kind == "nan"
    with anynan.expect(nan=True, posinf=True):
        assert event_of(space.array([NAN, INF, -INF])).kind == "neginf"
    policy = anynan.Policy(large=10, bad=("large",))
    with anynan.expect(neginf=True):
        assert event_of(space.array([-INF, 11.0]), policy=policy).kind == "large"
        assert anynan.check(space.array([-INF, 9.0]), policy=policy) is not None


def test_the_policy_can_allow_by_layer() -> None:
    policy = anynan.Policy(allow=(anynan.Allow("head.*", "neginf", "a mask"),))
    x = np.array([0.0, -INF])
    with anynan.scope("head"), anynan.scope("mask"):
        assert anynan.check(x, policy=policy) is x
    assert event_of(x, policy=policy).kind == "neginf"


@pytest.mark.parametrize("word", ["off", "record"])
def test_the_environment_silences_a_check(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYNAN", word)
    assert anynan.check(BAD) is BAD


@dataclass
class Config:
    rate: float = 0.1


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (None, r"check\(\) was given None; is a return statement missing"),
        ("text", r"check\(\) cannot find an array in a str: .* pass the arrays that it holds"),
        (object(), r"cannot find an array in an object"),
        (np.float32, r"cannot find an array in a type"),
    ],
)
def test_what_holds_no_array_is_refused(x: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        anynan.check(x)


def test_a_generator_is_refused_and_not_used_up() -> None:
    generator = (x for x in [BAD])
    with pytest.raises(TypeError, match=r"would use up a generator by reading it; pass list\("):
        anynan.check(generator)
    assert next(generator) is BAD


@pytest.mark.parametrize("x", [3, True, 0.5, 2j, [], {}, (), [None, "text"], Config(), np.int8(1)])
def test_plain_values_that_cannot_be_bad_pass(x: Any) -> None:
    assert anynan.check(x) is x


def test_an_unreadable_array_is_named_by_its_path() -> None:
    opaque = type("Opaque", (), {"shape": (3,), "dtype": "float32"})
    with pytest.raises(TypeError, match=r"^batch\['spec'\]: anynan cannot read .*Opaque"):
        anynan.check({"spec": opaque()}, "batch")


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16", "g", "bfloat16"])
def test_no_array_sized_temporary_in_any_dtype(dtype: str) -> None:
    x = np.ones(2**22, getattr(ml_dtypes, dtype, dtype))
    x[-1] = np.nan
    failure(anynan.check, x[-2:])
    tracemalloc.start()
    failure(anynan.check, x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
def test_a_clean_array_is_read_once(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Mock(return_value=(0.0, 0.0))
    monkeypatch.setattr(checking, "probe", probe)
    anynan.check(np.ones((64, 64), dtype))
    anynan.check(np.ones((64, 64), dtype).T)
    assert not probe.called
    anynan.check(np.ones((64, 64), dtype), policy=anynan.Policy(large=10.0))
    anynan.check(np.ones((64, 64), dtype)[:, ::2])
    assert probe.call_count == 2


def calls_of(x: Any) -> int:
    """Count what a check costs, without a clock."""
    anynan.check(x)
    return python_calls(anynan.check, x)


@pytest.mark.parametrize("kind", [float, np.float64, np.float32, np.float16])
def test_small_things_are_looked_at_together(kind: Any) -> None:
    assert calls_of(kind(1.5)) < 12
    many = [kind(1.5)] * 1000
    for x in (many, tuple(many), dict(enumerate(many)), [*many, 1, None, "text", True]):
        assert calls_of(x) < 60
    for bad in (np.nan, np.inf):
        many[500] = kind(bad)
        event = failure(anynan.check, many, "x")
        assert event.tensor == "x[500]"
    assert anynan.check([], "x") == []


def test_the_columns_of_a_table_are_looked_at_together() -> None:
    pd: Any = pytest.importorskip("pandas")
    values = np.ones((10, 60))
    two_dtypes = pd.DataFrame(values).astype(dict.fromkeys(range(30), "float32"))
    with_others = pd.DataFrame(values).assign(when=pd.Timestamp("2026-01-01"), n=1, of="x")
    for frame in (two_dtypes, with_others):
        assert calls_of(frame) < 2000  # of 7000 with a look at each
        frame.iloc[3, 57] = np.nan
        event = failure(anynan.check, frame, "x")
        assert event.tensor == "x[57]"
        assert event.summary.first_bad == (3,)
    twice = pd.DataFrame(values, columns=["same"] * 60)
    twice.iloc[1, 59] = np.nan
    with pytest.raises(anynan.NonFiniteError):
        anynan.check(twice)
