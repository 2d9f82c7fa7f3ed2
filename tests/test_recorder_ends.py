"""``level="step"`` of array code: the function's own arrays, one call after the other."""

import gc
import weakref
from array import array
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import anynan
from tests.counting import python_calls
from tests.failing import failure
from tests.recording import LEVELS, centre, entropy, failing, line_of


def test_the_function_gets_its_own_arrays() -> None:
    look = anynan.track(lambda x, more: (x + 1, [x, more["y"]]))
    x, y = np.ones(3), np.ones(3)
    result, seen = look(x, {"y": y})
    assert seen[0] is x and seen[1] is y
    assert type(result) is np.ndarray


def test_an_argument_that_is_written_into_is_read_and_run_again_from_what_it_was() -> None:
    x = np.array([2.0, 2.0])
    event = failing(centre, x)
    assert event.operation.name == "divide"
    assert event.operation.inputs[0].max == 0
    assert np.isnan(x).all()  # as without anynan: written once, by the first run


def test_random_numbers_are_those_of_the_first_run() -> None:
    calls = array("b")  # which is not put back: a second run draws more

    def draw(x: Any) -> Any:
        calls.append(1)
        y = np.sqrt(x - np.random.rand(3).max() - 1)  # noqa: NPY002
        np.random.rand(len(calls))  # noqa: NPY002
        return y

    np.random.seed(3)  # noqa: NPY002
    expected = np.random.rand(3).max()  # noqa: NPY002
    np.random.rand()  # noqa: NPY002
    after = np.random.rand()  # noqa: NPY002
    np.random.seed(3)  # noqa: NPY002
    event = failing(draw, np.ones(1))
    assert event.operation.inputs[0].min == pytest.approx(-expected)
    assert np.random.rand() == after  # noqa: NPY002


@LEVELS
@pytest.mark.parametrize("mode", ["raise", "call", "log"])
def test_what_the_user_asked_numpy_for_is_done(mode: Any, level: Any) -> None:
    heard = Mock()
    tracked = anynan.track(lambda x: np.nan_to_num(np.log(x)), level=level)
    ends = pytest.raises(FloatingPointError) if mode == "raise" else nullcontext()
    with np.errstate(all=mode, call=heard), ends:
        tracked(np.zeros(2))
    assert (heard.call_count, heard.write.call_count) == (mode == "call", mode == "log")


@LEVELS
def test_what_the_function_tells_numpy_to_do_about_errors_stays(level: Any) -> None:
    def settle(x: Any, mode: str) -> Any:
        np.seterr(over=mode)  # type: ignore[arg-type]
        return x + 1

    tracked, before = anynan.track(settle, level=level), np.geterr()
    try:
        for mode in ("ignore", "warn", "raise"):
            tracked(np.ones(2), mode)
            assert np.geterr() == {**before, "over": mode}
    finally:
        np.seterr(**before)


def test_what_a_call_hid_is_not_told_of_the_next() -> None:
    def part(x: Any, hide: bool) -> Any:
        if hide:
            return np.maximum(np.log(x * 0), 0)
        x[:] = -1  # too large to be kept, so the error log is asked
        return np.sqrt(x)

    tracked, x = anynan.track(part), np.ones(20_000)
    with np.errstate(all="ignore"):
        for _ in range(3):
            tracked(x, True)
        event = failure(tracked, x, False)
    assert event.operation.name == "sqrt"
    notes = " ".join(event.notes)
    assert "too large to be kept" in notes
    assert "error log of the first run" in notes


def test_a_loader_inside_does_not_accuse_the_data() -> None:
    event = failing(lambda x: [y.sum() for y in anynan.watch([np.log(-x)])], np.ones(2))
    assert (event.phase, event.operation.name) == ("forward", "log")
    event = failing(lambda x: [x.sum() for x in anynan.watch([np.full(2, np.nan)])], np.ones(2))
    assert event.phase == "input"


def test_what_the_program_makes_of_a_bad_result_and_hands_back_is_no_bad_batch() -> None:
    @anynan.track(action="warn")
    def slope(t: float, y: Any) -> Any:
        return np.array([y[1], -np.sqrt(y[0])])

    y = np.array([0.01, -1.0])
    with np.errstate(invalid="ignore"), pytest.warns(anynan.AnynanWarning) as said:
        for i in range(5):
            y = y + 0.1 * slope(0.1 * i, y)
    (event,) = slope.events
    assert event.operation is not None and event.operation.name == "sqrt"
    assert "the input of slope is bad, and came after its own step 1" in str(said[1].message)


def spoilt(x: Any) -> Any:
    y = np.asarray(x)
    y[0] /= y[1]
    return x * 2


def solves(x: Any) -> Any:
    y = np.log(x)
    assert not np.isnan(y).any(), "not in the domain"
    return y


@pytest.mark.parametrize(
    ("function", "clean", "bad"),
    [
        (entropy, np.full(2, 0.5), np.array([0.5, 0.0])),
        (centre, np.array([1.0, 2.0]), np.full(2, 2.0)),
        (centre, np.arange(20_000.0), np.full(20_000, 2.0)),
        (spoilt, np.ones(3), np.zeros(3)),
        (solves, np.ones(3), -np.ones(3)),
        (entropy, np.full(20_000, 0.5), np.linspace(0, 1, 20_000)),
        (entropy, np.full(2, 0.5), np.array([0.5, np.nan])),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_later_call_is_told_as_the_first_one(function: Any, clean: Any, bad: Any) -> None:
    """The first call of a function is looked at more closely than those of plain arrays after."""

    def told(*, after: int) -> tuple[Any, Any]:
        tracked, given = anynan.track(function), bad.copy()
        for _ in range(after):
            tracked(clean.copy())
        return replace(failure(tracked, given), step=0, order=0), given

    (first, once), (event, again) = told(after=0), told(after=3)
    assert event == first
    assert event.operation is not None or event.phase == "input"
    np.testing.assert_array_equal(once, again)


def test_clean_calls_of_plain_arrays_are_in_the_history() -> None:
    tracked = anynan.track(lambda x, y: (x * y, x.sum()))
    for scale in (1.0, 2.0, 4.0):
        tracked(np.full(4, scale), np.arange(4))
    readings = tracked.history.last()
    assert [(r.phase, r.site.tensor) for r in readings] == [
        ("input", "x"), ("forward", "result[0]"), ("forward", "result[1]")
    ]  # fmt: skip
    assert len(tracked.history) == 3
    for reading, largest in zip(readings, (4.0, 12.0, 16.0), strict=True):
        assert reading.absmax is not None
        assert reading.absmax >= largest  # where one number clears an array, it bounds it
    assert tracked.step == 3


def ends_badly(x: Any) -> Any:
    if x[0] > 2:
        raise KeyboardInterrupt
    if x[0] > 1:
        raise KeyError
    return x * 2


def test_a_call_that_ends_badly_leaves_nothing_behind() -> None:
    tracked = anynan.track(ends_badly)
    for _ in range(3):
        tracked(np.ones(3))
    for scale in (2.0, 3.0):
        x = np.full(3, scale)
        held = weakref.ref(x)
        with suppress(KeyError, KeyboardInterrupt):
            tracked(x)
        del x
        gc.collect()
        assert held() is None
    assert tracked(np.ones(3)).tolist() == [2, 2, 2]
    assert np.geterr()["invalid"] == "warn"


def usual_calls(tracked: Any, *args: Any) -> int:
    """Count the calls of Python in a call that is not the first."""
    for _ in range(5):
        tracked(*args)
    return python_calls(tracked, *args)


SCALE = [np.full(3, 2.0) for _ in range(50)]


def test_a_clean_call_calls_little() -> None:
    """What a call costs is counted: Python calls, those of the function itself left out."""
    assert usual_calls(anynan.track(np.negative), np.ones(1000)) <= 13
    assert usual_calls(anynan.track(lambda x: x * SCALE[0]), np.ones(3)) <= 250
    arrays = [np.ones(10) for _ in range(200)]
    named = {f"w{i}": x for i, x in enumerate(arrays)}
    assert usual_calls(anynan.track(lambda *xs: xs[0] + 1), *arrays) <= 14
    assert usual_calls(anynan.track(lambda xs: xs[0] + 1), arrays) <= 14
    assert usual_calls(anynan.track(lambda x: x[0][0]["w0"] + 1), ([named], 1.0)) <= 14


class Network:
    """Keep state two attributes below what the tracked method is bound to."""

    def __init__(self) -> None:
        self.layers = [SimpleNamespace(weight=np.ones(2))]

    def step(self, x: Any) -> float:
        self.layers[0].weight = np.sqrt(self.layers[0].weight - x)
        return float(x.sum())


@pytest.mark.parametrize("level", ["step", "layer"])
def test_state_two_attributes_down_is_told_in_the_step_that_spoils_it(level: Any) -> None:
    network = Network()
    event = failing(network.step, np.full(2, 2.0), level=level)
    assert event.step == 0
    assert event.operation.name == "sqrt"
    assert event.operation.source.line == line_of(Network.step, "np.sqrt")
    assert type(network.layers[0].weight) is np.ndarray


TABLE = np.ones(3)


def test_state_that_was_bad_already_or_is_set_so_is_no_news() -> None:
    """Without an operation that makes a NaN, a NaN in what the code reaches may be meant."""

    def clear(x: Any) -> float:
        TABLE[:] = np.nan
        return float(x.sum())

    tracked = anynan.track(clear)
    for _ in range(3):
        tracked(np.ones(2))
    assert tracked.events == ()


def silent(rho: Any) -> int:
    return int(np.isfinite(rho / rho).sum())


def test_a_nan_in_a_call_that_gives_nothing_to_read_is_told_once() -> None:
    tracked = anynan.track(silent)
    with pytest.warns(anynan.AnynanWarning) as caught, np.errstate(all="ignore"):
        for i in range(5):
            tracked(np.array([1.0, float(i % 2)]))
    (text,) = [str(w.message) for w in caught]
    assert "Suspect: NaN first appeared in `silent`" in text
    assert "invalid value in divide" in text
    (event,) = tracked.events
    assert event.operation.source.line == line_of(silent, "rho / rho")
    assert "nothing went bad" not in tracked.report()


def recursion(noise: float) -> Any:
    gain, spread = np.zeros(2), np.zeros((2, 2))
    for _ in range(3):
        seen = spread[0, 0] + noise
        gain = gain + spread[:, 0] / seen
    return gain


def test_arrays_that_the_function_makes_itself_are_watched_where_nothing_else_explains() -> None:
    event = failing(recursion, 0.0)
    assert (event.operation.name, event.cause.tag) == ("divide", "divide_by_zero")
    assert event.operation.source.line == line_of(recursion, "spread[:, 0] / seen")
    assert type(np.zeros(1)) is np.ndarray
    assert type(np.random.default_rng()) is np.random.Generator


def fit(x: Any) -> Any:
    """Refuse what is not finite, as scikit-learn's estimators do."""
    x = np.asarray(x, dtype=float)
    if not np.isfinite(x).all():
        raise ValueError("Input X contains infinity or a value too large for float64.")
    return x.mean()


def test_a_library_that_refuses_what_is_bad_is_told_with_where_that_came_from() -> None:
    event = failing(fit, np.array([1.0, np.nan, 2.0]))
    assert (event.phase, event.tensor, event.notes) == ("input", "x", ())
    assert "1 of 3 rows is bad: 1" in event.cause.evidence
    event = failing(lambda x: fit(np.log(x)), np.array([1.0, 0.0]))
    assert (event.kind, event.cause.tag) == ("neginf", "log_of_zero")


def test_what_is_known_to_be_bad_is_not_looked_into_again() -> None:
    tracked = anynan.track(lambda w, x: w * x, action="record")
    x, bad, other = np.ones(4), np.array([1.0, np.nan, 1.0, 1.0]), np.array([np.nan, 1.0, 1.0, 1.0])
    with np.errstate(all="ignore"):
        clean = usual_calls(tracked, x, x)
        later = usual_calls(tracked, bad, x)
        assert later <= clean + 40
        (event,) = tracked.events
        assert (event.phase, event.tensor, event.step) == ("input", "w", 6)
        assert event.spread.count >= 5
        assert any("the same bad values came in" in remark for remark in tracked.notes)
        tracked(other, x)
        assert len(tracked.events) == 2  # other values are news
        tracked(x, x)
        before = tracked.events[0].spread.count
        tracked(bad, x)
        assert len(tracked.events) == 2
        assert tracked.events[0].spread.count == before + 1
        assert tracked.step == 15


def test_an_exception_over_known_bad_values_reaches_the_program() -> None:
    tracked, bad = anynan.track(lambda w, i: [w + 1][i], action="record"), np.array([np.nan])
    for _ in range(3):
        assert np.isnan(tracked(bad, 0)).all()
    with pytest.raises(IndexError):
        tracked(bad, 1)
    assert np.isnan(tracked(bad, 0)).all()
